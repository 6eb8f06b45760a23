"""Models as every door shows them: how many of their replicas are ready, wanted and stale."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from django.conf import settings
from django.db.models import Prefetch, Q, QuerySet

from catalog.hiding import hide_model
from catalog.models import Model
from catalog.typed import scaling_words
from nodes.checks import claims_of
from nodes.models import Replica
from nodes.showing.ages import with_age
from nodes.showing.checks import Checked, checked, engine_checks
from nodes.showing.running import replicas, spec_of, staleness_of


@dataclass(frozen=True, slots=True)
class Tally:
    """A model's replicas, counted. `stale`: a restart would change what runs; `mild`: it would not."""

    ready: int = 0
    wanted: int = 0
    stale: int = 0
    mild: int = 0


def replicas_to_show(model: Model) -> QuerySet[Replica]:
    """Of the model: what is not over, and what failed as it would be started again, unless dealt with."""
    failed = Q(state=Replica.State.FAILED, wanted=Replica.Wanted.RUN)
    as_it_is_now = Q(fingerprint__in=model.profiles.values("fingerprint"))
    return replicas().filter(~Q(state__in=Replica.OVER) | failed & as_it_is_now, model=model)


def models_with_replicas() -> QuerySet[Model]:
    """All models, with their replicas that are not over, what could not be placed, their rolls, and what
    engine checks found. Six queries."""
    alive = with_age(Replica.objects.exclude(state__in=Replica.OVER), "state_since")
    return Model.objects.select_related("unplaced", "roll").prefetch_related(
        "names",
        "profiles",
        "fallbacks",
        Prefetch("replicas", alive, "alive"),
        Prefetch("engine_checks", engine_checks()),
    )


def tally(model: Model) -> Tally:
    """Of a row of `models_with_replicas()`."""
    alive: list[Replica] = model.alive  # type: ignore[attr-defined]  # prefetched
    running = [replica for replica in alive if replica.wanted == Replica.Wanted.RUN]
    found = [staleness_of(replica) for replica in alive]
    missing = model.unplaced.missing if hasattr(model, "unplaced") else 0
    return Tally(
        ready=sum(replica.state == Replica.State.READY for replica in running),
        wanted=max(model.scaling_min, len(running) + missing),
        stale=sum(each.restart_needed for each in found),
        mild=sum(each.stale_profile is True and not each.restart_needed for each in found),
    )


def model_as_dict(model: Model, *, sees_env: bool = False) -> dict[str, Any]:
    """A row of `models_with_replicas()` as REST and `--json` tell it: the catalog's form, and its status."""
    spec = spec_of(model)
    form = hide_model(spec.as_text_dict(), sees_env=sees_env)
    counted = tally(model)
    return form | {
        "status": {
            "scaling": scaling_words(spec.scaling, settings.LLMGW_IDLE_TIMEOUT),
            "simulated": spec.simulated,
            "ready": counted.ready,
            "wanted": counted.wanted,
            "stale": counted.stale,
            "unplaced": _unplaced(model),
            "roll": _roll(model),
            "engine_check": check_of_model(model).as_dict(),
            "faults": [fault.sentence for fault in spec.faults_today()],
            "source": {
                "state": model.source_state or "unchecked",
                "sentence": model.source_sentence,
                "revision": model.source_revision,
                "checked_at": model.source_checked_at and model.source_checked_at.isoformat(),
                "skipped_by": model.source_skipped_by,
            },
        }
    }


def check_of_model(model: Model) -> Checked:
    """Of a row of `models_with_replicas()`: the newest check of a profile as it is now, else the newest."""
    rows, spec = list(model.engine_checks.all()), spec_of(model)
    fingerprints = {each.fingerprint for each in model.profiles.all()}
    found = next((row for row in rows if row.fingerprint in fingerprints), next(iter(rows), None))
    profile = (spec.profile(found.profile_name) if found else None) or next(iter(spec.profiles), None)
    claims = claims_of(
        spec.name,
        asdict(spec.capabilities),
        spec.context_length,
        engine=profile.engine if profile else "",
        args=profile.args if profile else (),
    )
    return checked(rows, fingerprints, claims)


def _unplaced(model: Model) -> dict[str, Any] | None:
    if not hasattr(model, "unplaced"):
        return None
    return {"missing": model.unplaced.missing, "why": model.unplaced.why}


def _roll(model: Model) -> dict[str, Any] | None:
    if not hasattr(model, "roll"):
        return None
    roll = model.roll
    return {"by": roll.by, "why": roll.why, "asked_at": roll.asked_at.isoformat(), "halted": roll.halted}
