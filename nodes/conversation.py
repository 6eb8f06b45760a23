"""How a node's agent is talked to over HTTP, whatever it is about.

Answers are bounded in time and size, redirects are not followed, and whatever goes wrong is an AgentProblem
of one sentence. Each side proves itself by a token that derives from a key of the cluster, so that no list of
them is kept.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from aiohttp.connector import NEEDS_CLEANUP_CLOSED
from django.conf import settings

from nodes.models import Node
from nodes.protocol import ClusterKey

AT_ONCE = 256  # agents asked at the same time: a pass that waits for a thousand silent ones keeps its lease
ANSWER_LIMIT_BYTES = 1 << 20
TEXT_LIMIT = 10_000  # characters of one text in an answer
INT_LIMIT = 2**53
DEPTH_LIMIT = 32  # objects and lists inside one another

S = TypeVar("S")
T = TypeVar("T")
Session = aiohttp.ClientSession


class AgentProblem(Exception):
    """An agent could not be asked, or its answer not be read. The text is one sentence."""


def cluster_keys() -> tuple[ClusterKey, ...]:
    """The first mints, all of them are tried."""
    return settings.LLMGW_CLUSTER_KEYS


def is_token_of(node: Node, token: str) -> bool:
    """Whether this is what the node's agent proves itself with, by any of the keys."""
    wanted = [key.node_token(str(node.uuid), node.token_generation) for key in cluster_keys()]
    given = token.encode("utf-8", "replace")
    return any(hmac.compare_digest(each.encode(), given) for each in wanted)


# --- asking ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent answered, its body within bounds."""

    status: int
    etag: str
    body: bytes


def ask_each(converse: Callable[[Session, S], Coroutine[Any, Any, T]], subjects: Sequence[S]) -> list[T]:
    """A conversation about each, many at a time, each over a connection of its own; what came of them, in
    this order. For a thread without an event loop."""
    return asyncio.run(_ask_each(converse, subjects))


async def _ask_each(
    converse: Callable[[Session, S], Coroutine[Any, Any, T]], subjects: Sequence[S]
) -> list[T]:
    seats = asyncio.Semaphore(AT_ONCE)

    async def seated(session: Session, subject: S) -> T:
        async with seats:
            return await converse(session, subject)

    async with open_session() as session:
        return list(await asyncio.gather(*(seated(session, subject) for subject in subjects)))


@asynccontextmanager
async def open_session(*, connect_s: float | None = None, unpacks: bool = False) -> AsyncIterator[Session]:
    """What agents are asked through, and engines past the gateway. Whoever asks sets the deadline."""
    session = aiohttp.ClientSession(
        # Before 3.12.8, Python leaves a connection open whose certificate was found wrong.
        connector=aiohttp.TCPConnector(limit=0, force_close=True, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=unpacks,
        trust_env=False,
    )
    try:
        yield session
    finally:
        # Such a one is aborted last of all, and 3.11.2 fails there where it has come to its end meanwhile.
        with suppress(AttributeError):
            await session.close()


async def ask(
    session: Session,
    node: Node,
    method: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    limit: int = ANSWER_LIMIT_BYTES,
) -> Answer:
    """One question within one deadline, whatever the agent drips. Raises AgentProblem."""
    with problems(node):
        async with (
            asyncio.timeout(settings.LLMGW_AGENT_TIMEOUT_S),
            await opened(session, node, method, path, body=body, headers=headers, params=params) as response,
        ):
            return await read_answer(response, limit)


async def opened(
    session: Session,
    node: Node,
    method: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
) -> aiohttp.ClientResponse:
    """An answer whose body is yet to be read; whoever asks closes it. Within `problems`."""
    # While a key is rotated, an agent may still hold the token that the older one minted.
    *others, last = cluster_keys()
    for key in (*others, last):
        token = key.node_token(str(node.uuid), node.token_generation)
        response = await session.request(
            method,
            node.address.rstrip("/") + path,
            json=body,
            params=params,
            headers={
                "Authorization": f"Bearer {token}",
                "Accept-Encoding": "identity",
                **(headers or {}),
            },
            allow_redirects=False,
            ssl=trust_in(node.certificate),
        )
        if response.status != 401 or key is last:
            break
        response.close()
    return response


def trust_in(certificate: str) -> aiohttp.Fingerprint | bool:
    """certificate: the checksum of the one that must be shown, empty where the system's authorities judge."""
    return aiohttp.Fingerprint(bytes.fromhex(certificate)) if certificate else True


async def read_answer(response: aiohttp.ClientResponse, limit: int = ANSWER_LIMIT_BYTES) -> Answer:
    etag = clean(response.headers.get("ETag", "")[:80])
    return Answer(response.status, etag, await _bounded(response, limit))


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"its answer is longer than {limit} bytes")
    return bytes(body)


