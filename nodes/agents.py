"""What the nodes' agents report, and what they are told.

An agent is believed about itself only, and what it says is checked before it is believed: what cannot be read
becomes one sentence, never an exception that stops a pass. Callers are threads without an event loop.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from catalog.source import PathFacts
from catalog.spec import ModelSpec
from nodes import placement
from nodes.conversation import (
    AgentProblem,
    Answer,
    Session,
    ask,
    ask_each,
    clean,
    parsed,
    refusal,
    refused_as,
)
from nodes.exposition import is_told_by
from nodes.models import Node
from nodes.protocol import (
    CLOCK_HEADER,
    INSTANCE_HEADER,
    PROTOCOL,
    Assignment,
    PathReport,
    ProtocolError,
    RankReport,
    StateReport,
    command_headers,
    read,
    to_json,
)

STATE_LIMIT_BYTES = METRICS_LIMIT_BYTES = 8 << 20
LIST_LIMIT = 1_000  # ranks, GPUs and whatever else of one node
GPU_NAME_LIMIT, COUNT_LIMIT = 100, 2**31 - 1  # as their columns have it


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


def observe(nodes: Sequence[Node], *, cluster: str, now: datetime) -> list[Observation]:
    """Every node's state, asked for all at once; one answer a node, in their order. They are told the time,
    by which they judge tickets."""
    return ask_each(partial(_observe, cluster=cluster, now_s=int(now.timestamp())), nodes)


def tell(messages: Sequence[Message]) -> list[Told]:
    """Every message delivered, all at once; one answer a message, in their order."""
    return ask_each(_tell, messages)


def ask_paths(path: str, spec: ModelSpec) -> list[PathFacts]:
    """Which of the nodes that a profile could use have this path. A node that does not answer is unknown."""
    seen_lately = Q(seen_at__gte=Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S))
    nodes = [
        node
        for node in Node.objects.filter(seen_lately | Q(seen_at=None), is_cordoned=False)
        if node.seen_at is None or _could_run(spec, node)
    ]
    return ask_each(partial(_ask_path, path=path), nodes)


def read_metrics(node: Node) -> str:
    """What its agent tells Prometheus, of itself and of nothing else. Raises AgentProblem."""
    (told,) = ask_each(_read_metrics, [node])
    if isinstance(told, AgentProblem):
        raise told
    return told


def last_report(node: Node) -> StateReport | None:
    """What the node last said of itself, without its ranks; read once for all that is told of a row."""
    if node.__dict__.get("raw_report") is not node.report:
        node.__dict__["raw_report"], node.__dict__["read_report"] = node.report, report_from(node.report)
    found: StateReport | None = node.__dict__["read_report"]
    return found


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


async def _observe(session: Session, node: Node, cluster: str, now_s: int) -> Observation:
    headers = {CLOCK_HEADER: str(now_s), **({"If-None-Match": node.etag} if node.etag else {})}
    try:
        answer = await ask(session, node, "GET", "/v1/state", headers=headers, limit=STATE_LIMIT_BYTES)
        if answer.status == 304 and node.etag:
            return Observation(etag=node.etag)
        if answer.status != 200:
            raise AgentProblem(refusal(node, answer))
        return Observation(_checked(node, cluster, parsed(node, answer)), etag=answer.etag)
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


async def _tell(session: Session, message: Message) -> Told:
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
            code, _ = refused_as(answer)
            return Told(answer.status, code=code, sentence=refusal(message.node, answer))
        return Told(answer.status, report=_rank_report(message, answer))
    except AgentProblem as problem:
        return Told(None, sentence=clean(str(problem)))


def _rank_report(message: Message, answer: Answer) -> RankReport | None:
    """An accepted command's own account of the rank, where it can be read; the next report tells anyway."""
    try:
        report = _checked_rank(read(RankReport, parsed(message.node, answer)))
    except (AgentProblem, ProtocolError, ValueError):
        return None
    return report if report.replica == message.replica else None


async def _read_metrics(session: Session, node: Node) -> str | AgentProblem:
    try:
        answer = await ask(session, node, "GET", "/metrics", limit=METRICS_LIMIT_BYTES)
        if answer.status != 200:
            return AgentProblem(refusal(node, answer))
    except AgentProblem as problem:
        return problem
    told = answer.body.decode("utf-8", "replace")
    if not is_told_by(told, _OF_AGENTS):
        return AgentProblem(
            f"The agent of {node.name} tells metrics that are none of an agent's; bring it to the version of "
            "the control plane."
        )
    return told


_OF_AGENTS = re.compile(r"llmgw_(agent|host|gpu|rank|engine)_")


async def _ask_path(session: Session, node: Node, path: str) -> PathFacts:
    try:
        answer = await ask(session, node, "POST", "/v1/paths", body={"paths": [path]})
        if answer.status != 200:
            raise AgentProblem(refusal(node, answer))
        raw = parsed(node, answer)
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
