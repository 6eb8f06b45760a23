"""The connections to a replica: which one a request gets, how many there are, and what becomes of each.

Whatever happens to a request, its connection ends or serves the next one, and nobody's place is lost.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from llmgw.gateway.connection import AHEAD_BYTES, LARGE_BYTES, PIECE_BYTES, RACE_S, Connection
from llmgw.gateway.routing import Target
from llmgw.gateway.upstream import EngineAway
from nodes.certificates import checksum_of
from tests.raw_engine import (
    ENDS,
    FINE,
    HI,
    OK,
    RESETS,
    RawEngine,
    Turn,
    ask,
    asking,
    deaf,
    outcome,
    playing,
    says,
    watching,
)

pytestmark = pytest.mark.one_database


DROPPED = ("closed the connection", b"", "")
MIB = 1024 * 1024


# --- again on the same connection, and anew -------------------------------------------------------------


@pytest.mark.parametrize("how", [ENDS, RESETS])
async def test_an_engine_that_closes_a_kept_connection_as_it_is_used_is_asked_anew(how: str) -> None:
    async with playing(says(HI), Turn(then=how), says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        assert await outcome(upstream, engine, b"second") == FINE
        assert [request.partition(b"\r\n\r\n")[2] for request in engine.requests] == [
            b"{}",
            b"second",
            b"second",
        ]
        assert len(engine.connections) == 2


@pytest.mark.parametrize(
    ("turns", "makes", "requests"),
    [
        pytest.param([Turn(then=ENDS)], DROPPED, 1, id="a new connection"),
        pytest.param([says(HI), Turn(then=ENDS), Turn(then=ENDS)], DROPPED, 3, id="a second one as well"),
        pytest.param([says(HI), says(OK, then=ENDS)], DROPPED, 2, id="one with half a head on it"),
        pytest.param(
            [says(HI), says(b"HTTP/1.1 100 Continue\r\n\r\n", then=ENDS)],
            DROPPED,
            2,
            id="one with an interim answer on it",
        ),
        pytest.param([says(HI), says(HI[:-1], then=ENDS)], (200, b"h", "broke off"), 2, id="one in a body"),
    ],
)
async def test_who_may_have_been_heard_is_not_asked_again_by_itself_after(
    turns: list[Turn], makes: tuple[int | str, bytes, str], requests: int
) -> None:
    async with playing(*turns, says(HI)) as engine, asking() as upstream:
        for _ in turns[1:2]:
            assert await outcome(upstream, engine) == FINE
        assert await outcome(upstream, engine) == makes
        assert len(engine.requests) == requests


async def test_an_engine_that_had_the_request_for_a_while_is_not_asked_again() -> None:
    later = asyncio.Event()
    turns = [says(HI), Turn(then=ENDS, after=later), says(HI)]
    async with playing(*turns) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        asyncio.get_running_loop().call_later(RACE_S + 0.05, later.set)
        assert await outcome(upstream, engine) == DROPPED
        assert len(engine.requests) == 2


async def test_an_engine_that_is_gone_when_it_is_asked_anew_may_have_heard_the_request() -> None:
    async with playing(says(HI), Turn(then=ENDS)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        engine.server.close()
        with watching() as watch, pytest.raises(EngineAway) as caught:
            await ask(upstream, engine.target, watch)
        assert caught.value.was_dropped
        assert not caught.value.is_absent


async def test_a_connection_that_the_engine_closed_is_not_used() -> None:
    async with playing(says(HI, then=ENDS), says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        await engine.closed()
        assert await outcome(upstream, engine) == FINE
        assert len(engine.requests) == 2


async def test_a_connection_on_which_something_is_said_unasked_is_not_used() -> None:
    async with playing(says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        engine.connections[0].transport.write(HI)
        await engine.closed()
        assert await outcome(upstream, engine) == FINE
        assert len(engine.connections) == 2


async def test_a_connection_ends_before_its_engine_would_end_it() -> None:
    said = OK + b"Keep-Alive: timeout=2\r\nContent-Length: 2\r\n\r\nhi"
    async with playing(says(said)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        assert await outcome(upstream, engine) == FINE
        assert len(engine.connections) == 1
        begun_s = asyncio.get_running_loop().time()
        await engine.closed()
        assert asyncio.get_running_loop().time() - begun_s < 4


# --- so many, and no more -------------------------------------------------------------------------------


async def test_who_finds_no_connection_waits_and_is_served_in_turn() -> None:
    later = asyncio.Event()
    async with playing(Turn([HI], after=later)) as engine, asking(connections=2) as upstream:
        waiting = []
        for number in range(9):
            waiting.append(asyncio.create_task(outcome(upstream, engine, b"%d" % number)))
            await asyncio.sleep(0)
        await engine.heard(2)
        assert len(engine.connections) == 2
        later.set()
        assert await asyncio.gather(*waiting) == [FINE] * 9
        assert [int(request.partition(b"\r\n\r\n")[2]) for request in engine.requests] == [*range(9)]
        assert len(engine.connections) == 2


async def test_who_waits_gets_the_place_of_a_connection_that_ended() -> None:
    said = OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi"
    async with playing(says(said, then=ENDS)) as engine, asking(connections=1) as upstream:
        assert await asyncio.gather(*(outcome(upstream, engine) for _ in range(5))) == [FINE] * 5
        assert len(engine.connections) == 5


async def test_who_waits_for_one_that_cannot_be_reached_learns_it_in_turn() -> None:
    async with playing(says(HI)) as engine:
        pass
    async with asking(connections=1) as upstream:
        told = await asyncio.gather(*(outcome(upstream, engine) for _ in range(3)))
    assert told == [("refused the connection", b"", "")] * 3


@pytest.mark.parametrize("body", [b"{}", bytes(4 * LARGE_BYTES)], ids=["a small body", "a large body"])
@pytest.mark.parametrize("others", [0, 2], ids=["nobody before it", "others before it"])
async def test_who_leaves_at_any_moment_takes_no_place_along(body: bytes, others: int) -> None:
    """One place, and so the next request would wait for good if it were lost."""
    halves = [OK + b"Content-Length: 2\r\n", b"\r\n", b"h", b"i"]
    async with playing(Turn(halves)) as engine, asking(connections=1) as upstream:
        for turns in range(45):
            before = [asyncio.create_task(outcome(upstream, engine)) for _ in range(others)]
            leaving = asyncio.create_task(outcome(upstream, engine, body))
            for _ in range(turns):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert leaving.cancelled() or leaving.result() == FINE
            async with asyncio.timeout(5):
                assert await asyncio.gather(*before, outcome(upstream, engine)) == [FINE] * (others + 1)
            assert sum(not line.over.done() for line in engine.connections) <= 2  # one, and one that ends


async def test_who_leaves_as_its_answer_is_whole_takes_no_connection_along() -> None:
    """Another has it by then."""
    loop, request = asyncio.get_running_loop(), b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
    connection = Connection(loop, lambda freed: leaving.cancel(), lambda lost: None)
    async with playing(says(HI)) as engine:
        await loop.create_connection(lambda: connection, *engine.server.sockets[0].getsockname())
        leaving = asyncio.create_task(connection.ask(request, b"{}"))
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await connection.ask(request, b"{}")).status == 200
        assert len(engine.connections) == 1
        await connection.end()


async def test_who_leaves_while_it_connects_leaves_nothing_behind() -> None:
    with deaf() as target:
        async with asking(connections=1) as upstream:
            for _ in range(2):
                with watching() as watch, pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await ask(upstream, target, watch)


async def test_when_it_stops_whoever_asks_is_told() -> None:
    async with playing(says(OK + b"Content-Length: 2\r\n\r\nh"), Turn()) as engine:
        async with asking(connections=2) as upstream:
            asked = [asyncio.create_task(outcome(upstream, engine)) for _ in range(3)]
            await engine.heard(2)
        told = await asyncio.gather(*asked)
        await engine.closed()
    assert told == [(200, b"h", "broke off"), DROPPED, DROPPED]


# --- no more than one can take --------------------------------------------------------------------------


async def test_of_an_answer_that_nobody_reads_little_is_held() -> None:
    size = 24 * MIB
    said = OK + b"Content-Length: %d\r\n\r\n" % size
    async with playing(says(said, bytes(size))) as engine, asking() as upstream:
        with watching() as watch:
            answer = await ask(upstream, engine.target, watch)
            for _ in range(200):
                await asyncio.sleep(0)
            assert engine.connections[0].transport.get_write_buffer_size() > size // 4
            largest = total = 0
            while piece := await answer.piece(5):
                largest, total = max(largest, len(piece)), total + len(piece)
            answer.close()
        assert total == size
        assert largest <= AHEAD_BYTES + PIECE_BYTES


async def test_who_reads_an_answer_late_makes_no_room_for_another_on_its_connection() -> None:
    size = 24 * MIB
    large = OK + b"Content-Length: %d\r\n\r\n" % size + bytes(size)
    async with playing(says(HI), says(large)) as engine, asking() as upstream:
        with watching() as watch:
            late = await ask(upstream, engine.target, watch)
            answer = await ask(upstream, engine.target, watch)
            for _ in range(200):
                await asyncio.sleep(0)
            (line,) = engine.connections
            before = line.transport.get_write_buffer_size()
            assert await late.piece(5) == b"hi"
            for _ in range(200):
                await asyncio.sleep(0)
            assert line.transport.get_write_buffer_size() == before > 0
            answer.close()


async def test_of_a_request_that_an_engine_does_not_read_little_is_held_twice() -> None:
    async with playing(says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        transport = engine.connections[0].transport
        transport.pause_reading()
        tracemalloc.start()
        try:
            body = bytes(16 * MIB)
            asked = asyncio.create_task(outcome(upstream, engine, body))
            for _ in range(200):
                await asyncio.sleep(0)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert not asked.done()
        assert held - len(body) < 2 * MIB
        transport.resume_reading()
        assert await asked == FINE
        assert len(engine.requests[1]) > len(body)


async def test_an_answer_that_comes_before_its_request_is_sent_is_the_end_of_that() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    async with playing(says(refusal, at_head=True), says(HI)) as engine, asking() as upstream:
        body = bytes(64 * MIB)
        assert await outcome(upstream, engine, body) == (413, b"no", "whole")
        await engine.closed()
        assert engine.connections[0].received < len(body)
        assert await outcome(upstream, engine) == FINE


async def test_an_interim_answer_does_not_end_a_request() -> None:
    interim = Turn([b"HTTP/1.1 100 Continue\r\n\r\n"], at_head=True)
    async with playing(interim, says(HI)) as engine, asking() as upstream:
        asked = asyncio.create_task(outcome(upstream, engine, bytes(8 * MIB)))
        await engine.received(8 * MIB)
        engine.connections[0].transport.write(HI)
        assert await asked == FINE


# --- where to, and what is said -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "name"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="an address"),
        pytest.param("127.0.0.1", "localhost", id="a name"),
        pytest.param("::1", "[::1]", id="an address of IPv6"),
    ],
)
async def test_a_request_is_said_in_these_bytes(host: str, name: str) -> None:
    try:
        async with playing(says(HI), host=host) as engine, asking() as upstream:
            port = engine.target.origin.rpartition(":")[2]
            target = Target("replica", "m", f"http://{name}:{port}", "key")
            headers = {"traceparent": "00-1-2-00", "tracestate": "a\r\nHost: b", "cookie": "c"}
            with watching() as watch:
                (await ask(upstream, target, watch, b'{"a": 1}', headers)).close()
    except OSError:
        if host == "::1":
            pytest.skip("no IPv6 here")
        raise
    assert engine.requests == [
        b"POST /v1 HTTP/1.1\r\n"
        b"Host: %b:%b\r\n"
        b"Authorization: Bearer key\r\n"
        b"Content-Type: application/json\r\n"
        b"Accept-Encoding: identity\r\n"
        b"traceparent: 00-1-2-00\r\n"
        b"Content-Length: 8\r\n"
        b"\r\n"
        b'{"a": 1}' % (name.encode(), port.encode())
    ]


async def test_a_name_that_can_be_none_is_nobody() -> None:
    async with asking() as upstream:
        with watching() as watch, pytest.raises(EngineAway, match="refused the connection") as caught:
            await ask(upstream, Target("replica", "m", f"http://{'x' * 64}.local:1", "key"), watch)
    assert caught.value.is_absent


async def test_a_connection_is_watched_by_the_kernel() -> None:
    async with playing(says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == FINE
        port = int(engine.target.origin.rpartition(":")[2])
        timers = [timer for remote, timer in _timers() if remote == port]
    assert timers == ["02"]  # the one of keep-alive


def _timers() -> Iterator[tuple[int, str]]:
    """Of the connections that are open: the port at their other end, and the timer that runs."""
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, _, timer, *_ = line.split()
        if state == "01":
            yield int(remote.partition(":")[2], 16), timer.partition(":")[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=engine"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@asynccontextmanager
async def certified(certificate: Path, *turns: Turn) -> AsyncIterator[RawEngine]:
    """An engine that shows it, and a target that knows it by it."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with playing(*turns, tls=tls) as engine:
        engine.target = _known_by(engine.target, certificate)
        yield engine


