"""Which replica a request goes to: the one that has computed most of its prompt already, among those that are
not too busy for it.

Pure: loads are handed in, and neither a clock nor chance has a say. What a process remembers between two
choices is which prompts it sent where. A prompt that is new goes by rendezvous, in which all processes come
to the same replica without asking each other, and few prompts move when replicas come and go. The order in
which targets are given changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import fsum, log
from typing import NamedTuple
from zlib import crc32

from llmgw.gateway.admission import ModelEntry
from llmgw.gateway.prefixes import NO_CHAIN, Beginnings, Chain, Prefixes

ONLY, PREFIX, PREFIX_MISS = "only", "prefix", "prefix-miss"
LEAST_LOADED, ROUND_ROBIN, SESSION = "least-loaded", "round-robin", "session"

BUSY_FACTOR, BUSY_SLACK = 0.25, 4.0
"""How much busier than the mean a replica may be that has all of a prompt: this part of the mean, and so many
requests on top where its weight is the mean one. Of one that has half of it, half as much is borne."""
NEW_PART = 0.25
"""And so much of it of any, where a prompt is new to all: it is the price for going where every other process
sends its like."""
WORTH_ONE_IN = 8
"""A shared beginning shorter than this part of the prompt is not followed: it saves little, and what all
prompts begin with would gather them all on one replica."""

KEYS = 1024
"""Of all keys of prompts so many are told apart, and the order that replicas come in is kept for each."""
BEGINNINGS = 65_536
"""Of so many prompts' first links it is known which replicas were sent them. All other replicas' memories,
which are large and far from the processor, are not looked through."""

_MASK, _LOG_OF_ALL = 2**64 - 1, log(2**64)
_NOTHING_IN_FLIGHT = repeat(0)
_NOBODY: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that may be sent requests. `served_name` is the name it was launched under, the only one
    its engine is known to answer to; `origin` is `http://host:port` of its rank 0, or https and then
    `certificate` the checksum of the one it must show; `key` is the replica's own. `context_length` is what
    the running engine says a request may use, else what it was launched with; 0 where neither is known."""

    replica: str
    served_name: str
    origin: str
    key: str
    weight: float = 1.0
    engine: str = ""
    context_length: int = 0
    certificate: str = ""

    def __repr__(self) -> str:
        return f"Target({self.replica!r}, {self.served_name!r}, {self.origin!r})"


class Prompt(NamedTuple):
    """What of a request bears on the choice; empty where the model's routing does not ask for it."""

    chain: Chain = NO_CHAIN
    session: str = ""

    @classmethod
    def of_chain(cls, chain: Chain) -> Prompt:
        # One is made for each request, and a named tuple's own constructor costs three times as much.
        return tuple.__new__(cls, (chain, ""))


NO_PROMPT = Prompt()


class Choice(NamedTuple):
    """`route` says why this one."""

    target: Target
    route: str


class _Memory:
    """What is remembered of one replica."""

    __slots__ = ("alone", "credit", "is_gone", "multiplier", "prefixes", "turn")

    def __init__(self, replica: str) -> None:
        self.alone = (self,)  # most prompts have one home
        self.is_gone = False
        self.multiplier = _hash_of(replica) | 1
        self.prefixes = Prefixes()
        self.turn = 0  # when it was last chosen
        self.credit = 0.0  # what round-robin owes it


class _Lineup:
    """Targets to choose among, with what is the same for every choice among them."""

    __slots__ = ("memories", "orders", "places", "replicas", "slack", "targets", "weight", "weights")

    def __init__(self, targets: Sequence[Target], memories: Sequence[_Memory]) -> None:
        self.targets, self.memories = targets, memories
        self.places = {memory: at for at, memory in enumerate(memories)}
        self.replicas = [target.replica for target in targets]
        self.weights = [target.weight for target in targets]
        self.weight = fsum(self.weights)  # whose last digit is the same in any order
        self.slack = BUSY_SLACK * len(targets) / self.weight
        self.orders: dict[int, Sequence[int]] = {}

    def order_of(self, key: int) -> Sequence[int]:
        """Rendezvous: each replica draws a number for the key, the same in every process, and the lowest for
        its weight comes first."""
        key %= KEYS
        order = self.orders.get(key)
        if order is None:
            spread = crc32(b"%d" % key) + 1
            drawn = [self._draw(spread, at) for at in range(len(self.targets))]
            order = self.orders[key] = tuple(sorted(range(len(drawn)), key=drawn.__getitem__))
        return order

    def _draw(self, key: int, at: int) -> tuple[float, str]:
        number = key * self.memories[at].multiplier & _MASK
        return (_LOG_OF_ALL - log(number + 1)) / self.weights[at], self.replicas[at]


