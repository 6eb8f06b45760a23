"""Benches at each door: asked for, shown side by side, and the weights that follow from them set."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from catalog.models import Event, Model, Profile
from catalog.spec import ModelSpec
from nodes.bench.weighing import build_of
from nodes.management.commands.bench import read_dataset
from nodes.measured import weighing_of
from nodes.models import Job
from tests.cast import a_model, a_node, a_replica, alice, viola
from tests.pages import text_of
from tests.rest_client import Api

NAME = "my-model"
REPLICA = uuid.UUID("0ddba11a-0000-4000-8000-000000000001")
SLO = {"TTFTp99": "2s", "TPOTp99": "500ms"}


def ready() -> Model:
    """A model with a replica that could be asked, and is not."""
    model = a_model(NAME, slo=SLO)
    a_replica(model, a_node(), id=REPLICA)
    return model


def said_by(*words: str, capsys: Any) -> str:
    call_command("bench", *words)
    out: str = capsys.readouterr().out
    return out


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(None, "cannot be read: No such file or directory.", id="absent"),
        pytest.param(b"\xff\xfe", "is no text in UTF-8; give lines of JSON.", id="no text"),
        pytest.param(
            b"{}", 'Line 1 of the dataset "d.jsonl" cannot be used: its output_tokens', id="no rows"
        ),
    ],
)
def test_a_dataset_that_cannot_be_used_is_said(content: bytes | None, says: str, tmp_path: Path) -> None:
    a_model(slo=SLO)
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError) as refused:
        call_command("bench", "tiny", "--dataset", str(path))
    assert says in str(refused.value)


def test_a_dataset_without_an_end_is_left() -> None:
    with pytest.raises(CommandError, match="is larger than 1 MiB; give a smaller one"):
        read_dataset(Path("/dev/zero"), limit_bytes=2**20)


@pytest.mark.one_database
@pytest.mark.django_db
def test_a_text_of_a_dataset_may_hold_all_that_json_lets_it(tmp_path: Path) -> None:
    """Of the two lines, which a mark of UTF-8 precedes, the second alone is none."""
    a_model(slo=SLO)
    path = tmp_path / "d.jsonl"
    said = "a\u2028b\u0085c\x7f"
    row = {"messages": [{"role": "user", "content": said}], "output_tokens": 9}
    path.write_text(f"{json.dumps(row, ensure_ascii=False)}\r\n{{", "utf-8-sig")
    with pytest.raises(CommandError, match="Line 2 of the dataset"):
        call_command("bench", "tiny", "--dataset", str(path))


def measured(model: Model, profile: str, rate: float, **more: Any) -> Job:
    """As a bench leaves it."""
    spec: ModelSpec = model.spec
    times = {f"p{level}_ms": 10.0 for level in (50, 90, 95, 99)}
    step = {
        "rate": rate, "measured_s": 20, "requests": 100, "failed": 0, "output_tokens_per_s": 9.0,
        "ttft": times, "tpot": times, "holds": True, "why": "", "is_cut": False,
    }  # fmt: skip
    result = {
        "through": "replica", "replica": str(REPLICA), "profile": profile, "rate": rate, "says": "It held.",
        "build": build_of(spec.profile(profile)), "promise": {"ttft_p99_ms": 1.0, "tpot_p99_ms": 1.0},
        "steps": [step], "is_limit": True,
    }  # fmt: skip
    job = Job(kind="bench", model=model, model_name=model.name, by="alice", state="done", result=result)
    job.asked_at = model.changed_at + timedelta(seconds=Job.objects.count())
    for name, value in ({"options": {"dataset": "<script>"}, "ended_at": model.changed_at} | more).items():
        setattr(job, name, value)
    job.save()
    return job


def two_profiles() -> Model:
    profiles = [{"name": name, "engine": "sim", "gpu_class": name} for name in ("small", "large")]
    return a_model(slo=SLO, profiles=profiles)


def weights_of(model: Model) -> dict[str, float]:
    return dict(Profile.objects.filter(model=model).values_list("name", "weight"))


@pytest.mark.django_db
def test_weights_are_shown_and_then_set(capsys: Any) -> None:
    model = two_profiles()
    measured(model, "small", 10)
    unbounded = measured(model, "large", 99)
    Job.objects.filter(pk=unbounded.pk).update(result=unbounded.result | {"is_limit": False})
    assert "only small was measured under this load" in said_by("tiny", "--runs", capsys=capsys)
    measured(model, "large", 45)
    shown = said_by("tiny", "--runs", capsys=capsys)
    assert "large" in shown
    assert shown.splitlines()[-2].split() == ["large", "large", "45", "1", "4.5"]
    assert weights_of(model) == {"small": 1, "large": 1}, "nothing is set by looking"
    assert "Set; requests follow at once." in said_by("tiny", "--runs", "--apply", capsys=capsys)
    assert weights_of(model) == {"small": 1, "large": 4.5}
    event = Event.objects.filter(verb="edit").get()
    assert event.why == "measured by bench"
    assert "They have these weights." in said_by("tiny", "--runs", "--apply", capsys=capsys)
    told = json.loads(said_by("tiny", "--runs", "--json", capsys=capsys))
    assert [each["weight"] for each in told["weights"]["profiles"]] == [1, 4.5]
    assert [each["rate"] for each in told["runs"]] == [45, 99, 10]


@pytest.mark.django_db
def test_the_last_runs_say_which_weights_follow() -> None:
    model = two_profiles()
    for hour, (profile, rate) in enumerate((("small", 10), ("large", 45), ("large", 60))):
        measured(model, profile, rate, ended_at=model.changed_at + timedelta(hours=hour))
    assert weighing_of(model, runs=2).says.startswith("Of tiny only large was measured under this load")
    measured(model, "small", 20, ended_at=model.changed_at + timedelta(hours=4))
    assert [each.weight for each in weighing_of(model, runs=2).proposals] == [1, 3]


@pytest.mark.django_db
def test_the_page_asks_for_a_bench_and_sets_what_it_showed() -> None:
    model = ready()
    path = f"/admin/catalog/model/{model.pk}/bench/"
    client = Client()
    client.force_login(alice())
    refused = client.post(path, {"distribution": "fixed", "step": "never", "start_rate": "9999"})
    assert b"step must be a duration" in refused.content
    assert b"start_rate is above 5000" in refused.content
    assert client.post(path, {"distribution": "fixed", "seed": "7"}).status_code == 302
    job = Job.objects.get()
    assert (job.state, job.options["seed"], job.by, job.replica) == ("queued", 7, "alice", REPLICA)
    shown = client.get(path).content.decode()
    assert "waits for a worker" in shown
    assert f"/admin/nodes/job/{job.pk}/change/" in shown
    client.logout()
    client.force_login(viola())
    assert "Run the bench" not in client.get(path).content.decode()


@pytest.mark.django_db
def test_the_page_shows_runs_and_sets_their_weights() -> None:
    model = two_profiles()
    measured(model, "small", 10)
    measured(model, "large", 20, problem="<b>\x1b[31m", gpu="<script>")
    path = f"/admin/catalog/model/{model.pk}/bench/"
    client = Client()
    client.force_login(alice())
    shown = client.get(path).content.decode()
    assert "It held." in shown
    assert "<script>" not in shown.replace("<script src", "").replace("<script type", "")
    sign = shown.partition('name="apply" value="')[2].partition('"')[0]
    assert sign.endswith("large=2")
    job = text_of(client.get(f"/admin/nodes/job/{Job.objects.first().pk}/change/").content.decode())
    assert "100 - 10 ms 10 ms 10 ms" in job
    assert job.partition("Beside other runs")[1]
    plots = client.get(f"{path}plots/").json()
    assert plots["x"] == {"label": "load", "unit": "requests/s", "values": [10, 20]}
    assert client.post(path, {"apply": sign + "0"}).status_code == 302
    assert weights_of(model) == {"small": 1, "large": 1}, "it was not what the page had shown"
    assert client.post(path, {"apply": sign}).status_code == 302
    assert weights_of(model) == {"small": 1, "large": 2}


@pytest.mark.django_db
def test_rest_asks_for_a_bench() -> None:
    ready()
    api = Api(alice())
    answer = api.ask("POST", f"models/{NAME}/bench", {"options": {"seed": 3}, "why": "the demo"})
    told = answer.json()
    assert (answer.status_code, told["state"], told["why"]) == (202, "queued", "the demo")
    assert told["options"]["seed"] == 3
    assert answer["Location"].endswith(f"/api/jobs/{told['id']}")
    assert api("POST", f"models/{NAME}/bench")[0] == 409
    for body, field in (
        ({"replica": "x"}, "replica"),
        ({"options": []}, ""),
        ({"options": {"seed": "x"}}, "seed"),
        ({"options": {"dataset": "/etc/passwd"}}, "dataset"),
    ):
        status, told = api("POST", f"models/{NAME}/bench", body)
        assert (status, told["errors"][0]["field"]) == (400, field)
