"""Talks to the nodes' agents over HTTP: what they report, and what they are told.

An agent is believed about itself only: answers are bounded in time and size, redirects are not followed, and
what cannot be read becomes one sentence, never an exception that stops a pass. Callers are threads without an
event loop; each call here opens one of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import aiohttp
from aiohttp.connector import NEEDS_CLEANUP_CLOSED
from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from catalog.source import PathFacts
from catalog.spec import ModelSpec
from nodes import placement
from nodes.models import Node
from nodes.protocol import (
    INSTANCE_HEADER,
    PROTOCOL,
    Assignment,
    ClusterKey,
    PathReport,
    ProtocolError,
    RankReport,
    StateReport,
    command_headers,
    read,
    to_json,
)

AT_ONCE = 256  # agents asked at the same time: a pass that waits for a thousand silent ones keeps its lease
STATE_LIMIT_BYTES = 8 << 20
ANSWER_LIMIT_BYTES = 1 << 20
TEXT_LIMIT = 10_000  # characters of one text in an answer
INT_LIMIT = 2**53
DEPTH_LIMIT = 32  # objects and lists inside one another
LIST_LIMIT = 1_000  # ranks, GPUs and whatever else of one node
GPU_NAME_LIMIT, COUNT_LIMIT = 100, 2**31 - 1  # as their columns have it

S = TypeVar("S")
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Observation:
    """What became of asking a node's agent for its state. report is None where it is unchanged, or where
    `problem` says why there is none."""

    report: StateReport | None = None
    etag: str = ""
    problem: str = ""

    @property
    def is_answered(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Message:
    """One thing an agent is told: to run a rank, or (without an assignment) to drain and stop it."""

    node: Node
    cluster: str
    replica: str
    generation: int
    fence: int
    assignment: Assignment | None = None
    drain_s: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a message. status is None when no answer came; code and sentence are a refusal."""

    status: int | None
    report: RankReport | None = None
    code: str = ""
    sentence: str = ""

    @property
    def is_accepted(self) -> bool:
        return self.status is not None and self.status < 300


def observe(nodes: Sequence[Node], *, cluster: str) -> list[Observation]:
    """Every node's state, asked for all at once; one answer a node, in their order."""
    return _run(_at_once(partial(_observe, cluster=cluster), nodes))


def tell(messages: Sequence[Message]) -> list[Told]:
    """Every message delivered, all at once; one answer a message, in their order."""
    return _run(_at_once(_tell, messages))


def ask_paths(path: str, spec: ModelSpec) -> list[PathFacts]:
    """Which of the nodes that a profile could use have this path. A node that does not answer is unknown."""
    seen_lately = Q(seen_at__gte=Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S))
    nodes = [
        node
        for node in Node.objects.filter(seen_lately | Q(seen_at=None), is_cordoned=False)
        if node.seen_at is None or _could_run(spec, node)
    ]
    return _run(_at_once(partial(_ask_path, path=path), nodes))


def last_report(node: Node) -> StateReport | None:
    """What the node last said of itself, without its ranks."""
    return report_from(node.report)


def report_from(raw: object) -> StateReport | None:
    """A report as the database holds it, None where it holds none."""
    if not raw:
        return None
    try:
        return read(StateReport, raw)
    except ProtocolError:  # kept by an older release
        return None


def _could_run(spec: ModelSpec, node: Node) -> bool:
    report = last_report(node)
    return report is not None and placement.could_run(spec, report)


# --- the conversation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent answered, its body within bounds."""

    status: int
    etag: str
    body: bytes


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


async def _at_once(
    converse: Callable[[aiohttp.ClientSession, S], Coroutine[Any, Any, T]], subjects: Sequence[S]
) -> list[T]:
    """A conversation about each, many at a time, each over a connection of its own."""
    seats = asyncio.Semaphore(AT_ONCE)

    async def seated(session: aiohttp.ClientSession, subject: S) -> T:
        async with seats:
            return await converse(session, subject)

    async with session() as one_session:
        return list(await asyncio.gather(*(seated(one_session, subject) for subject in subjects)))


