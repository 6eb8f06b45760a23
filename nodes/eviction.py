"""What has to leave for a want to find a seat: the cheapest set of idle replicas that suffices.

Cheapest is the fewest; of as many, those that nobody has asked for the longest. What leaves already counts
as gone, so that nothing is evicted for a want that only has to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations

from catalog.spec import ProfileSpec
from nodes.placement import Holding, Spot, Want, refusal
from nodes.seating import Room, fabrics, gang_of

CONSIDERED = 10  # replicas of one node, those that nobody has asked for the longest


@dataclass(frozen=True, slots=True)
class Tenant:
    """A replica that may go or is going, and what it holds. asked_at: when it was last of use to anybody."""

    replica: str
    holdings: tuple[Holding, ...]
    asked_at: datetime


def makes_room(want: Want, room: Room, gone: Iterable[Tenant]) -> bool:
    """Whether the want finds a seat once these are gone."""
    given_back = _by_node(gone)
    return any(_would_fit(want, profile, room, given_back) for profile in want.profiles)


def cheapest(
    want: Want, room: Room, candidates: Iterable[Tenant], leaving: Iterable[Tenant] = ()
) -> tuple[Tenant, ...]:
    """The set to evict, besides those that leave already; empty where none suffices."""
    idle = sorted(candidates, key=lambda tenant: (tenant.asked_at, tenant.replica))
    leaving = tuple(leaving)
    sets: list[tuple[Tenant, ...]] = []
    for profile in want.profiles:
        find = _of_a_fabric if profile.nodes > 1 else _of_a_node
        sets += find(want, profile, room, idle, leaving)
    return min(sets, key=_cost, default=())


def _cost(gone: Sequence[Tenant]) -> tuple[int, list[datetime], list[str]]:
    return (
        len(gone),
        sorted((tenant.asked_at for tenant in gone), reverse=True),
        [tenant.replica for tenant in gone],
    )


def _of_a_node(
    want: Want, profile: ProfileSpec, room: Room, idle: Sequence[Tenant], leaving: Sequence[Tenant]
) -> Iterable[tuple[Tenant, ...]]:
    """The cheapest set of each node that could be the one."""
    leaves = _by_node(leaving)
    on_node: dict[int, list[Tenant]] = {}
    for tenant in idle:
        for node in {holding.place.node for holding in tenant.holdings}:
            on_node.setdefault(node, []).append(tenant)
    for node, local in on_node.items():
        spot = room.spots.get(node)
        if spot is None or node not in room.open_to(profile)[0]:
            continue
        tenants = local[:CONSIDERED]
        going = leaves.get(node, [])
        if not _fits(want, profile, spot, [*_by_node(tenants)[node], *going]):
            continue
        for size in range(1, len(tenants) + 1):
            sufficient = [
                chosen
                for chosen in combinations(tenants, size)
                if _fits(want, profile, spot, [*_by_node(chosen)[node], *going])
            ]
            if sufficient:
                yield min(sufficient, key=_cost)
                break


def _of_a_fabric(
    want: Want, profile: ProfileSpec, room: Room, idle: Sequence[Tenant], leaving: Sequence[Tenant]
) -> Iterable[tuple[Tenant, ...]]:
    """For each fabric a set none of which is superfluous: one after another until it suffices, then back."""
    for spots in fabrics(profile, room).values():
        ids = {spot.node.id for spot in spots}
        local = [tenant for tenant in idle if any(each.place.node in ids for each in tenant.holdings)]
        gone: list[Tenant] = []
        for tenant in local:
            gone.append(tenant)
            if _gang_fits(want, profile, spots, [*gone, *leaving]):
                break
        else:
            continue
        for tenant in reversed(local[: len(gone)]):
            fewer = [each for each in gone if each is not tenant]
            if fewer and _gang_fits(want, profile, spots, [*fewer, *leaving]):
                gone = fewer
        yield tuple(gone)


def _would_fit(want: Want, profile: ProfileSpec, room: Room, given_back: dict[int, list[Holding]]) -> bool:
    if profile.nodes > 1:
        return any(
            bool(gang_of(want, profile, [spot.without(given_back.get(spot.node.id, ())) for spot in spots]))
            for spots in fabrics(profile, room).values()
        )
    return any(
        _fits(want, profile, room.spots[node], holdings)
        for node, holdings in given_back.items()
        if node in room.spots
    )


def _fits(want: Want, profile: ProfileSpec, spot: Spot, gone: Iterable[Holding]) -> bool:
    return not refusal(want, profile, spot.without(gone))


def _gang_fits(want: Want, profile: ProfileSpec, spots: Iterable[Spot], gone: Iterable[Tenant]) -> bool:
    given_back = _by_node(gone)
    return bool(gang_of(want, profile, [spot.without(given_back.get(spot.node.id, ())) for spot in spots]))


def _by_node(tenants: Iterable[Tenant]) -> dict[int, list[Holding]]:
    found: dict[int, list[Holding]] = {}
    for tenant in tenants:
        for holding in tenant.holdings:
            found.setdefault(holding.place.node, []).append(holding)
    return found
