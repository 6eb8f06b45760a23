"""Which nodes give a rank its weights: those that hold them, and those that were to fetch them before it.

So N nodes that start one model cost one download: the first goes to the hub, and each later one follows those
before it, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catalog.source import HubSource, SourceError, parse_source
from nodes.protocol import FETCHING, HELD, Launch
from nodes.snapshot import PENDING, RUN, Model, Snapshot
from nodes.tickets import is_commit, weights_key

HOLDERS_LIMIT = 8  # more than one reader can make use of
NEEDED_LIMIT = 4000  # sources that one command can tell of


@dataclass(frozen=True, slots=True)
class Holder:
    """A node, and whether it has yet to get what is wanted of it."""

    node: int
    is_fetching: bool = False


def key_of(launch: Launch) -> str:
    """Of what is fetched for it; empty where nothing is, or nobody knows yet what exactly."""
    return key_at(launch.source, launch.revision) if launch.engine != "sim" else ""


def key_at(text: str, revision: str) -> str:
    """Of a source, pinned to a commit or naming one itself; empty for any other."""
    source = hub_source(text)
    revision = revision or (source.revision if source else "")
    return weights_key(source.repo, revision) if source and is_commit(revision) else ""


def hub_source(text: str) -> HubSource | None:
    try:
        source = parse_source(text)
    except SourceError:
        return None
    return source if isinstance(source, HubSource) else None


def needed_sources(models: Iterable[Model]) -> tuple[str, ...] | None:
    """What the catalog's models need, whichever files of it; None where that is too much to tell."""
    found = set()
    for model in models:
        if source := hub_source(model.spec.source):
            found.add(str(HubSource(source.repo, model.source_revision or source.revision)))
    return tuple(sorted(found)) if len(found) <= NEEDED_LIMIT else None


class Sharing:
    """Who has what, found once for all of a pass's commands."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._held: dict[str, list[int]] = {}
        self._coming: dict[str, list[int]] = {}  # in the order in which they were to begin
        starters: dict[str, list[int]] = {}
        for replica in sorted(snapshot.replicas, key=lambda each: (each.created_at, each.id)):
            if replica.wanted == RUN and (key := key_of(replica.launch)):
                starters.setdefault(key, []).extend(
                    rank.node for rank in replica.ranks if rank.state in (PENDING, FETCHING)
                )
        for node in sorted(snapshot.nodes, key=lambda each: each.id):
            for told in node.report.holdings if node.report and node.id in snapshot.answered else ():
                if told.state == HELD:
                    self._held.setdefault(told.key, []).append(node.id)
                elif told.state == FETCHING and node.id not in starters.get(told.key, ()):
                    self._coming.setdefault(told.key, []).append(node.id)  # ahead of time
        for key, nodes in starters.items():
            self._coming.setdefault(key, []).extend(node for node in nodes if node in snapshot.answered)

    def holders(self, key: str, node: int) -> tuple[Holder, ...]:
        """For this node."""
        held = [each for each in self._held.get(key, ()) if each != node]
        coming = self._coming.get(key, [])
        before = coming[: coming.index(node)] if node in coming else coming
        turn = node % len(held) if held else 0  # so that readers spread over those that have it
        found = [Holder(each) for each in held[turn:] + held[:turn]]
        found += [Holder(each, is_fetching=True) for each in dict.fromkeys(before) if each not in held]
        return tuple(found[:HOLDERS_LIMIT])
