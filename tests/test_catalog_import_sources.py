"""The sources of a whole catalog: asked about once each, side by side, and refused together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import connections

from catalog.actions import SourcesRefused
from catalog.models import Event, Model
from catalog.source import PathFacts
from catalog.spec import ModelSpec
from tests.hub_server import Reply, running_hub
from tests.importing import form, imported, real, refused

pytestmark = pytest.mark.django_db


def on_gpu_01(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    return [PathFacts("gpu-01", "lost" not in path, "dir", 7, ("model.safetensors", "config.json"))]


def test_only_what_reads_otherwise_is_asked_about() -> None:
    asked: list[str] = []

    def ask(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        asked.append(path)
        return on_gpu_01(path, spec)

    imported(real("one"), real("two"), form("sim"), ask_paths=ask)
    assert sorted(asked) == ["/models/one", "/models/two"]
    asked.clear()
    described = real("one", description="changed")
    imported(described, real("two", source="/models/other"), real("three"), ask_paths=ask)
    assert sorted(asked) == ["/models/other", "/models/three"]
    rows = {row.name: row for row in Model.objects.all()}
    assert {row.source_state for row in rows.values()} == {"ok"}
    assert "/models/one" in rows["one"].source_sentence
    assert "/models/other" in rows["two"].source_sentence
    assert Event.objects.filter(subject="one").latest("id").detail["source_check"]["code"] == "recorded"


def test_what_is_known_of_a_source_is_held_against_an_edit_that_asks_about_none() -> None:
    imported(real("one"), ask_paths=on_gpu_01)
    Model.objects.update(source_facts={"context_length": 4096})
    (warning,) = imported(real("one", context_length=8192)).warnings
    assert warning.startswith(
        'model "one": context_length 8192 is above the 4096 that the model was made for'
    )


def test_sources_are_asked_about_side_by_side_and_bounded() -> None:
    together = threading.Barrier(8)
    running, most = [0], [0]
    lock = threading.Lock()

    def ask(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(20)
        with lock:
            running[0] -= 1
        return on_gpu_01(path, spec)

    imported(*[real(f"m{number}") for number in range(16)], ask_paths=ask)
    assert most == [8]


def test_every_refused_source_is_told_at_once_and_nothing_is_saved() -> None:
    with pytest.raises(SourcesRefused) as no:
        imported(real("lost-1"), real("found"), real("lost-2"), ask_paths=on_gpu_01)
    assert [(each.number, each.fault.field) for each in no.value.placed] == [(0, "source"), (2, "source")]
    says = 'model "lost-1": source "/models/lost-1" is not on the node gpu-01'
    assert no.value.placed[0].fault.sentence.startswith(says)
    assert not Model.objects.exists()


def test_a_hub_that_is_silent_is_not_waited_for_again_and_again(settings: Any) -> None:
    settings.LLMGW_HUB_TIMEOUT_S = 0.5
    with running_hub() as hub:
        settings.LLMGW_HUB_ENDPOINT = hub.url
        for number in range(100):
            path = f"/api/models/org/m{number}"
            hub.replies[path] = Reply(drip=lambda _: hub.is_closing.wait(20))
        names = [f"m{number}" for number in range(100)]
        forms = [real(name, source=f"org/{name}") for name in names]
        with pytest.raises(SourcesRefused) as no:
            imported(*forms, real("lost"), real("found"), ask_paths=on_gpu_01)
        assert len(hub.asked) <= 16
    told = {fault.model: (fault.code, fault.sentence) for fault in no.value.faults}
    assert list(told) == [*names, "lost"]
    assert {code for code, _ in told.values()} == {"unreachable", "unasked", "path_missing"}
    assert told["m99"][1] == (
        'model "m99": source "org/m99" was not asked about, as the hub did not answer for another model just'
        " now; repeat this once the hub answers"
    )


def test_a_check_is_skipped_only_for_a_reason() -> None:
    says = "the source check is skipped only for a reason; say why, for the history to keep"
    assert refused(real("lost"), skip_source_check=True) == [(0, f'model "lost": {says}')]
    told = imported(real("lost"), skip_source_check=True, why="copied tonight")
    assert told.warnings == ('model "lost": source "/models/lost" was not checked, on the word of ann',)
    row = Model.objects.get()
    assert (row.source_state, row.source_skipped_by) == ("", "ann")


@pytest.mark.django_db(transaction=True)
def test_threads_that_ask_leave_no_connection_behind() -> None:
    seen: list[Any] = []

    def ask(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        Model.objects.count()
        seen.append(connections["default"])
        return on_gpu_01(path, spec)

    imported(*[real(f"m{number}") for number in range(12)], ask_paths=ask)
    assert len(seen) == 12
    assert all(each.connection is None for each in seen)