class Chooser:
    """One process's. Of a replica that is gone it remembers nothing once it was told so by `forget`."""

    def __init__(self) -> None:
        self._begun: Beginnings[_Memory] = Beginnings(BEGINNINGS)
        self._memories: dict[str, _Memory] = {}
        self._lineups: dict[int, _Lineup] = {}
        self._turn = 0

    def choose(
        self,
        model: ModelEntry,
        targets: Sequence[Target],
        in_flight: Mapping[str, int],
        prompt: Prompt,
        *,
        without: Collection[str] = (),
    ) -> Choice | None:
        """By the model's routing profile. The prompt is taken as sent to the replica that is chosen."""
        if without:
            targets = [target for target in targets if target.replica not in without]
        if not targets:
            return None
        lineup = self._line_up(targets) if without else self._lineup_of(model, targets)
        profile, chain = model.routing_profile, prompt.chain
        links = chain.links
        homes = self._begun.homes_of(links[0]) if links else ()
        if len(targets) == 1:
            at, route = 0, ONLY
        elif profile == ROUND_ROBIN:
            at, route = _next_in_turn(lineup), ROUND_ROBIN
        else:
            busy = [*map(in_flight.get, lineup.replicas, _NOTHING_IN_FLIGHT)]
            if links and (not profile or profile == PREFIX):
                at, route = _by_prefix(lineup, busy, chain, homes)
            elif profile == SESSION and prompt.session:
                at, route = _by_session(lineup, busy, prompt.session), SESSION
            else:
                at, route = _least_loaded(lineup, busy), LEAST_LOADED
        memory = lineup.memories[at]
        self._turn += 1
        memory.turn = self._turn
        if links:
            memory.prefixes.add(links)
            if memory not in homes:
                if homes:
                    homes = tuple(home for home in homes if not home.is_gone)
                self._begun.keep(links[0], (*homes, memory) if homes else memory.alone)
        return tuple.__new__(Choice, (lineup.targets[at], route))

    def forget(self, replicas: Iterable[str]) -> None:
        gone = [memory for replica in replicas if (memory := self._memories.pop(replica, None)) is not None]
        for memory in gone:
            memory.is_gone, memory.prefixes = True, Prefixes()  # among the homes of prompts it stays a while
        if gone:
            self._lineups = {
                model: lineup
                for model, lineup in self._lineups.items()
                if lineup.places.keys().isdisjoint(gone)
            }

    def _lineup_of(self, model: ModelEntry, targets: Sequence[Target]) -> _Lineup:
        lineup = self._lineups.get(model.id)
        if lineup is None or lineup.targets is not targets:
            if lineup is not None and lineup.targets == targets:
                lineup.targets = targets  # the same ones: in another table, or because others are left out
            else:
                lineup = self._lineups[model.id] = self._line_up(targets)
        return lineup

    def _line_up(self, targets: Sequence[Target]) -> _Lineup:
        return _Lineup(
            targets, [self._memories.get(target.replica) or self._begin(target.replica) for target in targets]
        )

    def _begin(self, replica: str) -> _Memory:
        memory = self._memories[replica] = _Memory(replica)
        return memory


# --- each way of choosing: which of the targets, by its place among them ------------------------------------


def _by_prefix(
    lineup: _Lineup, busy: Sequence[int], chain: Chain, homes: Sequence[_Memory]
) -> tuple[int, str]:
    """The longest match among those that are not too busy for it. Where several have it, and where it is
    worth little, they are told apart by what comes next in the prompt: that will be there in another turn of
    the same talk, too, and other processes see it as well."""
    links, weights, mean = chain.links, lineup.weights, _mean(lineup, busy)
    depth, holders = 0, _NOBODY
    if homes:
        depth, holders = _who_has_most(lineup, busy, links, mean, homes)
    if depth * WORTH_ONE_IN >= len(links):
        route = PREFIX
        if len(holders) == 1:
            return holders[0], route
        one, other = [at for at in lineup.order_of(chain.key_after(depth)) if at in holders][:2]
    else:
        route = PREFIX_MISS
        bound = (1 + BUSY_FACTOR * NEW_PART) * mean + lineup.slack * NEW_PART
        one, other = _first_two(lineup, busy, bound, chain.key_after(depth))
    if busy[other] * weights[one] < busy[one] * weights[other]:
        return other, route
    return one, route


def _who_has_most(
    lineup: _Lineup, busy: Sequence[int], links: Sequence[int], mean: float, homes: Sequence[_Memory]
) -> tuple[int, Sequence[int]]:
    """How many of the first links, and who has them: of those that are not too busy for as many."""
    depth = 0
    holders: list[int] = []
    for memory in homes:
        at = lineup.places.get(memory)
        if at is not None and (here := memory.prefixes.depth_of(links)) >= depth and here:
            part = here / len(links)
            if busy[at] <= ((1 + BUSY_FACTOR * part) * mean + lineup.slack * part) * lineup.weights[at]:
                if here > depth:
                    depth, holders = here, []
                holders.append(at)
    return depth, holders


def _by_session(lineup: _Lineup, busy: Sequence[int], session: str) -> int:
    bound = (1 + BUSY_FACTOR) * _mean(lineup, busy) + lineup.slack
    return _first_two(lineup, busy, bound, _hash_of(session))[0]


def _mean(lineup: _Lineup, busy: Sequence[int]) -> float:
    """For a weight of 1. One that is a hair too small would leave nobody within it."""
    return sum(busy) / lineup.weight * (1 + 1e-9)


def _first_two(lineup: _Lineup, busy: Sequence[int], bound: float, key: int) -> tuple[int, int]:
    """In the order for the key, of those that have no more for their weight than the bound: there is one at
    least, which is both then."""
    weights, one = lineup.weights, -1
    for at in lineup.order_of(key):
        if busy[at] <= bound * weights[at]:
            if one >= 0:
                return one, at
            one = at
    return one, one


def _least_loaded(lineup: _Lineup, busy: Sequence[int]) -> int:
    """The one that would have least in flight for its weight with this request on top; equals take turns."""
    weights, memories, replicas = lineup.weights, lineup.memories, lineup.replicas
    return min(
        range(len(weights)), key=lambda at: ((busy[at] + 1) / weights[at], memories[at].turn, replicas[at])
    )


def _next_in_turn(lineup: _Lineup) -> int:
    """Each is owed its weight a turn, and the one that is owed most has it: as many turns as weights say, as
    far apart as can be."""
    memories, replicas = lineup.memories, lineup.replicas
    for weight, memory in zip(lineup.weights, memories, strict=True):
        memory.credit += weight
    at = max(range(len(memories)), key=lambda at: (memories[at].credit, replicas[at]))
    memories[at].credit -= lineup.weight
    return at


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
