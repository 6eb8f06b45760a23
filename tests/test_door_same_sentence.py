"""One law, many doors: a bad model gets one sentence from admin, REST, shell and file, and none saves it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.models import Event, Fallback, Model, Name, Profile
from catalog.spec import ModelSpec
from nodes.actions import register_node
from nodes.models import Node
from nodes.protocol import to_json
from tests.cast import a_model, alice, model_form
from tests.doors import (
    ADDING,
    BASE,
    DOORS,
    EDITING,
    admin_edit,
    catalog_import,
    manage,
    model_edit,
    rest_patch,
    rest_put,
)
from tests.fake_agent import FakeAgent, gpus
from tests.hub_server import Hub, Reply, running_hub

INFINITY = float("inf")

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

VLLM = {"name": "default", "engine": "vllm", "gpu_class": "h100", "tp": 1}


@pytest.fixture
def world(settings: Any) -> Iterator[Hub]:
    """A hub with a few repositories, a node with a few paths, and a model."""
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


BAD = [
    pytest.param(form(source="org/mispelt"), '"org/mispelt"', id="a misspelt repository"),
    pytest.param(form(source="org/gated"), "gated", id="a gated repository"),
    pytest.param(form(source="org/whole@v9"), "v9", id="a revision that is not there"),
    pytest.param(form(source="org/empty"), "no weights", id="a repository without weights"),
    pytest.param(form(source="whole"), '"whole"', id="a source that is no id"),
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
    pytest.param(
        form(profile={"args": ["--hub-token", "hf_" + "a" * 34]}),
        'profile "default": an argument looks like a secret, and everybody reads a command line; put it into'
        " env, and write secret:NAME",
        id="a secret in the command line",
    ),
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
    pytest.param(form(""), "a model has no name", id="no name"),
    pytest.param(form(source=""), 'model "m": source is required', id="no source"),
    pytest.param(form("m" * 10_000), "name is longer than 200 characters", id="a name of 10,000 characters"),
    pytest.param(form("a\x07b"), 'name "a\\x07b" holds control or invisible', id="a name that rings a bell"),
    pytest.param(form("a\0b"), "name holds a NUL character", id="a name with a NUL"),
    pytest.param(form(source="org/x\u200b"), "holds control or invisible", id="a source that cannot be seen"),
    pytest.param(form(description="x" * 10_001), "longer than 10000 characters", id="a long description"),
    pytest.param(form(aliases=["a\tb"]), 'aliases "a\\tb" holds control', id="an alias with a tab"),
    pytest.param(form(aliases=["m"]), 'alias "m" collides', id="its own name for an alias"),
    pytest.param(form(aliases=["x", "x"]), 'alias "x" is claimed by both "m" and "m"', id="one alias twice"),
    pytest.param(
        form(aliases=[f"alias-{number}" for number in range(4_097)]),
        "aliases has more than 4096 entries",
        id="too many aliases",
    ),
    pytest.param(
        form(fallbacks=["nobody"]), 'fallback "nobody" is not in the catalog', id="no such fallback"
    ),
    pytest.param(form(fallbacks=["m"]), 'fallback "m" is the model itself', id="its own fallback"),
    pytest.param(
        form(aliases=["em"], fallbacks=["taken", "em"]),
        'fallback "em" is the model itself; name another model',
        id="its own fallback by an alias",
    ),
    pytest.param(form(routing_profile="shortest"), 'routing_profile "shortest"', id="no such routing"),
    pytest.param(form(max_output="many"), "max_output must be a whole number", id="a word for a number"),
    pytest.param(form(context_length=2**31), "context_length is out of range", id="too many tokens"),
    pytest.param(
        form(context_length="1.5"), "must be a whole number, not a text", id="a fraction of a token"
    ),
    pytest.param(form(slo={"TTFTp99": "fast"}), "slo.TTFTp99 must be a duration", id="no promise"),
    pytest.param(form(slo={"TPOTp99": "-1s"}), "slo.TPOTp99 cannot be below 0", id="a promise of the past"),
    pytest.param(
        form(limits={"concurrency": -1}), "limits.concurrency cannot be below 0", id="fewer than none at once"
    ),
    pytest.param(
        form(limits={"requests_per_minute": "many"}),
        "limits.requests_per_minute must be a whole number, not a text",
        id="a word for a limit",
    ),
    pytest.param(
        form(limits={"tokens_per_minute": 2**31}),
        "limits.tokens_per_minute is out of range",
        id="a limit beyond its column",
    ),
    pytest.param(
        form(limits={"over_max_output": "cut"}),
        'limits.over_max_output "cut" is not known; choose clamp or refuse',
        id="no such way with long answers",
    ),
    pytest.param(
        form(timeouts={"hold": "for ever"}), "timeouts.hold must be a duration", id="no length of a hold"
    ),
    pytest.param(
        form(timeouts={"idle": "25h"}), "timeouts.idle is longer than 24h", id="a time-out of a day"
    ),
    pytest.param(
        form(timeouts={"connect": "-1s"}), "timeouts.connect cannot be below 0", id="a time-out of the past"
    ),
    pytest.param(form(scaling={"max": -1}), "scaling max -1 is below min 0", id="a negative max"),
    pytest.param(
        form(scaling={"max": 1, "idle_timeout": "300000000h"}),
        "longer than 290 years",
        id="an age of idleness",
    ),
    pytest.param(form(profile={"name": "a\u200bb"}), "holds control or invisible", id="an unseen profile"),
    pytest.param(form(profile={"tp": 2**31}), "tp is out of range", id="TP beyond its column"),
    pytest.param(form(profile={"priority": -(2**31)}), "priority is out of range", id="priority beyond its"),
    pytest.param(
        form(profile={"min_disk_gb": -5}), "min_disk_gb cannot be below 0", id="a disk below nothing"
    ),
    pytest.param(form(profile={"weight": INFINITY}), "weight must be a finite number", id="infinite weight"),
    pytest.param(
        form(profile={"weight": "much"}), "weight must be a number", id="a weight that is no number"
    ),
    pytest.param(
        form(profile={"args": ["-tp=4"]}), 'argument "-tp=4" is set by llmgw', id="a short argument"
    ),
    pytest.param(form(profile={"env": {"A": "secret:no way"}}), "secret:", id="a malformed reference"),
    pytest.param(form(profile={"env": {"A\x07": "1"}}), "holds control or invisible", id="an env name"),
    pytest.param(form(profile={"env": {"A": "x" * 10_001}}), "longer than 10000", id="a long env"),
    pytest.param(
        form(profile={"env": {"TOKEN": "(hidden)"}}),
        "stands for nothing stored",
        id="a hidden value of nothing",
    ),
    pytest.param(
        form(profiles=[VLLM, VLLM]), 'model "m": profile "default" is declared twice', id="a profile twice"
    ),
    pytest.param(
        form("", source="", scaling={"min": 2, "max": 1}, profile={"engine": "warp", "priority": "high"}),
        "a model has no name",
        id="many faults at once",
    ),
]


# What a door cannot say, or what means something else there.
NOT_AT = {
    "a name that is taken": {"catalog_import"},  # it is an edit
    "a profile twice": {"model_add"},  # it is more of the same profile
}


@pytest.fixture
def base() -> None:
    a_model(BASE, scaling={"max": 2})


@pytest.mark.one_database
@pytest.mark.parametrize(("model", "says"), BAD)
def test_every_door_says_the_same_and_saves_nothing(
    world: Hub, base: None, client: Client, model: dict[str, Any], says: str, request: pytest.FixtureRequest
) -> None:
    """Every door that adds, and of those that edit one in turn: they read what they are given alike."""
    client.force_login(alice())
    case = request.node.callspec
    edits = list(EDITING)[case.indices["model"] % len(EDITING)]
    doors = {*ADDING, edits} - NOT_AT.get(case.id, set())
    assert says in same_sentences(client, model, doors)[0]


@pytest.mark.django_db(transaction=True)
def test_every_door_asks_the_nodes_about_a_path(world: Hub, base: None, client: Client) -> None:
    client.force_login(alice())
    (sentence,) = same_sentences(client, form(source="/models/none"), DOORS)
    assert 'source "/models/none" is not on the node gpu-01' in sentence


def same_sentences(client: Client, model: dict[str, Any], doors: Collection[str]) -> list[str]:
    """What every one of the doors says, having changed nothing."""
    before = everything()
    said = {name: DOORS[name](client, model).refusals for name in doors}
    assert everything() == before
    first = said["POST"]
    assert first, "POST took it"
    for name in said:  # a page has its own order
        if "admin" in name and sorted(said[name]) == sorted(first):
            said[name] = first
    assert said == dict.fromkeys(doors, first)
    return first


# --- what only JSON can say -----------------------------------------------------------------------

JSON_DOORS = ("POST", "PUT", "PATCH", "catalog_import")
JSON_BAD = [
    pytest.param(form(name=5), "name must be a text, not a number", id="a name that is a number"),
    pytest.param(form(aliases="x"), "aliases must be a list of texts, not a text", id="a text for a list"),
    pytest.param(
        form(aliases=[1]), "aliases must be a list of texts, and one entry is a number", id="an entry"
    ),
    pytest.param(form(aliases=[""]), "aliases holds an empty name", id="an empty alias"),
    pytest.param(form(scaling=[]), "scaling must be a map of fields, not a list", id="a list for a map"),
    pytest.param(
        form(scaling={"max": True}), "scaling.max must be a whole number, not true", id="true for one"
    ),
    pytest.param(form(scaling={"max": 1.5}), "must be a whole number, not a decimal number", id="a fraction"),
    pytest.param(
        form(scaling={"mx": 1}), 'unknown key "mx" in scaling; did you mean max?', id="a key inside"
    ),
    pytest.param(form(replicas=1), 'unknown key "replicas"', id="a key that is none"),
    pytest.param(
        form(limits={"concurrency": 1.5}), "must be a whole number, not a decimal", id="half a request"
    ),
    pytest.param(form(limits={"rpm": 1}), 'unknown key "rpm" in limits', id="a limit that there is not"),
    pytest.param(form(timeouts={"first_byte": 1.5}), "must be a duration", id="a decimal time-out"),
    pytest.param(
        form(capabilities={"tools": 1}), "capabilities.tools must be true or false", id="one for true"
    ),
    pytest.param(form(slo={"TTFTp99": 1.5}), "must be a duration such as 20m", id="a decimal duration"),
    pytest.param(form(profiles={}), "profiles must be a list of profiles, not a map", id="a map of profiles"),
    pytest.param(
        form(profiles=[5]), "profile number 1: it must be a map of fields", id="a profile of a number"
    ),
    pytest.param(
        form(profile={"env": ["A=1"]}), "env must be a map of texts, not a list", id="a list of env"
    ),
    pytest.param(form(profile={"env": {"A": 1}}), 'env "A" must be a text, not a number; put', id="env: 1"),
    pytest.param(form(profile={"env": {"A": None}}), 'env "A" must be a text, not null', id="env: null"),
    pytest.param(form(profile={"env": {"A": {}}}), 'env "A" must be a text, not a map', id="env: a map"),
    pytest.param(form(profile={"env": {"A=B": "1"}}), "a name cannot hold =", id="an env name with ="),
    pytest.param(form(profile={"env": {"": "1"}}), "whose name is not a text, or is empty", id="no env name"),
    pytest.param(form(profile={"args": "--x"}), "args must be a list of texts", id="args in one text"),
    pytest.param(form(profile={"args": [["--x"]]}), "one entry is a list", id="args in lists"),
    pytest.param(form(profile={"tp": "2"}), "tp must be a whole number, not a text", id="a number in quotes"),
    pytest.param(
        form(profile={"weight": False}), "weight must be a number, not true or false", id="weight: no"
    ),
    pytest.param(form(profiles=[]), "at least one profile is required", id="no profile"),
]


@pytest.mark.one_database
@pytest.mark.parametrize(("model", "says"), JSON_BAD)
def test_every_door_of_json_says_the_same_of_a_wrong_type(
    base: None, client: Client, model: dict[str, Any], says: str
) -> None:
    client.force_login(alice())
    assert says in same_sentences(client, model, JSON_DOORS)[0]


# --- what is unusual, and allowed -----------------------------------------------------------------

NAMES = [
    pytest.param("org/model:8b@v1", id="slashes and signs"),
    pytest.param("a/b/", id="a slash at the end"),
    pytest.param("a/check", id="what looks like an address"),
    pytest.param("two words", id="a space"),
    pytest.param("Größe-模型-🚀", id="letters of the world"),
    pytest.param("<script>alert('1')</script>", id="HTML"),
    pytest.param('say "hi" \\ %2F ? # & +', id="signs that addresses and quotes are made of"),
    pytest.param("m" * 200, id="200 characters"),
    pytest.param("a=b", id="an equals sign"),
]


@pytest.mark.parametrize("name", NAMES)
def test_an_unusual_name_goes_through_every_door_and_back(base: None, client: Client, name: str) -> None:
    client.force_login(alice())
    wanted = model_form(name, aliases=[f"also {name}"[:200].strip()], scaling={"max": 1})
    for door in ADDING.values():
        assert door(client, wanted).refusals == []
        assert Model.objects.get(name=name).spec == ModelSpec.load(wanted)
        Model.objects.get(name=name).delete()
    a_model(name, scaling={"max": 3})
    for number, door in enumerate((admin_edit, rest_put, rest_patch, model_edit), 4):
        edited = wanted | {"scaling": {"max": number}}
        assert door(client, edited, name).refusals == []
        assert Model.objects.get(name=name).spec == ModelSpec.load(edited)
    assert manage("model_remove", name).refusals == []


@pytest.mark.parametrize("door", DOORS)
def test_two_thousand_aliases_take_no_query_each(base: None, client: Client, door: str) -> None:
    client.force_login(alice())
    aliases = [f"alias-{number}" for number in range(2_000)]
    with CaptureQueriesContext(connection) as seen:
        assert DOORS[door](client, model_form("m", aliases=aliases, scaling={"max": 1})).refusals == []
    assert Model.objects.get(name="m").spec.aliases == tuple(aliases)
    assert len(seen) < 100


@pytest.mark.parametrize("door", ADDING)
def test_a_fallback_by_alias_is_stored_as_typed(base: None, client: Client, door: str) -> None:
    client.force_login(alice())
    a_model("other", aliases=["another"])
    assert ADDING[door](client, model_form("m", fallbacks=["another", "other"])).refusals == []
    assert Model.objects.get(name="m").spec.fallbacks == ("another", "other")


# --- names that others fall back to ---------------------------------------------------------------


@pytest.mark.parametrize("door", [*EDITING, "catalog_import"])
def test_an_alias_that_others_fall_back_to_stays(base: None, client: Client, door: str) -> None:
    client.force_login(alice())
    a_model("m", aliases=["em"])
    a_model("user", fallbacks=["em"])
    before = everything()
    wanted = model_form("m", aliases=["other"], scaling={"max": 1})
    said = catalog_import(client, wanted) if door == "catalog_import" else EDITING[door](client, wanted, "m")
    why = 'model "user" falls back to it; change that model\'s fallbacks first'
    assert said.refusals == [f'model "m": alias "em" cannot be removed: {why}']
    assert everything() == before


@pytest.mark.parametrize("door", EDITING)
def test_a_name_that_others_fall_back_to_is_not_renamed_away(base: None, client: Client, door: str) -> None:
    client.force_login(alice())
    a_model("user", fallbacks=[BASE])
    before = everything()
    (said,) = EDITING[door](client, model_form("m", scaling={"max": 1})).refusals
    assert said.startswith(f'model "{BASE}" cannot be removed: model "user" falls back to it;')
    assert everything() == before


def removed_by_admin(client: Client, model: Model) -> list[str]:
    confirmed = {"action": "remove", "confirmed": "yes", "_selected_action": [str(model.pk)], "why": "over"}
    answer = client.post("/admin/catalog/model/", confirmed)
    assert answer.status_code == 302
    return [str(message) for message in get_messages(answer.wsgi_request)]


def removed_by_rest(client: Client, model: Model) -> list[str]:
    answer = client.delete(f"/api/models/{model.name}")
    assert answer.status_code == 409
    return [error["sentence"] for error in answer.json()["errors"]]


def removed_by_command(client: Client, model: Model) -> list[str]:
    return manage("model_remove", model.name).refusals


@pytest.mark.parametrize("door", [removed_by_admin, removed_by_rest, removed_by_command])
def test_a_model_that_others_fall_back_to_stays(base: None, client: Client, door: Any) -> None:
    client.force_login(alice())
    a_model("user", fallbacks=[BASE])
    before = everything()
    said = door(client, Model.objects.get(name=BASE))
    why = 'model "user" falls back to it; change that model\'s fallbacks first'
    assert f'model "{BASE}" cannot be removed: {why}' in said
    assert everything() == before


# --- what is allowed, and said --------------------------------------------------------------------


@pytest.mark.parametrize("door", [*EDITING, "catalog_import"])
def test_a_circle_of_fallbacks_is_allowed_and_said(client: Client, door: str) -> None:
    client.force_login(alice())
    a_model(BASE, scaling={"max": 2})
    a_model("user", fallbacks=[BASE])
    wanted = model_form(BASE, fallbacks=["user"], scaling={"max": 2})
    said = (EDITING | {"catalog_import": catalog_import})[door](client, wanted)
    assert said.refusals == []
    assert Model.objects.get(name=BASE).spec.fallbacks == ("user",)
    assert any(f'lead back to it ("{BASE}" -> "user" -> "{BASE}")' in warning for warning in said.warnings)


@pytest.mark.parametrize("door", DOORS)
def test_what_is_found_of_a_source_and_what_is_seldom_meant_is_said_once(
    world: Hub, base: None, client: Client, door: str
) -> None:
    client.force_login(alice())
    said = DOORS[door](client, form(source="org/two-gguf", profile={"args": ["--trust-remote-code"]}))
    assert said.refusals == []
    for what in ("which vllm reads poorly", "runs code from the repository"):
        assert sum(what in warning for warning in said.warnings) == 1, said.warnings


@pytest.mark.parametrize("door", DOORS)
def test_a_hub_that_is_down_is_said_and_nothing_is_saved(
    base: None, client: Client, settings: Any, door: str
) -> None:
    settings.LLMGW_HUB_ENDPOINT = "http://127.0.0.1:9"
    client.force_login(alice())
    (sentence,) = DOORS[door](client, form()).refusals
    assert "could not ask the hub at http://127.0.0.1:9" in sentence
    assert list(Model.objects.values_list("name", "source")) == [(BASE, "sim/tiny")]


def everything() -> list[Any]:
    return [list(rows.objects.order_by("pk").values()) for rows in (Model, Name, Profile, Fallback, Event)]
