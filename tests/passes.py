"""The stage of a whole pass: a model as the catalog's verbs write it, agents that are real on the wire."""

from __future__ import annotations

from typing import Any

from catalog.models import Event, Model, Name, Profile
from catalog.spec import ModelSpec
from nodes.reconcile import PassReport, run_pass

HOLDER = "here:1:1"


def add_model(name: str = "m", *, low: int = 1, high: int = 1, **profile: Any) -> Model:
    """Rows as the catalog's verbs write them."""
    spec = ModelSpec.load(
        {
            "name": name,
            "source": "org/m",
            "profiles": [{"name": "p", "engine": "sim", "gpu_class": "sim", "tp": 1} | profile],
            "scaling": {"min": low, "max": high},
        }
    )
    row = Model.objects.create(name=name, source="org/m", scaling_min=low, scaling_max=high)
    Name.objects.create(name=name, model=row, is_canonical=True)
    for each in spec.profiles:
        values = each.as_dict()
        values["startup_timeout_ns"] = values.pop("startup_timeout")
        Profile.objects.create(model=row, fingerprint=each.fingerprint(), **values)
    return row


def edit_profile(model: Model, **columns: Any) -> None:
    profile = model.profiles.get()
    for name, value in columns.items():
        setattr(profile, name, value)
    profile.save()
    spec = Model.objects.get(pk=model.pk).spec.profiles[0]
    Profile.objects.filter(pk=profile.pk).update(fingerprint=spec.fingerprint())


def one_pass() -> PassReport:
    report = run_pass(HOLDER)
    assert report is not None
    return report


def verbs() -> list[str]:
    return list(Event.objects.filter(door="loop").order_by("id").values_list("verb", flat=True))