def _known_by(target: Target, certificate: Path) -> Target:
    return replace(target, certificate=checksum_of(certificate.read_text()))


@pytest.mark.parametrize(
    "at", [asyncio, uvloop], ids=["on the standard library's loop", "on the one that serves"]
)
def test_an_engine_is_known_by_its_certificate_and_by_no_name_or_date(at: Any, certificate: Path) -> None:
    async def knows() -> None:
        async with certified(certificate, says(HI)) as engine, asking() as upstream:
            assert [await outcome(upstream, engine) for _ in range(2)] == [FINE] * 2
            assert len(engine.connections) == 1
            known, engine.target = engine.target, replace(engine.target, certificate="0" * 64)
            assert await outcome(upstream, engine) == (STRANGE, b"", "")
            engine.target = replace(engine.target, certificate="")
            assert await outcome(upstream, engine) == (STRANGE, b"", "")
            assert len(engine.requests) == 2, "it has heard of none of the others"
            engine.target = known
            assert await outcome(upstream, engine) == FINE

    at.run(knows())


STRANGE = "shows another certificate than it was started with"


async def test_an_engine_that_is_to_speak_tls_is_told_nothing_in_the_clear(certificate: Path) -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1000))
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with asking() as upstream, await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = Target("replica", "m", f"https://127.0.0.1:{port}", "key", certificate="0" * 64)
        with (
            watching() as watch,
            pytest.raises(EngineAway, match="does not speak TLS as its node tells") as no,
        ):
            await ask(upstream, target, watch)
    assert no.value.is_absent
    assert len(heard) == 1
    assert b"POST" not in heard[0]
    async with certified(certificate, says(HI)) as engine, asking() as upstream:
        engine.target = replace(engine.target, origin=engine.target.origin.replace("https", "http"))
        assert (await outcome(upstream, engine))[0] == "closed the connection"
        assert engine.requests == []


