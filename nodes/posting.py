"""Posts a notice to an address that an operator typed, and to nothing else.

The host's name is looked up once, every address that it stands for is judged, and the connection goes to
these: a name that leads elsewhere a moment later leads nowhere. Redirects are not followed, little of an
answer is read, and all of it has one deadline. Whatever goes wrong is a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from django.conf import settings

from catalog.reading import shown
from nodes.notices import fault_of_address

ANSWER_LIMIT_BYTES = 4096
WORDS_LIMIT = 200
ADDRESSES_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Letter:
    """What is posted where."""

    url: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it. status is None where none came; problem is empty where it was taken."""

    status: int | None
    problem: str = ""


def post(letters: Sequence[Letter]) -> list[Answer]:
    """All at once; one answer a letter, in their order. For a thread without an event loop."""
    return asyncio.run(_post_all(letters))


async def _post_all(letters: Sequence[Letter]) -> list[Answer]:
    return list(await asyncio.gather(*map(_post, letters)))


async def _post(letter: Letter) -> Answer:
    try:
        async with asyncio.timeout(settings.LLMGW_WEBHOOK_TIMEOUT_S):
            return await _posted(letter)
    except TimeoutError:
        return Answer(None, f"It did not answer within {settings.LLMGW_WEBHOOK_TIMEOUT_S:g} s.")
    except _Refused as no:
        return Answer(None, f"Nothing was sent: {no}.")
    except aiohttp.ClientResponseError:  # its words have the whole address, which is not for every eye
        return Answer(None, "What it answered is no HTTP.")
    except aiohttp.ClientConnectorCertificateError:
        return Answer(None, "Its certificate is not one that this machine trusts.")
    except (aiohttp.ClientError, OSError, ValueError) as fault:
        return Answer(None, f"It cannot be reached ({_cause(fault)}).")


async def _posted(letter: Letter) -> Answer:
    parts = urlsplit(letter.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = await _looked_up(str(parts.hostname), port)
    for address in found:
        if fault := fault_of_address(address, parts.scheme, settings.LLMGW_WEBHOOK_NETWORKS):
            raise _Refused(fault)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_Known(found), use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        ) as session,
        session.post(
            letter.url,
            data=letter.body,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **letter.headers},
            allow_redirects=False,
        ) as response,
    ):
        words = (await response.content.read(ANSWER_LIMIT_BYTES)).decode("utf-8", "replace").strip()
        if 200 <= response.status < 300:
            return Answer(response.status)
        if 300 <= response.status < 400:
            return Answer(response.status, f"It answered {response.status}, and redirects are not followed.")
        told = f": {shown(words, WORDS_LIMIT)}" if words else ""
        return Answer(response.status, f"It answered {response.status}{told}.")


class _Refused(Exception):
    """Its address is none that may be posted to; the text is a phrase."""


class _Known(AbstractResolver):
    """The addresses that were looked up and judged, and no others."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """There is nothing to close."""


async def _looked_up(host: str, port: int) -> list[str]:
    """In a thread that nobody waits for: a resolver may take far longer than the deadline."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any) -> None:
        if found.done():
            return
        if isinstance(result, OSError):
            found.set_exception(result)
        else:
            found.set_result(result)

    def look() -> None:
        result: Any
        try:
            result = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as fault:
            result = fault
        except UnicodeError:
            result = OSError(f"{host[:80]!r} is no host's name")
        with contextlib.suppress(RuntimeError):  # the loop has ended, as it took too long
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=look, name="look up", daemon=True).start()
    return list(dict.fromkeys(str(each[4][0]) for each in await found))[:ADDRESSES_LIMIT]


def _cause(fault: Exception) -> str:
    inner = fault.os_error if isinstance(fault, aiohttp.ClientConnectorError) else fault
    if isinstance(inner, socket.gaierror):
        return "its host's name is not known"
    if isinstance(inner, OSError) and inner.errno is not None and inner.errno > 0:
        return os.strerror(inner.errno)
    return shown(str(fault), WORDS_LIMIT) or type(fault).__name__
