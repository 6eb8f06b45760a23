"""The gateway as its clients meet it: the real application, the real `openai` client, a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from django.conf import settings

from catalog.models import Model, Profile
from nodes.models import Unplaced
from nodes.protocol import ClusterKey
from tests.stage import (
    MESSAGES,
    Play,
    begin_stream,
    change,
    make_model,
    make_replica,
    playing,
    saying,
    text_of,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def play() -> Iterator[Play]:
    with playing() as play:
        yield play


# --- answers ------------------------------------------------------------------------------


def test_a_chat_is_answered(play: Play) -> None:
    answer = play.chat(temperature=0.5)
    assert answer.choices[0].message.content == "Hello from here."
    assert answer.usage.total_tokens == 7
    assert answer.model == "tiny"


def test_a_chat_is_streamed(play: Play) -> None:
    assert text_of(play.chunks()) == "Hello from here."


def test_a_completion_and_embeddings_are_answered(play: Play) -> None:
    change(play.model, can_embeddings=True)
    wait_until(lambda: play.shown("tiny")["capabilities"]["embeddings"], "the edit to arrive")
    with play.web.client(play.key) as client:
        assert client.completions.create(model="tiny", prompt="Hello").choices[0].text == " there."
        vectors = client.embeddings.create(model="tiny", input="Hello", encoding_format="float")
        assert vectors.data[0].embedding == [0.25, -0.5]


def test_an_engine_gets_the_bytes_the_client_sent(play: Play) -> None:
    body = b'{ "model" : "tiny", "messages":[ ], "unknown_field": 1.50, "text": "\xc3\xa9\\u00e9" }'
    assert play.send("POST", "/v1/chat/completions", body).status == 200
    assert play.engine.heard[-1].body == body
    assert play.engine.heard[-1].path == "/v1/chat/completions"


def test_an_engine_gets_its_own_key_and_no_secret_of_the_client(play: Play) -> None:
    play.send(
        "POST",
        "/v1/chat/completions",
        b'{"model":"tiny"}',
        Cookie="sessionid=abc",
        X_Forwarded_For="10.0.0.1",
        X_Anything="secret",
        Traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    headers = {name.lower(): value for name, value in play.engine.heard[-1].headers.items()}
    key: ClusterKey = settings.LLMGW_CLUSTER_KEYS[0]
    assert headers.pop("authorization") == f"Bearer {key.replica_key(str(play.replica.pk), 1)}"
    assert headers.pop("traceparent").startswith("00-4bf92f")
    assert headers.pop("host") == f"127.0.0.1:{play.engine.port}"
    assert set(headers) == {"content-type", "content-length", "accept-encoding"}


def test_the_key_may_come_in_either_header(play: Play) -> None:
    assert play.send("GET", "/v1/models", Authorization="", X_Api_Key=play.key).status == 200


@pytest.mark.parametrize("is_stream", [pytest.param(False, id="plain"), pytest.param(True, id="streamed")])
def test_an_alias_reaches_the_engine_as_its_own_name_and_the_client_as_the_alias(
    play: Play, is_stream: bool
) -> None:
    answers = play.chunks(model="petit") if is_stream else [play.chat(model="petit", stream=False)]
    names = {answer.model for answer in answers}
    assert names == {"petit"}
    assert play.engine.heard[-1].fields == {
        "model": "tiny",
        "messages": MESSAGES,
        "stream": is_stream,
        **({"stream_options": {"include_usage": True}} if is_stream else {}),
    }


def test_a_model_that_was_renamed_while_it_runs_is_asked_for_by_the_name_it_was_launched_under(
    play: Play,
) -> None:
    play.model.names.filter(is_canonical=True).update(name="tiny-2")
    change(play.model, name="tiny-2")
    play.wait_until_known("tiny-2")
    answer = play.chat(model="tiny-2")
    assert answer.model == "tiny-2"
    assert play.engine.heard[-1].fields["model"] == "tiny"
    assert play.refused(model="tiny").status == 404


def test_a_stream_leaves_the_gateway_as_it_left_the_engine(play: Play) -> None:
    events = b': ping\n\ndata: {"model":"tiny","a" : [1,2 ]}\n\nevent: x\r\ndata: 1\r\n\r\ndata: [DONE]\n\n'

    async def in_small_pieces(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for at in range(0, len(events), 7):
            await response.write(events[at : at + 7])
        return response

    play.engine.script = in_small_pieces
    with play.web.client(play.key) as client:
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, stream=True)
        assert raw.http_response.read() == events
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_a_large_answer_comes_whole(play: Play) -> None:
    text = "x" * 3_000_000
    play.engine.script = saying(200, {"model": "tiny", "choices": [{"text": text}]})
    answer = play.send("POST", "/v1/completions", b'{"model":"small"}')
    assert answer.body == {"model": "small", "choices": [{"text": text}]}


def test_requests_are_shared_among_replicas(play: Play) -> None:
    with play.another_engine(play.engine.script) as other:
        wait_until(lambda: play.chat() and other.heard, "the second replica to be asked")
        for engine in (play.engine, other):
            engine.heard.clear()
        for _ in range(10):
            play.chat()
        assert len(play.engine.heard) == len(other.heard) == 5


def test_requests_that_alternate_between_models_are_shared_among_the_replicas_of_each(play: Play) -> None:
    with play.another_engine(play.engine.script) as other:
        wait_until(lambda: play.chat() and other.heard, "the second replica to be asked")
        make_replica(make_model("neighbour", routing_profile="round-robin"), play.engine)
        play.wait_until_known("neighbour")
        other.heard.clear()
        for _ in range(6):
            play.chat()
            play.chat(model="neighbour")
        assert len(other.heard) == 3


def test_another_weight_takes_effect_while_replicas_run(play: Play) -> None:
    with play.another_engine(play.engine.script) as other:
        wait_until(lambda: play.chat() and other.heard, "the second replica to be asked")
        heavy = Profile.objects.create(
            model=play.model, name="heavy", engine="sim", gpu_class="sim", weight=100
        )
        change(play.model.replicas.exclude(pk=play.replica.pk).get(), profile=heavy)
        change(play.model)
        wait_until(lambda: all(_goes_to(play, other) for _ in range(4)), "all to go to the heavy replica")


def _goes_to(play: Play, engine: Any) -> bool:
    before = len(engine.heard)
    play.chat()
    return len(engine.heard) > before


# --- models -------------------------------------------------------------------------------


def test_models_are_listed_with_what_a_client_wants_to_know(play: Play) -> None:
    change(
        play.model,
        description="A tiny one.",
        context_length=8192,
        max_output=1024,
        can_tools=True,
    )
    wait_until(lambda: play.shown("tiny").get("description"), "the edit to arrive")
    with play.web.client(play.key) as client:
        listed = {model.id: model.to_dict() for model in client.models.list()}
    assert set(listed) == {"tiny", "small", "petit"}
    created = listed["tiny"].pop("created")
    assert created == int(Model.objects.get().created_at.timestamp())
    assert listed["tiny"] == {
        "id": "tiny",
        "object": "model",
        "owned_by": "llmgw",
        "aliases": ["small", "petit"],
        "description": "A tiny one.",
        "context_length": 8192,
        "max_output": 1024,
        "capabilities": {"tools": True, "vision": False, "embeddings": False},
        "simulated": True,
        "status": "ready",
        "reason": "",
    }
    assert listed["petit"]["alias_of"] == "tiny"


def test_a_model_is_shown_by_any_of_its_names_even_one_with_a_slash(play: Play) -> None:
    make_model("org/model-7b")
    with play.web.client(play.key) as client:
        assert client.models.retrieve("petit").id == "petit"
        assert client.models.retrieve("org/model-7b").id == "org/model-7b"


def test_a_model_that_not_every_profile_simulates_is_not_called_simulated(play: Play) -> None:
    Profile.objects.create(model=play.model, name="real", engine="vllm", gpu_class="h100-80g")
    change(play.model)
    wait_until(lambda: play.shown("tiny").get("simulated") is False, "the edit to arrive")


def test_every_status_is_shown_with_its_reason(play: Play) -> None:
    make_model("off", low=0, high=0)
    make_model("asleep", low=0)
    make_replica(make_model("loading"), None, state="fetching", reason="41 % of 8 GB")
    Unplaced.objects.create(model=make_model("homeless"), missing=1, why="0 of 1 nodes: 1 lacks a free sim")
    expected = {
        "tiny": ("ready", ""),
        "off": ("off", "it is configured to be off (max 0)"),
        "asleep": ("on_demand", "it is loaded when asked for"),
        "loading": ("loading", "fetching: 41 % of 8 GB"),
        "homeless": ("unavailable", "0 of 1 nodes: 1 lacks a free sim"),
    }

    def shown() -> dict[str, tuple[str, str]]:
        return {name: (row["status"], row["reason"]) for name in expected if (row := play.shown(name))}

    wait_until(lambda: shown() == expected, "the statuses", tell=lambda: json.dumps(shown()))


# --- the rest of the address --------------------------------------------------------------


def test_everything_but_v1_is_for_django(play: Play) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{play.web.url}/admin/login/", timeout=20) as response:
        assert b"csrfmiddlewaretoken" in response.read()