async def test_a_greeting_over_tls_has_the_time_that_a_connection_has() -> None:
    async with playing(Turn()) as engine, asking() as upstream:
        target = replace(engine.target, origin=engine.target.origin.replace("http", "https"))
        with watching() as watch, pytest.raises(EngineAway, match="did not accept a connection in time"):
            await upstream.ask(target, "/v1", b"{}", {}, watch, connect_s=0.1, first_byte_s=5)
        await engine.closed()


# --- the gateway's own questions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        pytest.param(says(HI), b"hi", id="what is asked for"),
        pytest.param(says(OK + b"Content-Length: 5\r\n\r\nhello"), b"", id="more than was to be read"),
        pytest.param(says(HI.replace(b"200", b"404")), b"", id="no"),
        pytest.param(says(HI[:-1], then=ENDS), b"", id="half of it"),
        pytest.param(Turn(then=ENDS), b"", id="nothing, and closes"),
        pytest.param(Turn(), b"", id="nothing"),
        pytest.param(says(HI[:-1]), b"", id="half of it, and no more"),
    ],
)
async def test_a_brief_question_to_an_engine_that_says(turn: Turn, told: bytes) -> None:
    async with playing(turn, says(HI)) as engine, asking(connections=1) as upstream:
        patience_s = 0.1 if turn.then != ENDS else 5

        async def briefly() -> bytes:
            return await upstream.ask_briefly(
                engine.target, "/tokenize", b"{}", patience_s=patience_s, limit_bytes=4
            )

        assert await briefly() == told
        assert await briefly() == b"hi"


