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
from math import fsum, inf, log
from typing import NamedTuple

from llmgw.gateway.admission import ModelEntry
from llmgw.gateway.prefixes import NO_CHAIN, Chain, Prefixes

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

_MASK, _LOG_OF_ALL = 2**32 - 1, log(2**32)
"""Of the numbers that are drawn: twice as long, they would take half as long again to draw."""
_NOTHING_IN_FLIGHT = repeat(0)


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that may be sent requests. `served_name` is the name it was launched under, the only one
    its engine is known to answer to; `origin` is `http://host:port` of its rank 0; `key` is the replica's
    own. `context_length` is what the running engine says a request may use, else what it was launched with; 0
    where neither is known."""

    replica: str
    served_name: str
    origin: str
    key: str
    weight: float = 1.0
    engine: str = ""
    context_length: int = 0

    def __repr__(self) -> str:
        return f"Target({self.replica!r}, {self.served_name!r}, {self.origin!r})"


class Prompt(NamedTuple):
    """What of a request bears on the choice; empty where the model's routing does not ask for it."""

    chain: Chain = NO_CHAIN
    session: str = ""


NO_PROMPT = Prompt()


class Choice(NamedTuple):
    """`route` says why this one."""

    target: Target
    route: str


class _Memory:
    """What is remembered of one replica."""

    __slots__ = ("credit", "multiplier", "prefixes", "turn")

    def __init__(self, replica: str) -> None:
        self.multiplier = _hash_of(replica) & _MASK | 1
        self.prefixes = Prefixes()
        self.turn = 0  # when it was last chosen
        self.credit = 0.0  # what round-robin owes it


class _Lineup:
    """Targets to choose among, with what is the same for every choice among them."""

    __slots__ = (
        "are_alike",
        "everyone",
        "memories",
        "multipliers",
        "prefixes",
        "replicas",
        "slack",
        "targets",
        "weight",
        "weights",
    )

    def __init__(self, targets: Sequence[Target], memories: Sequence[_Memory]) -> None:
        self.targets, self.memories = targets, memories
        self.everyone = range(len(targets))
        self.replicas = [target.replica for target in targets]
        self.multipliers = [memory.multiplier for memory in memories]
        self.prefixes = [memory.prefixes for memory in memories]
        self.weights = [target.weight for target in targets]
        self.weight = fsum(self.weights)  # whose last digit is the same in any order
        self.are_alike = len({*self.weights}) == 1
        self.slack = BUSY_SLACK * len(targets) / self.weight


class Chooser:
    """One process's. Of a replica that is gone it remembers nothing once it was told so by `forget`."""

    def __init__(self) -> None:
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
        lineup = self._lineups.get(model.id)
        # While one is left out it is the same few each time, in a sequence of their own.
        if lineup is None or (lineup.targets is not targets and lineup.targets != targets):
            lineup = self._lineups[model.id] = self._line_up(targets)
        profile, chain = model.routing_profile, prompt.chain
        if len(targets) == 1:
            at, route = 0, ONLY
        elif profile == ROUND_ROBIN:
            at, route = _next_in_turn(lineup), ROUND_ROBIN
        else:
            busy = [*map(in_flight.get, lineup.replicas, _NOTHING_IN_FLIGHT)]
            if chain.links and (not profile or profile == PREFIX):
                at, route = _by_prefix(lineup, busy, chain)
            elif profile == SESSION and prompt.session:
                at, route = _by_session(lineup, busy, prompt.session), SESSION
            else:
                at, route = _least_loaded(lineup, busy), LEAST_LOADED
        memory = lineup.memories[at]
        self._turn += 1
        memory.turn = self._turn
        if chain.links:
            memory.prefixes.add(chain.links)
        return tuple.__new__(Choice, (lineup.targets[at], route))

    def forget(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            self._memories.pop(replica, None)
        self._lineups.clear()

    def _line_up(self, targets: Sequence[Target]) -> _Lineup:
        return _Lineup(
            targets, [self._memories.get(target.replica) or self._begin(target.replica) for target in targets]
        )

    def _begin(self, replica: str) -> _Memory:
        memory = self._memories[replica] = _Memory(replica)
        return memory


# --- each way of choosing: which of the targets, by its place among them ------------------------------------


def _by_prefix(lineup: _Lineup, busy: Sequence[int], chain: Chain) -> tuple[int, str]:
    """The longest match among those that are not too busy for it. Where several have it, and where it is
    worth little, they are told apart by what comes next in the prompt: that will be there in another turn of
    the same talk, too, and other processes see it as well."""
    links = chain.links
    mean, slack = _mean(lineup, busy), lineup.slack
    first, depth = links[0], 0
    holders: Sequence[int] = ()
    for at, prefixes in enumerate(lineup.prefixes):
        if first not in prefixes.young and first not in prefixes.old:
            continue  # nearly all of them, nearly always: so it is asked without a call
        if (here := prefixes.depth_of(links)) >= depth:
            part = here / len(links)
            if busy[at] <= ((1 + BUSY_FACTOR * part) * mean + slack * part) * lineup.weights[at]:
                holders = [at] if here > depth else [*holders, at]
                depth = here
    if depth * WORTH_ONE_IN >= len(links):
        route = PREFIX
    else:
        holders = _within(lineup, busy, (1 + BUSY_FACTOR * NEW_PART) * mean + slack * NEW_PART)
        route = PREFIX_MISS
    if len(holders) == 1:
        return holders[0], route
    one, other = _rendezvous(chain.key_after(depth), holders, lineup)
    weights = lineup.weights
    if busy[other] * weights[one] < busy[one] * weights[other]:
        return other, route
    return one, route


def _by_session(lineup: _Lineup, busy: Sequence[int], session: str) -> int:
    free = _within(lineup, busy, (1 + BUSY_FACTOR) * _mean(lineup, busy) + lineup.slack)
    return _rendezvous(_hash_of(session), free, lineup)[0]


def _mean(lineup: _Lineup, busy: Sequence[int]) -> float:
    """For a weight of 1. One that is a hair too small would leave nobody within it."""
    return sum(busy) / lineup.weight * (1 + 1e-9)


def _within(lineup: _Lineup, busy: Sequence[int], bound: float) -> Sequence[int]:
    weights = lineup.weights
    if lineup.are_alike:
        most = bound * weights[0]
        if max(busy) <= most:
            return lineup.everyone
        return [at for at, count in enumerate(busy) if count <= most]
    return [at for at, count in enumerate(busy) if count <= bound * weights[at]]


def _rendezvous(key: int, among: Sequence[int], lineup: _Lineup) -> tuple[int, int]:
    """The first and the second: each replica draws a number for the key, the same in every process, and the
    lowest for its weight comes first. Where there is but one it is both."""
    multipliers, weights = lineup.multipliers, lineup.weights
    first = second = among[0]
    if lineup.are_alike:  # and so the numbers are in that order already, the other way round
        highest = high = -1
        for at in among:
            number = key * multipliers[at] & _MASK
            if number > highest:
                second, high = first, highest
                first, highest = at, number
            elif number > high:
                second, high = at, number
        return first, second
    lowest = low = inf
    for at in among:
        number = key * multipliers[at] & _MASK
        drawn = (_LOG_OF_ALL - log(number + 1)) / weights[at]
        if drawn < lowest:
            second, low = first, lowest
            first, lowest = at, drawn
        elif drawn < low:
            second, low = at, drawn
    return first, second


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
