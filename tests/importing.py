"""A whole catalog at once, as tests import it and look at what became of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from catalog.actions import Imported, import_catalog
from catalog.importing import ImportRefused
from catalog.models import Event, Fallback, Model, Name, Profile, Revision, Tombstone
from tests.cast import model_form, nobody_is_asked


def imported(*raws: object, **told: Any) -> Imported:
    common: dict[str, Any] = {"by": "ann", "door": "command", "ask_paths": nobody_is_asked}
    return import_catalog(raws, **{"prune": False, "is_trial": False, "after_change": int} | common | told)


def refused(*raws: object, **told: Any) -> list[tuple[int | None, str]]:
    before = everything()
    with pytest.raises(ImportRefused) as no:
        imported(*raws, **told)
    assert everything() == before
    return [(each.number, each.fault.sentence) for each in no.value.placed]


def manage(*words: object) -> str:
    said = io.StringIO()
    call_command(*map(str, words), stdout=said, stderr=said, no_color=True)
    return said.getvalue()


def refusal(*words: object) -> list[str]:
    before = everything()
    with pytest.raises(CommandError) as no:
        manage(*words)
    assert everything() == before
    return str(no.value).splitlines()


def everything() -> list[list[dict[str, Any]]]:
    tables = (Model, Name, Profile, Fallback, Tombstone, Event, Revision)
    return [list(table.objects.order_by("pk").values()) for table in tables]


def form(name: str, **fields: Any) -> dict[str, Any]:
    return model_form(name, **fields)


def profile(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "engine": "sim", "gpu_class": "sim"} | fields


def real(name: str, **fields: Any) -> dict[str, Any]:
    """One whose source somebody must be asked about."""
    vllm = {"name": "p", "engine": "vllm", "gpu_class": "h100"}
    return form(name, **{"source": f"/models/{name}", "profiles": [vllm]} | fields)