@contextmanager
def problems(node: Node) -> Iterator[None]:
    """Whatever keeps this node's agent from answering, in one sentence. Raises AgentProblem."""
    try:
        yield
    except TimeoutError:
        raise AgentProblem(
            f"The agent of {node.name} at {node.address} did not answer within "
            f"{settings.LLMGW_AGENT_TIMEOUT_S:g} s; check that it runs and that the way to it is open."
        ) from None
    except aiohttp.ServerFingerprintMismatch:
        raise AgentProblem(
            f"What answers for {node.name} at {node.address} shows another certificate than its agent joined "
            f"with; see what it is, or have the machine join again (manage.py node_join_token)."
        ) from None
    except aiohttp.ClientConnectorCertificateError as fault:
        raise AgentProblem(
            f"No authority that this machine trusts vouches for the certificate of {node.name} at "
            f"{node.address} ({_verdict(fault)}); correct it, or have the machine join again "
            "(manage.py node_join_token)."
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as fault:
        number = fault.os_error.errno if isinstance(fault, aiohttp.ClientConnectorError) else None
        if number is not None and number > 0:  # below it are those of looking a name up
            cause = os.strerror(number)
        else:
            cause = str(fault)[:200] or type(fault).__name__
        raise AgentProblem(
            f"The agent of {node.name} at {node.address} cannot be reached ({cause}); "
            "check that it runs there."
        ) from None


def _verdict(fault: aiohttp.ClientConnectorCertificateError) -> str:
    found = fault.certificate_error
    return getattr(found, "verify_message", "") or str(found)[:200]


# --- what is answered -----------------------------------------------------------------------------


def parsed(node: Node, answer: Answer) -> object:
    """The JSON of an answer, fit to be kept. Raises AgentProblem."""
    try:
        return clean(json.loads(answer.body, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        raise AgentProblem(
            f"The agent of {node.name} at {node.address} sends no JSON; is something else listening there?"
        ) from None


def _refuse_constant(constant: str) -> object:
    raise ValueError(constant)


def clean(value: Any, depth: int = DEPTH_LIMIT) -> Any:
    """Parsed JSON that any database can hold: no NUL, no half of a surrogate pair, bounded values. Raises
    ValueError where it is nested too deeply."""
    if depth < 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        return (
            value[:TEXT_LIMIT].replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
        )
    if isinstance(value, list):
        return [clean(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean(item, depth - 1) for key, item in value.items()}
    if isinstance(value, bool) or value is None:
        return value
    is_sound = -INT_LIMIT < value < INT_LIMIT and math.isfinite(value)
    return value if is_sound else None


def refused_as(answer: Answer) -> tuple[str, str]:
    """The code and the sentence of a refusal, empty where the answer is not one of ours."""
    try:
        error = clean(json.loads(answer.body))["error"]
        return str(error["code"])[:40], str(error["sentence"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", ""


def refusal(node: Node, answer: Answer) -> str:
    """Why the agent did not do what it was asked for: its own sentence, where there is one."""
    if answer.status == 401:
        return (
            f"The agent at {node.address} does not accept the token of {node.name}; if another node has this "
            f"address (manage.py nodes tells), correct one of the two, else have the machine join again "
            f"(manage.py node_join_token)."
        )
    _, sentence = refused_as(answer)
    return sentence or f"The agent of {node.name} at {node.address} answered with status {answer.status}."
