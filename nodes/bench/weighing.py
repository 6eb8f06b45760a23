"""Which weights a model's profiles should have by what was measured of each.

Weights share out requests, so only their ratio says anything: the lightest of those that were measured keeps
its weight, and the others follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from catalog.spec import HIGHEST_WEIGHT, ModelSpec, ProfileSpec

SMALL_CHANGE = 0.05  # what a bench would find another time is no reason to change a weight


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest load of one replica that held: of the profile of this name, as it was (`build`) then."""

    profile: str
    build: str
    rate: float
    promise: tuple[float, float]
    load: str


@dataclass(frozen=True, slots=True)
class Proposal:
    profile: str
    gpu_class: str
    rate: float
    was: float
    weight: float

    @property
    def is_change(self) -> bool:
        return abs(self.weight - self.was) > SMALL_CHANGE * self.was


@dataclass(frozen=True, slots=True)
class Weighing:
    """A proposal for each profile that was measured, or the sentence why there is none."""

    proposals: tuple[Proposal, ...] = ()
    says: str = ""

    @property
    def changes(self) -> tuple[Proposal, ...]:
        return tuple(each for each in self.proposals if each.is_change)


def build_of(profile: ProfileSpec) -> str:
    """What tells profiles apart that run differently: how they are chosen is none of it."""
    return replace(profile, weight=1.0, priority=0).fingerprint()


def weigh(spec: ModelSpec, measured: Iterable[Capacity]) -> Weighing:
    """`measured` with the latest last. Two count together where the same load was asked of them and the same
    had to hold; the load of the latest is what is compared."""
    builds = {profile.name: build_of(profile) for profile in spec.profiles}
    fit = [each for each in measured if each.rate > 0 and builds.get(each.profile) == each.build]
    if not fit:
        return Weighing(
            says=f"No profile of {spec.name} was measured up to its limit as it is now; bench a replica of "
            f"each (manage.py bench {spec.name} --profile NAME)."
        )
    alike = [each for each in fit if (each.promise, each.load) == (fit[-1].promise, fit[-1].load)]
    rates: Mapping[str, float] = {each.profile: each.rate for each in alike}
    missing = [profile.name for profile in spec.profiles if profile.name not in rates]
    if len(rates) < 2:
        return Weighing(says=_nothing_to_compare(spec, next(iter(rates)), missing))
    return Weighing(tuple(_proposals(spec, rates)))


def _proposals(spec: ModelSpec, rates: Mapping[str, float]) -> Iterable[Proposal]:
    measured = [profile for profile in spec.profiles if profile.name in rates]
    reference = min(measured, key=lambda profile: (profile.weight, rates[profile.name]))
    per_rate = reference.weight / rates[reference.name]
    for profile in measured:
        weight = reference.weight if profile is reference else _rounded(per_rate * rates[profile.name])
        yield Proposal(profile.name, profile.gpu_class, rates[profile.name], profile.weight, weight)


def _rounded(weight: float) -> float:
    """To three digits: a bench knows no more."""
    return float(f"{min(max(weight, 0.001), HIGHEST_WEIGHT):.3g}")


def _nothing_to_compare(spec: ModelSpec, only: str, missing: Sequence[str]) -> str:
    if not missing:
        return f"{spec.name} has one profile alone, so its weight says nothing."
    names = ", ".join(missing)
    return (
        f"Of {spec.name} only {only} was measured under this load, and a weight compares; bench a replica of "
        f"{names} as well (manage.py bench {spec.name} --profile NAME)."
    )
