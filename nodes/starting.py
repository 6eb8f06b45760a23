"""How what is missing comes about: which profile may be tried, where it goes, who has to leave for it, and
what is said when nothing helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from catalog.durations import SECOND, format_duration
from catalog.reading import quote
from catalog.spec import ProfileSpec
from nodes import eviction, placement, retry, scaling
from nodes.buckets import Start
from nodes.draft import Crew, Draft
from nodes.placement import Seat, Unseated, Want
from nodes.protocol import Launch
from nodes.retry import Failure
from nodes.seating import place
from nodes.sharing import key_at, key_of
from nodes.snapshot import Model, launch_of

RESIDENCE = timedelta(minutes=2)  # that a replica has been ready for before it may be evicted


@dataclass(frozen=True, slots=True)
class Choice:
    """The profiles that may be tried now in this order, why others may not, or not everywhere, and whom to
    pass over for what reason.

    weary: those that keep failing, and so come after the others for a while.
    """

    profiles: tuple[ProfileSpec, ...]
    waits: tuple[str, ...] = ()
    weary: tuple[str, ...] = ()
    avoid: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


class Starter:
    """Starts replicas on the room that a draft has left. Launches and failures are looked up once."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._failures: dict[int, list[Failure]] = {}
        for model_id, failure in draft.snapshot.failures:
            self._failures.setdefault(model_id, []).append(failure)
        self._idle: list[eviction.Tenant] | None = None

    def fill(self, crew: Crew, missing: int, why: Callable[[], str], *, may_evict: bool = True) -> None:
        """Start as many as are missing, or say what would end the wait."""
        choice = self.choose(crew.model)
        found: Unseated | None = None
        while missing and crew.room_below_max > 0 and choice.profiles:
            seat = self.seat(crew, choice)
            if isinstance(seat, Unseated):
                found = seat
                break
            self.start(crew, seat, why() + _giving_way(seat, choice))
            crew.pending += 1
            missing -= 1
        if not missing:
            return
        crew.missing = missing
        if crew.room_below_max <= 0:
            says = "1 replica is" if crew.leaving == 1 else f"{crew.leaving} replicas are"
            why_not = f"{says} stopping first, as the maximum is {crew.model.spec.scaling.max}"
            self.draft.block(crew.model, missing, why_not)
        elif found is None:
            self.draft.block(crew.model, missing, "; ".join(choice.waits))
        else:
            waits = [found.why + self.make_room(crew, choice, may_evict), *choice.waits]
            self.draft.block(crew.model, missing, "; ".join(waits), found.reasons)

    def choose(self, model: Model) -> Choice:
        """One that waits long gives way to the next; one that backs off does not, being back in a moment."""
        if model.fault:
            return Choice((), (model.fault,))
        preferred = placement.by_preference(model.spec.profiles)
        failed = self._failures.get(model.id)
        if not failed:
            return Choice(preferred)
        first: list[ProfileSpec] = []
        last: list[ProfileSpec] = []
        waits, avoid = [], {}
        for profile in preferred:
            launch = launch_of(model, profile)
            verdict = retry.judge(
                profile.name,
                [failure for failure in failed if retry.is_same_attempt(failure.launch, launch)],
                wanted=model.spec.scaling.min,
                now=self.draft.now,
                has_room=self._has_room,
            )
            if verdict.may_try:
                (last if verdict.gives_way else first).append(profile)
                avoid[profile.name] = verdict.avoid
                waits += [verdict.why] if verdict.avoid else []
                continue
            waits.append(verdict.why)
            if not verdict.gives_way:
                break
        weary = tuple(profile.name for profile in last)
        return Choice((*first, *last), tuple(waits), weary, avoid)

    def _has_room(self, failure: Failure) -> bool:
        """Whether its node could take now what it could not take then."""
        spot = self.draft.room.spots.get(failure.node or 0)
        report = spot.node.report if spot else None
        if report is None or report.room_bytes is None or failure.total_bytes is None:
            return False
        here = placement.here_bytes(failure.launch.source, key_of(failure.launch), report)
        return report.room_bytes + here >= failure.total_bytes

    def failures_of(self, model: Model) -> list[Failure]:
        return self._failures.get(model.id, [])

    def want(self, crew: Crew, choice: Choice) -> Want:
        model = crew.model
        return Want(
            spec=model.spec,
            profiles=choice.profiles,
            source_bytes=self._source_bytes(model),
            crowd=crew.by_node,
            held_on=model.held_on,
            weights_key=key_at(model.spec.source, model.source_revision),
            avoid=choice.avoid,
        )

    def _source_bytes(self, model: Model) -> int | None:
        """As its check found or, where nobody could ask, as an agent did that had no room for it: so nodes
        are passed over until they have."""
        told = [each.total_bytes for each in self.failures_of(model) if each.total_bytes]
        return max([model.source_bytes or 0, *told]) or None

    def seat(self, crew: Crew, choice: Choice) -> Seat | Unseated:
        return place(self.want(crew, choice), self.draft.room)

    def start(self, crew: Crew, seat: Seat, why: str, *, replaces: str = "") -> None:
        """Write the start down, and take its room."""
        launch = self.launch(crew, seat.profile)
        self.draft.start.append(Start(crew.model.id, launch, seat.places, why, replaces))
        for spot in seat.places:
            self.draft.room.take(placement.holding_of(launch, spot, has_begun=False))
            crew.count_in(spot.node)

    def launch(self, crew: Crew, profile: ProfileSpec) -> Launch:
        if profile.name not in crew.launches:
            crew.launches[profile.name] = launch_of(crew.model, profile)
        return crew.launches[profile.name]

    # --- who leaves for it ------------------------------------------------------------------------

    def make_room(self, crew: Crew, choice: Choice, may_evict: bool) -> str:
        """Evict idle replicas where that gives the want a seat, unless what leaves anyway does."""
        want = self.want(crew, choice)
        leaving = list(self.draft.tenants.values())
        if eviction.makes_room(want, self.draft.room, leaving):
            return "; what is stopping makes room for it"
        if self.draft.alarm or not may_evict:
            return ""
        idle = [tenant for tenant in self.idle() if tenant.replica not in self.draft.tenants]
        chosen = eviction.cheapest(want, self.draft.room, idle, leaving)
        for tenant in chosen:
            idle_for = format_duration(int((self.draft.now - tenant.asked_at).total_seconds()) * SECOND)
            why = f"idle for {idle_for}, and model {quote(crew.model.spec.name)} needs its room"
            self.draft.evict_unit(tenant.replica, why)
        if not chosen:
            return ""
        return f"; {'1 idle replica is' if len(chosen) == 1 else f'{len(chosen)} idle replicas are'} evicted"

    def idle(self) -> list[eviction.Tenant]:
        """Replicas on demand that nobody uses, past their minimum residence."""
        if self._idle is None:
            self._idle = []
            for crew in self.draft.in_order():
                is_free = crew.model.spec.on_demand and not crew.stand_ins and scaling.is_unused(crew)
                if is_free and not scaling.is_asked_for(self.draft, crew):
                    self._idle += [
                        eviction.Tenant(each.id, each.holdings(), scaling.last_of_use(crew, each))
                        for each in crew.units
                        if self.draft.now - each.state_since >= RESIDENCE
                    ]
        return self._idle


def _giving_way(seat: Seat, choice: Choice) -> str:
    passed = [quote(name) for name in choice.weary if name != seat.profile.name]
    if not passed or seat.profile.name in choice.weary:
        return ""
    return f"; profile {', '.join(passed)} keeps failing and gives way for a while"