# --- the loop that serves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(
            lambda: test_an_engine_that_closes_a_kept_connection_as_it_is_used_is_asked_anew(RESETS),
            id="a race",
        ),
        pytest.param(test_who_finds_no_connection_waits_and_is_served_in_turn, id="a line"),
        pytest.param(lambda: test_who_leaves_at_any_moment_takes_no_place_along(b"{}", 2), id="who leaves"),
        pytest.param(
            lambda: test_who_leaves_at_any_moment_takes_no_place_along(bytes(4 * LARGE_BYTES), 0),
            id="who leaves in the middle of a large body",
        ),
        pytest.param(test_who_leaves_while_it_connects_leaves_nothing_behind, id="who leaves, not heard"),
        pytest.param(test_when_it_stops_whoever_asks_is_told, id="the end"),
        pytest.param(test_of_an_answer_that_nobody_reads_little_is_held, id="a client that does not read"),
        pytest.param(
            test_of_a_request_that_an_engine_does_not_read_little_is_held_twice,
            id="an engine that does not read",
        ),
        pytest.param(
            test_an_answer_that_comes_before_its_request_is_sent_is_the_end_of_that, id="an early answer"
        ),
        pytest.param(test_a_connection_is_watched_by_the_kernel, id="what the kernel is told"),
    ],
)
def test_on_uvloop_as_well(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """pytest's is the one of the standard library."""
    uvloop.run(test())
