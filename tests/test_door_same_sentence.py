"""One law, many doors: a bad model gets one sentence from admin, REST and shell, and none saves it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now
from django.test import Client
from django.utils.html import escape

from catalog.models import Event, Model, Name, Profile
from catalog.typed import write_list, write_pairs
from nodes.actions import register_node
from nodes.models import Node
from nodes.protocol import to_json
from tests.cast import a_model, alice
from tests.fake_agent import FakeAgent, gpus
from tests.hub_server import Hub, Reply, running_hub

pytestmark = pytest.mark.django_db

VLLM = {"name": "default", "engine": "vllm", "gpu_class": "h100", "tp": 1}


@pytest.fixture
def world(settings: Any) -> Iterator[Hub]:
    """A hub with a few repositories, a node with a few paths, and two models."""
    with running_hub() as hub, FakeAgent().running() as agent:
        settings.LLMGW_HUB_ENDPOINT, settings.HF_TOKEN = hub.url, ""
        hub.has_repository("org/whole", "model.safetensors", "config.json")
        hub.has_repository("org/empty", "README.md")
        hub.has_repository("org/two-gguf", "a-Q4.gguf", "b-Q8.gguf")
        refusal = {"X-Error-Code": "GatedRepo"}
        hub.replies["/api/models/org/gated"] = Reply(401, {"error": "gated"}, refusal)
        agent.gpus, agent.engines = gpus(2, "h100"), ("vllm", "llamacpp")
        node, identity = register_node("gpu-01", agent.address, by="alice", door="command")
        agent.serve(node, identity)
        Node.objects.filter(pk=node.pk).update(report=to_json(agent.report()), seen_at=Now())
        a_model("taken", aliases=["also-taken"])
        yield hub


def form(name: str = "m", **fields: Any) -> dict[str, Any]:
    profile = VLLM | fields.pop("profile", {})
    return {"name": name, "source": "org/whole", "profiles": [profile], "scaling": {"max": 1}} | fields


# --- the three doors ------------------------------------------------------------------------------


def by_admin(client: Client, model: dict[str, Any]) -> list[str]:
    sent: dict[str, Any] = {
        "name": model["name"],
        "source": model["source"],
        "aliases": write_list(model.get("aliases", [])),
        "scaling_min": model["scaling"].get("min", ""),
        "scaling_max": model["scaling"].get("max", ""),
        "idle_timeout": model["scaling"].get("idle_timeout", ""),
        "context_length": model.get("context_length", ""),
        "profiles-TOTAL_FORMS": "1",
        "profiles-INITIAL_FORMS": "0",
    }
    for key, value in model["profiles"][0].items():
        text = write_list(value) if key == "args" else write_pairs(value) if key == "env" else value
        sent[f"profiles-0-{key}"] = text
    answer = client.post("/admin/catalog/model/add/", sent)
    if answer.status_code == 302:
        return []
    shown, formset = answer.context["adminform"].form, answer.context["inline_admin_formsets"][0].formset
    said = [*shown.errors.values(), *formset.errors[0].values(), formset.non_form_errors()]
    sentences = [sentence for each in said for sentence in each]
    page = answer.content.decode()
    assert all(escape(sentence) in page for sentence in sentences)
    return sentences


def by_rest(client: Client, model: dict[str, Any]) -> list[str]:
    answer = client.post("/api/models", json.dumps(model), content_type="application/json")
    if answer.status_code == 201:
        return []
    assert answer.status_code == 400
    return [error["sentence"] for error in answer.json()["errors"]]


def by_command(client: Client, model: dict[str, Any]) -> list[str]:
    words = ["model_add", model["name"], "--source", model["source"]]
    for key, value in model["scaling"].items():
        words += [f"--{key.replace('_', '-')}={value}"]
    words += [f"--alias={alias}" for alias in model.get("aliases", [])]
    if "context_length" in model:
        words += [f"--context-length={model['context_length']}"]
    for key, value in model["profiles"][0].items():
        if key == "args":
            words += [f"--profile=args={argument}" for argument in value]
        elif key == "env":
            words += [f"--profile=env.{name}={inner}" for name, inner in value.items()]
        else:
            words += [f"--profile={key}={value}"]
    try:
        call_command(*words, stdout=io.StringIO(), stderr=io.StringIO())
    except CommandError as no:
        return [line for line in str(no).splitlines() if "--skip-source-check" not in line]
    return []


DOORS = (by_admin, by_rest, by_command)

BAD = [
    pytest.param(form(source="org/mispelt"), '"org/mispelt"', id="a misspelt repository"),
    pytest.param(form(source="org/gated"), "gated", id="a gated repository"),
    pytest.param(form(source="org/whole@v9"), "v9", id="a revision that is not there"),
    pytest.param(form(source="org/empty"), "no weights", id="a repository without weights"),
    pytest.param(form(source="whole"), '"whole"', id="a source that is no id"),
    pytest.param(form(source="/models/none"), "/models/none", id="a path that no node has"),
    pytest.param(form(source="org/whole", profile={"engine": "llamacpp"}), "GGUF", id="no GGUF for llamacpp"),
    pytest.param(
        form(source="org/two-gguf", profile={"engine": "llamacpp"}), "b-Q8.gguf", id="several GGUF files"
    ),
    pytest.param(form(profile={"engine": "warp"}), 'engine "warp" is not known', id="an unknown engine"),
    pytest.param(
        form(profile={"tp": 4, "gpus_per_node": 2}), "does not match TP 4 x PP 1", id="TP that does not match"
    ),
    pytest.param(form(profile={"tp": "two"}), "tp must be a whole number", id="TP that is no number"),
    pytest.param(form(profile={"gpu_class": ""}), "gpu_class is required", id="no GPU class"),
    pytest.param(form(profile={"args": ["--port", "80"]}), 'argument "--port"', id="an argument of llmgw's"),
    pytest.param(form(profile={"weight": 2_000}), "weight is above 1000", id="a weight out of range"),
    pytest.param(form(profile={"startup_timeout": "soon"}), "must be a duration", id="no duration"),
    pytest.param(form("taken"), 'model "taken" is in the catalog already', id="a name that is taken"),
    pytest.param(form(aliases=["also-taken"]), 'alias "also-taken" is claimed by both', id="an alias twice"),
    pytest.param(form(aliases=["taken"]), 'alias "taken" collides', id="an alias that is a name"),
    pytest.param(form(scaling={"min": 3, "max": 1}), "scaling max 1 is below min 3", id="max below min"),
    pytest.param(form(scaling={"max": 1, "idle_timeout": "1x"}), "idle_timeout must be", id="no idle time"),
    pytest.param(form(scaling={"max": 9_999_999_999}), "is out of range", id="a number out of range"),
    pytest.param(form("a\u202eb"), "control or invisible characters", id="a name that turns around"),
    pytest.param(form(" m"), "begins or ends with a space", id="a name that begins with a space"),
    pytest.param(form("<b>m"[:4] * 60), "longer than 200 characters", id="a name that is too long"),
    pytest.param(form(context_length=-1), "cannot be below 0", id="a negative context length"),
]


@pytest.mark.parametrize(("model", "says"), BAD)
def test_every_door_says_the_same_and_saves_nothing(
    world: Hub, client: Client, model: dict[str, Any], says: str
) -> None:
    client.force_login(alice())
    before = counts()
    admin, rest, command = (door(client, model) for door in DOORS)
    assert rest, "REST took it"
    assert says in rest[0]
    assert sorted(admin) == sorted(rest)
    assert command == rest
    assert counts() == before


@pytest.mark.parametrize("door", DOORS)
def test_a_hub_that_is_down_is_said_and_nothing_is_saved(
    client: Client, settings: Any, door: Callable[[Client, dict[str, Any]], list[str]]
) -> None:
    settings.LLMGW_HUB_ENDPOINT = "http://127.0.0.1:9"
    client.force_login(alice())
    (sentence,) = door(client, form())
    assert "could not ask the hub at http://127.0.0.1:9" in sentence
    assert not Model.objects.exists()


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_a_good_model(
    world: Hub, client: Client, door: Callable[[Client, dict[str, Any]], list[str]]
) -> None:
    client.force_login(alice())
    assert (
        door(client, form(aliases=["em"], profile={"env": {"A": "1"}, "args": ["--max-num-seqs", "8"]})) == []
    )
    spec = Model.objects.get(name="m").spec
    (profile,) = spec.profiles
    assert (spec.aliases, dict(profile.env), profile.args) == (("em",), {"A": "1"}, ("--max-num-seqs", "8"))


def counts() -> list[int]:
    return [rows.objects.count() for rows in (Model, Name, Profile, Event)]
