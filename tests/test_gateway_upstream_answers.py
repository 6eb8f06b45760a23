"""What an engine may say on its connection, and what the gateway makes of it: an answer, or a break.

And whether the connection serves the next request: only after an answer that ended as it should.
"""

from __future__ import annotations

import gzip
import zlib

import pytest

from llmgw.gateway.connection import HEADERS, OVERHEAD_BYTES, UNPACKED_BYTES
from llmgw.gateway.upstream import EngineAway
from tests.raw_engine import (
    ENDS,
    FINE,
    HALF,
    HI,
    OK,
    RESETS,
    Turn,
    ask,
    asking,
    outcome,
    playing,
    says,
    watching,
)

pytestmark = pytest.mark.one_database


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DROPPED, BROKEN = "closed the connection", "broke off"
AGAIN, ANEW = "the same connection again", "a new connection"


def headed(*lines: bytes, body: bytes = b"hi") -> bytes:
    return OK + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def packed(how: bytes, body: bytes) -> bytes:
    return headed(b"Content-Encoding: " + how, b"Content-Length: %d" % len(body), body=body)


CASES = [
    # What is an answer.
    (HI, FINE, AGAIN, "a body of a length"),
    (headed(b"content-length:2"), FINE, AGAIN, "small letters and no space"),
    (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nhi", FINE, AGAIN, "a status without a word"),
    (b"\r\n" + HI, FINE, AGAIN, "an empty line before it"),
    (OK + b"Content-Length: 0\r\n\r\n", (200, b"", "whole"), AGAIN, "an empty body"),
    (CHUNKED + b"1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", FINE, AGAIN, "chunks"),
    (CHUNKED + b'2;a=b;c="d"\r\nhi\r\n0;e\r\n\r\n', FINE, AGAIN, "extensions of chunks"),
    (CHUNKED + b"2\r\nhi\r\n0\r\nDigest: x\r\nA: b\r\n\r\n", FINE, AGAIN, "trailers"),
    (CHUNKED + b"00002\r\nhi\r\n0\r\n\r\n", FINE, AGAIN, "a size with noughts before it"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + HI, FINE, AGAIN, "an interim answer"),
    (
        b"HTTP/1.1 103 Early Hints\r\nContent-Type: a/b\r\nTransfer-Encoding: gzip\r\n\r\n" * 9 + HI,
        FINE,
        AGAIN,
        "interim answers with headers of their own",
    ),
    (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"", "whole"), AGAIN, "204"),
    (b"HTTP/1.1 304 Not Modified\r\n\r\n", (304, b"", "whole"), AGAIN, "304"),
    (headed(b"Content-Encoding: identity", b"Content-Length: 2"), FINE, AGAIN, "a coding that is none"),
    (packed(b"gzip", gzip.compress(b"hi")), FINE, AGAIN, "a packed body"),
    (packed(b"Deflate", zlib.compress(b"hi")), FINE, AGAIN, "a body that is packed otherwise"),
    (headed(b"Keep-Alive: timeout=5, max=100", b"Content-Length: 2"), FINE, AGAIN, "as llama.cpp says it"),
    (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", (302, b"", "whole"), AGAIN, "302"),
    (headed(*[b"A: b"] * (HEADERS - 1), b"Content-Length: 2"), FINE, AGAIN, "as many headers as may be"),
    # What is one, and the last on its connection.
    (headed(b"Connection: close", b"Content-Length: 2"), FINE, ANEW, "a connection that is to be closed"),
    (headed(b"Connection: x, Close", b"Content-Length: 2"), FINE, ANEW, "to be closed, among other words"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", FINE, ANEW, "HTTP/1.0"),
    (headed(b"Keep-Alive: timeout=1", b"Content-Length: 2"), FINE, ANEW, "a second to stay open"),
    (HI + b"HTTP/1.1 200 OK\r\n", FINE, ANEW, "the beginning of another answer behind it"),
    (HI + HI, FINE, ANEW, "a second answer"),
    (HI + b"!", FINE, ANEW, "more than it announced"),
    (b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\n", (204, b"", "whole"), ANEW, "204 with a length"),
    (b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\nhello", (204, b"", "whole"), ANEW, "204 with a body"),
    (
        b"HTTP/1.1 304 X\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (304, b"", "whole"),
        ANEW,
        "304 with chunks",
    ),
    # What is none.
    (b"GET / HTTP/1.1\r\n\r\n", (DROPPED, b"", ""), ANEW, "a request"),
    (b"HTTP/1.1 0200 OK\r\n\r\n", (DROPPED, b"", ""), ANEW, "a status of four digits"),
    (b"HTTP/1.1 000 OK\r\n\r\n", (DROPPED, b"", ""), ANEW, "a status of noughts"),
    (b"HTTP/1.1 101 X\r\nUpgrade: a\r\nConnection: Upgrade\r\n\r\n", (DROPPED, b"", ""), ANEW, "a switch"),
    (b"HTTP/1.1 101 X\r\n\r\n", (DROPPED, b"", ""), ANEW, "a switch to nothing"),
    (
        OK.replace(b"\r", b"") + b"Content-Length: 2\r\n\r\nhi",
        (DROPPED, b"", ""),
        ANEW,
        "LF after the status",
    ),
    (OK + b"Content-Length: 2\n\r\nhi", (DROPPED, b"", ""), ANEW, "LF after a header"),
    (OK + b"Content-Length: 2\r\n\nhi", (DROPPED, b"", ""), ANEW, "LF after the head"),
    (headed(b"A: b\rContent-Length: 2"), (DROPPED, b"", ""), ANEW, "CR in a header"),
    (headed(b"A: b\0", b"Content-Length: 2"), (DROPPED, b"", ""), ANEW, "NUL in a header"),
    (headed(b"A: b", b" c", b"Content-Length: 2"), (DROPPED, b"", ""), ANEW, "a folded header"),
    (headed(b"A : b", b"Content-Length: 2"), (DROPPED, b"", ""), ANEW, "a space before the colon"),
    (headed(b": b", b"Content-Length: 2"), (DROPPED, b"", ""), ANEW, "a header without a name"),
    (headed(b"Content-Length: 2", b"Content-Length: 2"), (DROPPED, b"", ""), ANEW, "a length, twice"),
    (headed(b"Content-Length: 2", b"Content-Length: 1"), (DROPPED, b"", ""), ANEW, "two lengths"),
    (headed(b"Content-Length: 2, 2"), (DROPPED, b"", ""), ANEW, "two lengths in one"),
    (headed(b"Content-Length: -2"), (DROPPED, b"", ""), ANEW, "a length below nought"),
    (headed(b"Content-Length: +2"), (DROPPED, b"", ""), ANEW, "a length with a sign"),
    (headed(b"Content-Length:"), (DROPPED, b"", ""), ANEW, "a length of nothing"),
    (headed(b"Content-Length: 99999999999999999999"), (DROPPED, b"", ""), ANEW, "a length beyond all"),
    (
        headed(b"Content-Length: 2", b"Transfer-Encoding: chunked", body=b"2\r\nhi\r\n0\r\n\r\n"),
        (DROPPED, b"", ""),
        ANEW,
        "a length and chunks",
    ),
    (
        headed(b"Transfer-Encoding: chunked", b"Content-Length: 2", body=b"2\r\nhi\r\n0\r\n\r\n"),
        (DROPPED, b"", ""),
        ANEW,
        "chunks and a length",
    ),
    (headed(b"Transfer-Encoding: gzip"), (DROPPED, b"", ""), ANEW, "a coding that is not chunks"),
    (headed(b"Transfer-Encoding: gzip, chunked"), (DROPPED, b"", ""), ANEW, "a coding besides chunks"),
    (headed(*[b"Transfer-Encoding: chunked"] * 2), (DROPPED, b"", ""), ANEW, "chunks of chunks"),
    (packed(b"br", b"hi"), (DROPPED, b"", ""), ANEW, "a body that is packed in a way that nobody knows"),
    (packed(b"gzip", gzip.compress(b"hi")[:-1]), (200, b"hi", BROKEN), ANEW, "a packed body without its end"),
    (packed(b"gzip", b"hi"), (200, b"", BROKEN), ANEW, "a packed body that is none"),
    (
        packed(b"gzip", gzip.compress(bytes(UNPACKED_BYTES + 1))),
        (200, b"", BROKEN),
        ANEW,
        "a packed body that is much larger than it looks",
    ),
    (headed(*[b"A: b"] * HEADERS, b"Content-Length: 2"), (DROPPED, b"", ""), ANEW, "a header too many"),
    (CHUNKED + b"2\nhi\r\n0\r\n\r\n", (200, b"", BROKEN), ANEW, "LF after a size"),
    (CHUNKED + b"2\r\nhi0\r\n\r\n", (200, b"hi", BROKEN), ANEW, "no end of a chunk"),
    (CHUNKED + b"0x2\r\nhi\r\n0\r\n\r\n", (200, b"", BROKEN), ANEW, "a size with a sign of its base"),
    (CHUNKED + b"-2\r\nhi\r\n0\r\n\r\n", (200, b"", BROKEN), ANEW, "a size below nought"),
    (CHUNKED + b"fffffffffffffffff\r\nhi", (200, b"", BROKEN), ANEW, "a size beyond all"),
    (CHUNKED + b"2\r\nhi\r\n0\r\nA : b\r\n\r\n", (200, b"hi", BROKEN), ANEW, "a trailer that is none"),
    (
        CHUNKED + b"2\r\nhi\r\n0\r\n" + b"A: b\r\n" * (HEADERS + 2),
        (200, b"hi", BROKEN),
        ANEW,
        "trailers without end",
    ),
]


@pytest.mark.parametrize(("said", "makes", "then"), [pytest.param(*case, id=name) for *case, name in CASES])
async def test_an_engine_that_says(said: bytes, makes: tuple[int | str, bytes, str], then: str) -> None:
    async with playing(says(said), says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == makes
        assert await outcome(upstream, engine) == FINE
        assert len(engine.connections) == (1 if then == AGAIN else 2)
        assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("said", "then", "makes"),
    [
        pytest.param(b"", ENDS, (DROPPED, b"", ""), id="before it says a word"),
        pytest.param(b"", RESETS, (DROPPED, b"", ""), id="by a reset before it says a word"),
        pytest.param(OK + b"Content-Le", ENDS, (DROPPED, b"", ""), id="in its head"),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\n", ENDS, (DROPPED, b"", ""), id="after an interim answer"
        ),
        pytest.param(HI[:-1], ENDS, (200, b"h", BROKEN), id="in a body of a length"),
        pytest.param(HI[:-1], HALF, (200, b"h", BROKEN), id="one way in a body of a length"),
        pytest.param(b"", HALF, (DROPPED, b"", ""), id="one way before it says a word"),
        pytest.param(CHUNKED + b"5\r\nhi", ENDS, (200, b"hi", BROKEN), id="in a chunk"),
        pytest.param(CHUNKED + b"2\r\nhi\r\n", ENDS, (200, b"hi", BROKEN), id="between two chunks"),
        pytest.param(
            CHUNKED + b"2\r\nhi\r\n0\r\n", ENDS, (200, b"hi", BROKEN), id="before the trailers' end"
        ),
        pytest.param(OK + b"\r\nhi", ENDS, FINE, id="that tells the end of a body without a length"),
        pytest.param(
            OK + b"\r\n", ENDS, (200, b"", "whole"), id="that tells the end of a body that is empty"
        ),
        pytest.param(
            OK + b"\r\nhi", RESETS, (200, b"hi", BROKEN), id="by a reset in a body without a length"
        ),
        pytest.param(HI, ENDS, FINE, id="after its answer"),
        pytest.param(HI, RESETS, FINE, id="by a reset after its answer"),
    ],
)
async def test_an_engine_that_closes(said: bytes, then: str, makes: tuple[int | str, bytes, str]) -> None:
    turn = says(said, then=then) if said else Turn(then=then)
    async with playing(turn, says(HI)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == makes
        assert len(engine.requests) == 1
        assert await outcome(upstream, engine) == FINE
        assert len(engine.connections) == 2


@pytest.mark.parametrize(
    ("beginning", "more", "makes"),
    [
        pytest.param(b"", b"HTTP/1.1 200 " + b"x" * 1024, (DROPPED, b"", ""), id="a status line"),
        pytest.param(OK + b"A: ", b"x" * 1024, (DROPPED, b"", ""), id="a header"),
        pytest.param(OK, b"x" * 1024, (DROPPED, b"", ""), id="a header's name"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40, (DROPPED, b"", ""), id="interim answers"),
        pytest.param(CHUNKED + b"2", b"0" * 1024, (200, b"", BROKEN), id="a chunk's size"),
        pytest.param(CHUNKED + b"2;", b"x" * 1024, (200, b"", BROKEN), id="an extension of a chunk"),
        pytest.param(CHUNKED + b"2\r\nhi\r\n0\r\nA: ", b"x" * 1024, (200, b"hi", BROKEN), id="a trailer"),
        pytest.param(
            OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"hi"),
            b"x" * 1024,
            (200, b"hi", BROKEN),
            id="something behind what was packed",
        ),
    ],
)
async def test_without_end(beginning: bytes, more: bytes, makes: tuple[int | str, bytes, str]) -> None:
    endless = [beginning, *[more] * 200] if beginning else [more] * 200
    async with playing(Turn(endless)) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == makes
        await engine.closed()
    assert len(more) * 200 > 2 * OVERHEAD_BYTES


async def test_small_chunks_have_the_room_that_they_need() -> None:
    """Of one byte each, they are six parts overhead."""
    many = 100_000
    async with playing(says(CHUNKED + b"1\r\nx\r\n" * many + b"0\r\n\r\n")) as engine, asking() as upstream:
        assert await outcome(upstream, engine) == (200, b"x" * many, "whole")


@pytest.mark.parametrize(
    ("told", "means"),
    [
        pytest.param(b"text/event-stream", "text/event-stream", id="a plain one"),
        pytest.param(
            b"Text/Event-Stream ; charset=utf-8", "text/event-stream", id="large letters, parameters"
        ),
        pytest.param(b"a/b\r\nContent-Type: c/d", "a/b", id="two: the first"),
        pytest.param(b"", "", id="none"),
        pytest.param(b"\xff\xfe", "\xff\xfe", id="bytes"),
    ],
)
async def test_a_content_type_is(told: bytes, means: str) -> None:
    said = says(headed(b"Content-Type: " + told, b"Content-Length: 2"))
    async with playing(said) as engine, asking() as upstream:
        with watching() as watch:
            answer = await ask(upstream, engine.target, watch)
            answer.close()
    assert answer.content_type == means


async def test_what_is_taken_as_it_comes_and_what_is_given_are_the_whole_in_its_order() -> None:
    words = [b"%d;" % number for number in range(40)]
    said = says(CHUNKED, *(b"%x\r\n%b\r\n" % (len(word), word) for word in words), b"0\r\n\r\n")
    seen: list[bytes] = []
    taken: list[bytes] = []
    given: list[bytes] = []

    def take(piece: bytes) -> bool:
        if b"7" in piece:
            return False
        seen.append(piece)
        taken.append(piece)
        return True

    async with playing(said) as engine, asking() as upstream:
        with watching() as watch:
            answer = await ask(upstream, engine.target, watch)
            while piece := await answer.piece(5, take):
                seen.append(piece)
                given.append(piece)
            answer.close()
        assert b"".join(seen) == b"".join(words)
        assert len(taken) > len(given) > 1
        assert await outcome(upstream, engine) == (200, b"".join(words), "whole")
        assert len(engine.connections) == 1


async def test_who_takes_what_comes_hears_of_a_silence_and_of_a_break() -> None:
    said = CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n"
    for turn, patience_s, how in (
        (says(*said), 0.1, "was silent for too long"),
        (says(*said, then=ENDS), 5, BROKEN),
    ):
        async with playing(turn) as engine, asking() as upstream:
            with watching() as watch:
                answer = await ask(upstream, engine.target, watch)
                await answer.piece(patience_s)
                with pytest.raises(EngineAway, match=how):
                    await answer.piece(patience_s, lambda piece: True)
                answer.close()
