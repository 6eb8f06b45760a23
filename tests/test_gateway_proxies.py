"""What a proxy in front says of its client is believed on the short way as uvicorn's own middleware does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.server import ServerState

from llmgw.exchange import Exchange
from llmgw.wire import DIRECT, BoundedProtocol

pytestmark = pytest.mark.one_database

Lines = list[tuple[bytes, bytes]]

_lines = st.lists(
    st.tuples(
        st.sampled_from((b"x-forwarded-proto", b"X-Forwarded-Proto", b"x-forwarded-for", b"forwarded")),
        st.sampled_from(
            (b"https", b"http", b" https\t", b"HTTPS", b"wss", b"ftp", b"", b"https, http", b"\xe9")
        ),
    ),
    max_size=4,
)
_peers = st.sampled_from(("127.0.0.1", "10.0.0.9", "10.1.0.9", "::1", "proxy", None))
_believed = st.sampled_from(("127.0.0.1", "*", "10.0.0.0/16, ::1", "proxy", "nonsense/64", ""))


class _Wire(asyncio.Transport):
    """Of a client that has this address; what it is sent goes nowhere."""

    def __init__(self, peer: str | None) -> None:
        super().__init__({"peername": peer and (peer, 40_000)})

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


async def _elsewhere(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a plain request takes the short way")


def _on_the_short_way(config: uvicorn.Config, peer: str | None, lines: Lines) -> str:
    async def scene() -> str:
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def answer(exchange: Exchange) -> None:
            answered.set_result(exchange.scheme)
            exchange.answer(200, b"content-length: 0\r\n", b"")

        protocol = BoundedProtocol(config, ServerState(), {DIRECT: answer})
        protocol.connection_made(_Wire(peer))
        protocol.data_received(
            b"".join(
                (
                    b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 0\r\n",
                    *(b"%b: %b\r\n" % line for line in lines),
                    b"\r\n",
                )
            )
        )
        scheme = await answered
        protocol.connection_lost(None)
        return scheme

    return asyncio.run(scene())


def _through_uvicorns(believed: str, peer: str | None, lines: Lines) -> str:
    seen: dict[str, Any] = {}

    async def note(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)

    scope: Any = {
        "type": "http",
        "scheme": "http",
        "client": peer and (peer, 40_000),
        "headers": [(name.lower(), value.strip(b" \t")) for name, value in lines],
    }
    unused: Any = None
    asyncio.run(ProxyHeadersMiddleware(note, believed)(scope, unused, unused))
    return str(seen["scheme"])


def _config(believed: str, *, is_asked: bool = True) -> uvicorn.Config:
    return uvicorn.Config(
        _elsewhere,
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=is_asked,
        forwarded_allow_ips=believed,
    )


@given(believed=_believed, peer=_peers, lines=_lines)
def test_a_proxy_is_believed_as_uvicorn_believes_it(believed: str, peer: str | None, lines: Lines) -> None:
    assert _on_the_short_way(_config(believed), peer, lines) == _through_uvicorns(believed, peer, lines)


@pytest.mark.parametrize(
    ("believed", "peer", "is_asked", "scheme"),
    [
        pytest.param("10.0.0.0/16", "10.0.0.9", True, "https", id="a proxy that is believed"),
        pytest.param("10.0.0.0/16", "10.1.0.9", True, "http", id="somebody else"),
        pytest.param("*", "10.0.0.9", False, "http", id="where nobody is to be believed"),
    ],
)
def test_who_came_by_https_is_said_by_the_proxy_that_is_named(
    believed: str, peer: str, is_asked: bool, scheme: str
) -> None:
    told = [(b"X-Forwarded-Proto", b"https"), (b"X-Forwarded-For", b"192.0.2.7")]
    assert _on_the_short_way(_config(believed, is_asked=is_asked), peer, told) == scheme


def test_one_request_hears_nothing_of_what_was_said_of_the_one_before() -> None:
    async def scene() -> list[str]:
        schemes: asyncio.Queue[str] = asyncio.Queue()

        async def answer(exchange: Exchange) -> None:
            exchange.answer(200, b"content-length: 0\r\n", b"")
            schemes.put_nowait(exchange.scheme)

        protocol = BoundedProtocol(_config("*"), ServerState(), {DIRECT: answer})
        protocol.connection_made(_Wire("10.0.0.9"))
        heard = []
        for line in (b"X-Forwarded-Proto: https\r\n", b""):
            protocol.data_received(b"POST /v1/rerank HTTP/1.1\r\nContent-Length: 0\r\n%b\r\n" % line)
            heard.append(await schemes.get())
        protocol.connection_lost(None)
        return heard

    assert asyncio.run(scene()) == ["https", "http"]
