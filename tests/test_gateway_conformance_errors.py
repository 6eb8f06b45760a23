"""What the gateway itself refuses, as OpenAI's and Anthropic's clients raise it: each by its own class, with
one sentence for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from pytest_django import DjangoDbBlocker

from catalog.models import Key
from tests.stage import (
    MESSAGES,
    Play,
    change,
    chat_answer,
    make_key,
    make_model,
    make_replica,
    playing_for_many,
    saying,
)

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]

TOOLS: Any = {
    "openai": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "anthropic": [{"name": "f", "input_schema": {"type": "object"}}],
}
IMAGES: Any = {
    "openai": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}
FAR_IMAGES: Any = {
    "openai": {"type": "image_url", "image_url": {"url": "http://10.0.0.1/cat.png"}},
    "anthropic": {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/cat.png"}},
}
CLIENTS = ("openai", "anthropic")


@dataclass(frozen=True)
class Stage:
    """A gateway, the clients by the name of whose they are, and keys by what is wrong with them."""

    play: Play
    keys: dict[str, str]
    clients: dict[str, Any]

    def ask(self, whose: str, key: str = "hers", **fields: Any) -> Any:
        asked = {"model": "real", "messages": MESSAGES, "max_tokens": 5, **fields}
        client = self.clients[whose].with_options(api_key=self.keys[key])
        return (client.chat.completions if whose == "openai" else client.messages).create(**asked)


@pytest.fixture(scope="module")
def all_stages(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Stage]:
    settings = {"HOLD_S": 0.2, "MAX_BODY_BYTES": 20_000, "TABLE_POLL_S": 0.05}
    with playing_for_many(
        django_db_blocker, **{f"LLMGW_{name}": value for name, value in settings.items()}
    ) as play:
        keys = {"hers": play.key, "mistyped": play.key[:-1] + "?"}
        _, keys["metrics"] = make_key("prometheus", scope=Key.Scope.METRICS)
        for whose in CLIENTS:
            _, keys[f"{whose}'s hasty"] = make_key(f"{whose}'s hasty", requests_per_minute=1)
        model = make_model("real", context_length=100, max_output=50)
        model.profiles.update(engine="vllm")
        replica = make_replica(model, play.engine, state="starting")
        launch = {"model": "real", "source": "/weights", "profile": {"engine": "vllm"}}
        change(replica, launch=launch, state="ready")
        for name, high in (("off", 0), ("asleep", 1)):
            away = make_model(name, low=0, high=high)
            away.profiles.update(engine="vllm")
            change(away)
        for name, status in (("real", "ready"), ("off", "off"), ("asleep", "on_demand")):
            play.wait_until_known(name, status)
        options: Any = {"api_key": play.key, "max_retries": 0, "timeout": 20}
        with (
            openai.OpenAI(base_url=f"{play.web.url}/v1", **options) as chats,
            anthropic.Anthropic(base_url=play.web.url, **options) as talks,
        ):
            yield Stage(play, keys, {"openai": chats, "anthropic": talks})


@pytest.fixture
def stage(all_stages: Stage) -> Stage:
    all_stages.play.begin_anew()
    return all_stages


async def speaks_both(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    """A word, in the shape of whoever asks."""
    if request.path == "/v1/chat/completions":
        return web.json_response(chat_answer(fields))
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": fields["model"]}
    text = [{"type": "text", "text": "Hello."}]
    usage = {"input_tokens": 3, "output_tokens": 4}
    return web.json_response({**head, "content": text, "stop_reason": "end_turn", "usage": usage})


@dataclass(frozen=True)
class Case:
    """How a request is refused, and the error that each client raises. `fields` are what is asked; those
    that the clients write apart, `apart`, are by client."""

    status: int
    code: str
    errors: tuple[type[openai.APIStatusError], type[anthropic.APIStatusError]]
    fields: Mapping[str, Any]
    is_worth_another: bool = False
    apart: tuple[str, ...] = ()

    def fields_of(self, whose: str) -> dict[str, Any]:
        return {name: value[whose] if name in self.apart else value for name, value in self.fields.items()}


def _bad(code: str, *apart: str, **fields: Any) -> Case:
    return Case(400, code, (openai.BadRequestError, anthropic.BadRequestError), fields, apart=apart)


def _away(code: str, *, is_worth_another: bool, **fields: Any) -> Case:
    errors = (openai.InternalServerError, anthropic.ServiceUnavailableError)
    return Case(503, code, errors, fields, is_worth_another)


def _saying(words: str) -> Any:
    return [{"role": "user", "content": words}]


def _showing(parts: Any) -> Any:
    return {whose: [{"role": "user", "content": [part]}] for whose, part in parts.items()}


CASES = {
    "a key that is mistyped": Case(
        401,
        "invalid_api_key",
        (openai.AuthenticationError, anthropic.AuthenticationError),
        {"key": "mistyped"},
    ),
    "a key for something else": Case(
        403,
        "wrong_scope",
        (openai.PermissionDeniedError, anthropic.PermissionDeniedError),
        {"key": "metrics"},
    ),
    "a model that is not there": Case(
        404, "model_not_found", (openai.NotFoundError, anthropic.NotFoundError), {"model": "rael"}
    ),
    "too much at once": Case(
        413,
        "body_too_large",
        (openai.APIStatusError, anthropic.ContentTooLargeError),
        {"messages": _saying("word " * 5_000)},
    ),
    "a prompt that is too long": _bad("context_length_exceeded", messages=_saying("word " * 3_500)),
    "a longer answer than there may be": _bad("max_output_exceeded", max_tokens=51),
    "tools, for a model without": _bad("unsupported_capability", "tools", tools=TOOLS),
    "an image, for a model without eyes": _bad(
        "unsupported_capability", "messages", messages=_showing(IMAGES)
    ),
    "an image from elsewhere": _bad("remote_media", "messages", messages=_showing(FAR_IMAGES)),
    "a program": _bad("field_not_accepted", extra_body={"chat_template": "{{ x }}"}),
    "a model that is off": _away("off", is_worth_another=False, model="off"),
    "a model that does not come": _away("loading", is_worth_another=True, model="asleep"),
}


@pytest.mark.parametrize("whose", CLIENTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_refusal_has_its_class_its_code_and_its_sentence(stage: Stage, case: Case, whose: str) -> None:
    with pytest.raises(case.errors[CLIENTS.index(whose)]) as raised:
        stage.ask(whose, **case.fields_of(whose))
    _check(raised.value, case, whose)
    assert not stage.play.engine.heard


def test_who_asks_too_often_is_told_when_to_come_back(stage: Stage) -> None:
    stage.play.engine.script = speaks_both
    errors = (openai.RateLimitError, anthropic.RateLimitError)
    case = Case(429, "rate_limit_exceeded", errors, {}, is_worth_another=True)
    for whose, error in zip(CLIENTS, errors, strict=True):
        stage.ask(whose, f"{whose}'s hasty")
        with pytest.raises(error) as raised:
            stage.ask(whose, f"{whose}'s hasty")
        _check(raised.value, case, whose)


def _check(error: Any, case: Case, whose: str) -> None:
    told = error.body if whose == "openai" else error.body["error"]
    assert (error.status_code, told["code"]) == (case.status, case.code)
    assert re.fullmatch(r"[A-Z`/].*[.?]", told["message"]), "a sentence, which"
    assert told["message"] in str(error), "is what a person sees"
    assert error.request_id == error.response.headers["x-request-id"]
    assert ("retry-after" in error.response.headers) is case.is_worth_another
    if case.status >= 500:
        assert ("x-should-retry" in error.response.headers) is not case.is_worth_another


def test_an_endpoint_that_no_engine_speaks_is_a_bad_request(stage: Stage) -> None:
    with pytest.raises(anthropic.BadRequestError, match="does not serve /v1/messages"):
        stage.ask("anthropic", model="tiny")
    with pytest.raises(openai.BadRequestError, match="does not serve /v1/responses"):
        stage.clients["openai"].responses.create(model="tiny", input="Hello?")
    with pytest.raises(openai.NotFoundError, match="llmgw serves"):
        stage.clients["openai"].moderations.create(input="Hello?")


def test_models_are_listed_and_looked_up(stage: Stage) -> None:
    models = stage.clients["openai"].models
    assert {model.id for model in models.list()} >= {"real", "off", "asleep", "tiny", "small", "petit"}
    assert (models.retrieve("small").alias_of, models.retrieve("real").context_length) == ("tiny", 100)
    with pytest.raises(openai.NotFoundError, match="Did you mean"):
        models.retrieve("rael")


def test_a_client_asks_again_by_itself_where_that_helps(stage: Stage) -> None:
    """An engine that is busy for a moment costs that moment."""
    busy = saying(503, {"error": {"message": "busy", "code": 503}})
    turns = {path: iter([busy, speaks_both]) for path in ("/v1/chat/completions", "/v1/messages")}

    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        turn = next(turns[request.path]) if request.path in turns else busy  # such as a tokenizer
        return await turn(request, fields)

    stage.play.engine.script = script
    patient = {name: client.with_options(max_retries=1) for name, client in stage.clients.items()}
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(replace(stage, clients=patient).ask, CLIENTS))
    assert [each.model for each in made] == ["real", "real"]
    assert [next(left, None) for left in turns.values()] == [None, None]
