"""What an engine says means the same wherever its bytes are cut, and the same as it meant to aiohttp.

Engines' recorded answers, answers made up in all ways in which they may be said, and those with a fault: as
many as there is time for, where SOAK_SECONDS gives it.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from llmgw.gateway.connection import Broken, Connection
from llmgw.gateway.patience import Watch
from llmgw.gateway.routing import Target
from llmgw.gateway.upstream import EngineAway
from tests import aiohttp_upstream
from tests.raw_engine import ENDS, HI, OK, STAYS, Turn, asking, playing

pytestmark = pytest.mark.one_database

SOAK_S = float(os.environ.get("SOAK_SECONDS", "0"))
EXAMPLES = 60
PLACES = 30  # to cut in two at, where there is no time for all
SEED = int(os.environ.get("SOAK_SEED", "1"))
STREAM = "text/event-stream"

Outcome = tuple[Any, ...]
_FRAMING = re.compile(rb"(?i)(content-length|transfer-encoding):")


# --- answers ----------------------------------------------------------------------------------------------


def _recorded() -> Iterator[tuple[str, bytes]]:
    """As they were said: with a length, or an event to a chunk."""
    engines = Path(__file__).parent / "data" / "engines"
    for path in sorted(engines.glob("**/*.txt")):
        text = re.sub(rb"(?m)^###.*\n", b"", path.read_bytes().replace(b"\r\n", b"\n"))
        head, _, body = text.partition(b"\n\n")
        if not head.startswith(b"HTTP/"):
            continue  # what they count, without a head
        lines = [line for line in head.split(b"\n") if not _FRAMING.match(line)]
        if b"text/event-stream" in head:
            lines.append(b"Transfer-Encoding: chunked")
            body = b"".join(_chunk(event + b"\n\n") for event in body.split(b"\n\n")) + b"0\r\n\r\n"
        else:
            lines.append(b"Content-Length: %d" % len(body))
        yield f"{path.parent.name}/{path.stem}", b"\r\n".join(lines) + b"\r\n\r\n" + body


def _chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


RECORDED = dict(_recorded())


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """As they may be said."""
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 A\r\nLink: b\r\n\r\n"])
    )
    status = draw(st.sampled_from([b"200 OK", b"200", b"404 Not Found", b"503 No", b"204 A", b"304 B"]))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=4))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    framing = draw(st.sampled_from(["length", "chunks", "end"]))
    body = draw(
        st.binary(max_size=40) | st.sampled_from([b"data: {}\n\ndata: [DONE]\n\n", b": x\n\n", b"{}"])
    )
    if status[:3] in (b"204", b"304"):
        said = b""
    elif framing == "length":
        headers.append(b"Content-Length: %d" % len(body))
        said = body
    elif framing == "chunks":
        headers.append(draw(st.sampled_from([b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED"])))
        cuts = sorted(draw(st.sets(st.integers(1, max(len(body) - 1, 1)), max_size=4)))
        pieces = [body[a:b] for a, b in pairwise([0, *cuts, len(body)])]
        extension = draw(st.sampled_from([b"", b";a", b';a=b;c="d"']))
        trailers = draw(st.sampled_from([b"", b"Digest: x\r\n", b"A: b\r\nC:\r\n"]))
        said = b"".join(_chunk(piece, extension) for piece in pieces if piece) + b"0\r\n" + trailers + b"\r\n"
    else:
        said = body
    head = b"HTTP/%b %b\r\n" % (version, status)
    return interim + head + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + said


HEADERS = (
    b"Content-Type: application/json",
    b"content-type:text/event-stream; charset=utf-8",
    b"Content-Type: Text/Event-Stream",
    b"Server: uvicorn",
    b"Keep-Alive: timeout=5, max=100",
    b"Connection: keep-alive",
    b"Connection: close",
    b"X-Empty:",
    b"Access-Control-Allow-Origin: ",
    b"X-Bytes: \xff\xfe",
    b"Set-Cookie: a=b",
)


@st.composite
def faulty(draw: st.DrawFn) -> bytes:
    """With a byte or a few that are others, missing, or too many."""
    said = bytearray(draw(answers()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(said)))
        gone = draw(st.integers(0, 3))
        said[at : at + gone] = draw(st.sampled_from(SCRAPS) | st.binary(max_size=3))
    return bytes(said)


SCRAPS = (b"", b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b";", b"0", b"f", b"-", b"\r\n\r\n", b"HTTP/1.1", HI)


# --- on one connection ------------------------------------------------------------------------------------


class _Wire(asyncio.Transport):
    """Ends at the next turn of the loop, as others do."""

    def __init__(self, connection: Connection, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self._connection, self._is_closing = connection, False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None: ...
    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)


async def heard(pieces: Sequence[bytes], *, ends: bool, end: socket.socket) -> Outcome:
    """What a connection makes of them: a status or none, the kind of content, the body, how it ended, and
    whether the connection may be used again."""
    free: list[Connection] = []
    connection = Connection(asyncio.get_running_loop(), free.append, lambda lost: None)
    wire = _Wire(connection, end)
    connection.connection_made(wire)
    asked = asyncio.ensure_future(connection.ask(b"", b""))
    await asyncio.sleep(0)
    for piece in pieces:
        if not wire.is_closing():
            connection.data_received(piece)
    if ends and not wire.is_closing():
        connection.eof_received()
    for _ in range(3):
        await asyncio.sleep(0)
    if not asked.done():
        asked.cancel()
        return ("nothing yet",)
    try:
        reply = asked.result()
    except Broken as broken:
        return (str(broken),)
    body, how = b"", "open"
    try:
        while reply.has_news:
            if not (piece := reply.take()):
                how = "whole"
                break
            body += piece
    except Broken as broken:
        how = str(broken)
    return reply.status, reply.content_type, body, how, bool(free) and connection.is_open


@pytest.fixture(scope="module")
def hears() -> Iterator[Callable[..., Outcome]]:
    with asyncio.Runner() as runner, socket.socket() as end:
        yield lambda *pieces, ends=False: runner.run(heard(pieces, ends=ends, end=end))


def _means_the_same_however_cut(hears: Callable[..., Outcome], said: bytes) -> None:
    every = 1 if SOAK_S else 1 + len(said) // PLACES
    for ends in (False, True):
        whole = hears(said, ends=ends)
        assert hears(*(said[at : at + 1] for at in range(len(said))), ends=ends) == whole
        for at in range(1, len(said), every):
            assert hears(said[:at], said[at:], ends=ends) == whole, at


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_answer_means_the_same_wherever_it_is_cut(
    name: str, hears: Callable[..., Outcome]
) -> None:
    said = RECORDED[name]
    status, _, _, how, _ = hears(said)
    assert (status, how) == (int(said.split()[1]), "whole")
    _means_the_same_however_cut(hears, said)


def test_any_answer_means_the_same_wherever_it_is_cut(hears: Callable[..., Outcome]) -> None:
    @given(said=answers() | faulty())
    @settings(max_examples=EXAMPLES)
    def law(said: bytes) -> None:
        _means_the_same_however_cut(hears, said)

    _holds(law)


def _holds(law: Callable[[], None]) -> None:
    """For other examples each time, until half of the time is over: there are two such laws."""
    until_s = time.monotonic() + SOAK_S / 2
    for number in count(SEED):
        seed(number)(law)()
        if time.monotonic() >= until_s:
            return


# --- and aiohttp's ----------------------------------------------------------------------------------------


async def outcome(upstream: Any, target: Target, away: type[Exception]) -> Outcome:
    """Why there is no answer; or its status, whether it is a stream, its body, and how that ended."""
    watch = Watch()
    try:
        answer = await upstream.ask(target, "/v1", b"{}", {}, watch, connect_s=5, first_byte_s=SILENT_S)
        body = b""
        try:
            while piece := await answer.piece(SILENT_S):
                body += piece
        except away as broken:
            return answer.status, answer.content_type == STREAM, body, str(broken)
        finally:
            answer.close()
        return answer.status, answer.content_type == STREAM, body, "whole"
    except away as gone:
        return (str(gone), gone.is_absent, gone.was_dropped)  # type: ignore[attr-defined]
    finally:
        watch.close()


SILENT_S = 5.0


async def both(pieces: Sequence[bytes], then: str) -> tuple[Outcome, Outcome]:
    """What it meant to aiohttp, and what it means."""
    async with playing(Turn(pieces, then)) as engine:
        older = aiohttp_upstream.Upstream()
        await older.start()
        try:
            was = await outcome(older, engine.target, aiohttp_upstream.EngineAway)
        finally:
            await older.stop()
        async with asking() as upstream:
            return was, await outcome(upstream, engine.target, EngineAway)


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_answer_means_what_it_meant_to_aiohttp(name: str) -> None:
    said = RECORDED[name]
    was, is_now = await both([said[at : at + 13] for at in range(0, len(said), 13)], STAYS)
    assert is_now == was
    assert is_now[3] == "whole"


def test_any_answer_means_what_it_meant_to_aiohttp() -> None:
    """Or its beginning, where it breaks off."""

    @given(said=answers(), cuts=st.sets(st.integers(1, 200), max_size=8), is_whole=st.booleans())
    @settings(max_examples=EXAMPLES)
    def law(said: bytes, cuts: set[int], is_whole: bool) -> None:
        if not is_whole:
            said = said[: max(cuts, default=0)]
        was, is_now = asyncio.run(both(_cut(said, cuts), ENDS))
        if was[-1] == "broke off":  # to whom what came before is lost
            assert is_now[2].startswith(was[2])
            was = (*was[:2], is_now[2], was[3])
        assert is_now == was

    _holds(law)


def _cut(said: bytes, cuts: set[int]) -> list[bytes]:
    places = [0, *sorted(cut for cut in cuts if cut < len(said)), len(said)]
    return [said[a:b] for a, b in pairwise(places)]


CLOSED = ("closed the connection", False, True)
FINE = (200, False, b"hi", "whole")
CUT_HI, NO_HI = (200, False, b"hi", "broke off"), (200, False, b"", "broke off")
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "was", "means"),
    [
        pytest.param(OK[:-2] + b"\nContent-Length: 2\r\n\r\nhi", FINE, CLOSED, id="a bare LF"),
        pytest.param(OK + b"A: b\r\n c\r\nContent-Length: 2\r\n\r\nhi", FINE, CLOSED, id="a folded header"),
        pytest.param(OK + b"A: b\r\n" * 101 + b"\r\nhi", FINE, CLOSED, id="more than a hundred headers"),
        pytest.param(
            OK + b"A: " + b"b" * 9000 + b"\r\nContent-Length: 2\r\n\r\nhi", CLOSED, FINE, id="a long header"
        ),
        pytest.param(OK + b"Transfer-Encoding: gzip\r\n\r\nhi", FINE, CLOSED, id="a coding of the transfer"),
        pytest.param(b"HTTP/1.1 101 A\r\n\r\n", (101, False, b"", "whole"), CLOSED, id="another protocol"),
        pytest.param(
            b"HTTP/1.1 000 A\r\nContent-Length: 2\r\n\r\nhi", (0, *FINE[1:]), CLOSED, id="no status"
        ),
        pytest.param(HI + b"!", CLOSED, FINE, id="more than was announced, at once"),
        pytest.param(CHUNKED + b"2 \r\nhi\r\n0\r\n\r\n", FINE, NO_HI, id="a space in a size"),
        pytest.param(CHUNKED + b"2\r\nhi0\r\n\r\n", CLOSED, CUT_HI, id="a chunk without its end"),
    ],
)
async def test_what_means_something_else_than_it_did_to_aiohttp(
    said: bytes, was: Outcome, means: Outcome
) -> None:
    assert await both([said], ENDS) == (was, means)