def session() -> aiohttp.ClientSession:
    """What agents are asked through. Whoever asks sets the deadline."""
    return aiohttp.ClientSession(
        # Before 3.12.8, Python leaves a connection open whose certificate was found wrong.
        connector=aiohttp.TCPConnector(limit=0, force_close=True, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        trust_env=False,
    )


async def _observe(session: aiohttp.ClientSession, node: Node, cluster: str) -> Observation:
    headers = {"If-None-Match": node.etag} if node.etag else {}
    try:
        answer = await ask(session, node, "GET", "/v1/state", headers=headers, limit=STATE_LIMIT_BYTES)
        if answer.status == 304 and node.etag:
            return Observation(etag=node.etag)
        if answer.status != 200:
            raise AgentProblem(refusal(node, answer))
        return Observation(_checked(node, cluster, _parsed(node, answer)), etag=answer.etag)
    except AgentProblem as problem:
        return Observation(problem=clean(str(problem)))


def _checked(node: Node, cluster: str, raw: object) -> StateReport:
    _check_protocol(node, raw)
    try:
        _check_bounds(raw)
        report = read(StateReport, raw)
        _check_gpus([gpu.id for gpu in report.gpus])
        ranks = tuple(_checked_rank(rank) for rank in report.ranks)
        if len({(rank.replica, rank.rank) for rank in ranks}) < len(ranks):
            raise ProtocolError("a rank is in it twice")
    except (ProtocolError, ValueError) as fault:
        raise AgentProblem(
            f"The agent of {node.name} sends a report that cannot be read ({fault}); "
            "bring it to the version of the control plane."
        ) from None
    if report.cluster != cluster:
        raise AgentProblem(
            f"The agent at {node.address} serves another cluster; give it the identity file of {node.name}."
        )
    if report.node != str(node.uuid):
        raise AgentProblem(
            f"The agent at {node.address} is not the one of {node.name}; "
            "correct the address or its identity file."
        )
    return replace(report, ranks=ranks)


def _check_protocol(node: Node, raw: object) -> None:
    """One version apart is understood: what is missing is unknown, and what is not known is ignored."""
    spoken = raw.get("protocol") if isinstance(raw, dict) else None
    if isinstance(spoken, int) and abs(spoken - PROTOCOL) > 1:
        older = "its agent" if spoken < PROTOCOL else "this control plane"
        raise AgentProblem(
            f"The agent of {node.name} speaks protocol {spoken}, and this control plane {PROTOCOL}, which is "
            f"too far apart; bring {older} up to date."
        )


def _check_bounds(raw: object) -> None:
    """What no machine has is not even read: the others are waiting. Raises ProtocolError."""
    report = raw if isinstance(raw, dict) else {}
    for name, items in report.items():
        if isinstance(items, list) and len(items) > LIST_LIMIT:
            raise ProtocolError(f"it has {len(items)} {name}, and {LIST_LIMIT} are believed")


def _checked_rank(rank: RankReport) -> RankReport:
    """The rank, its replica's id written one way. Raises ProtocolError or ValueError."""
    if not (0 <= rank.generation <= COUNT_LIMIT and 0 <= rank.rank <= COUNT_LIMIT):
        raise ProtocolError("RankReport.generation and rank must be whole numbers from 0 to 2147483647")
    _check_gpus(rank.gpus)
    return replace(rank, replica=str(uuid.UUID(rank.replica)))


def _check_gpus(gpus: Sequence[str]) -> None:
    if len(set(gpus)) < len(gpus):
        raise ProtocolError("a GPU is in it twice")
    if any(not 0 < len(gpu) <= GPU_NAME_LIMIT for gpu in gpus):
        raise ProtocolError(f"a GPU's id must have 1 to {GPU_NAME_LIMIT} characters")


async def _tell(session: aiohttp.ClientSession, message: Message) -> Told:
    path = f"/v1/replicas/{message.replica}"
    instance = str(message.node.report.get("instance", ""))
    headers = {INSTANCE_HEADER: instance} if instance else {}
    try:
        if message.assignment is not None:
            body = to_json(message.assignment)
            answer = await ask(session, message.node, "PUT", path, body=body, headers=headers)
        else:
            headers |= command_headers(
                cluster=message.cluster, fence=message.fence, generation=message.generation
            )
            drain = {"drain": f"{message.drain_s}s"}
            answer = await ask(session, message.node, "DELETE", path, headers=headers, params=drain)
        if answer.status >= 300:
            code, _ = _error(answer)
            return Told(answer.status, code=code, sentence=refusal(message.node, answer))
        return Told(answer.status, report=_rank_report(message, answer))
    except AgentProblem as problem:
        return Told(None, sentence=clean(str(problem)))


def _rank_report(message: Message, answer: Answer) -> RankReport | None:
    """An accepted command's own account of the rank, where it can be read; the next report tells anyway."""
    try:
        report = _checked_rank(read(RankReport, _parsed(message.node, answer)))
    except (AgentProblem, ProtocolError, ValueError):
        return None
    return report if report.replica == message.replica else None


async def _ask_path(session: aiohttp.ClientSession, node: Node, path: str) -> PathFacts:
    try:
        answer = await ask(session, node, "POST", "/v1/paths", body={"paths": [path]})
        if answer.status != 200:
            raise AgentProblem(refusal(node, answer))
        raw = _parsed(node, answer)
        found = raw.get("paths") if isinstance(raw, Mapping) else None
        report = read(PathReport, found[0]) if isinstance(found, list) and found else None
        if report is None or report.path != path:
            raise AgentProblem(f"The agent of {node.name} answers for another path.")
    except ProtocolError as fault:
        return PathFacts(node.name, None, reason=str(fault))
    except AgentProblem as problem:
        return PathFacts(node.name, None, reason=str(problem))
    return PathFacts(
        node.name,
        report.exists,
        kind=report.kind,
        size_bytes=report.size_bytes,
        files=tuple(report.files),
        reason=report.reason,
    )


async def ask(
    session: aiohttp.ClientSession,
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
    session: aiohttp.ClientSession,
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
            ssl=aiohttp.Fingerprint(bytes.fromhex(node.certificate)) if node.certificate else True,
        )
        if response.status != 401 or key is last:
            break
        response.close()
    return response


async def read_answer(response: aiohttp.ClientResponse, limit: int = ANSWER_LIMIT_BYTES) -> Answer:
    etag = clean(response.headers.get("ETag", "")[:80])
    return Answer(response.status, etag, await _bounded(response, limit))


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
        cause = os.strerror(number) if number else str(fault)[:200] or type(fault).__name__
        raise AgentProblem(
            f"The agent of {node.name} at {node.address} cannot be reached ({cause}); "
            "check that it runs there."
        ) from None


def _verdict(fault: aiohttp.ClientConnectorCertificateError) -> str:
    found = fault.certificate_error
    return getattr(found, "verify_message", "") or str(found)[:200]


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"its answer is longer than {limit} bytes")
    return bytes(body)


def _parsed(node: Node, answer: Answer) -> object:
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


def _error(answer: Answer) -> tuple[str, str]:
    """The code and the sentence of a refusal, empty where the answer is not one of ours."""
    try:
        error = clean(json.loads(answer.body))["error"]
        return str(error["code"])[:40], str(error["sentence"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", ""


def refusal(node: Node, answer: Answer) -> str:
    if answer.status == 401:
        return (
            f"The agent of {node.name} does not accept this cluster's token; "
            "have the machine join again (manage.py node_join_token)."
        )
    _, sentence = _error(answer)
    return sentence or f"The agent of {node.name} at {node.address} answered with status {answer.status}."
