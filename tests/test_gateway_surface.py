"""Which endpoint an engine speaks, in which words a client hears of errors, and who can do what is asked."""

from __future__ import annotations

import pytest

from llmgw.gateway import needs, surface
from llmgw.gateway.admission import KeyEntry, ModelEntry, Refused
from llmgw.gateway.context import UNKNOWN, Span
from llmgw.gateway.needs import Needs
from llmgw.gateway.routing import Target
from llmgw.gateway.surface import ANTHROPIC, ENDPOINTS, OPENAI

pytestmark = pytest.mark.one_database

CHAT, EMBEDDINGS = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/embeddings"]
OPEN = KeyEntry("k", "d")


def _model(name: str = "m", id_: int = 1, **fields: object) -> ModelEntry:
    return ModelEntry(id_, name, **fields)


def _target(engine: str = "vllm", context_length: int = 0) -> Target:
    return Target(f"on-{engine}-{context_length}", "m", "http://h", "k", 1.0, engine, context_length)


@pytest.mark.parametrize(
    ("path", "engines"),
    [
        pytest.param("/v1/chat/completions", {"llamacpp", "sglang", "sim", "vllm"}, id="chat"),
        pytest.param("/v1/embeddings", {"llamacpp", "sglang", "sim", "vllm"}, id="embeddings"),
        pytest.param("/v1/responses", {"llamacpp", "sglang", "vllm"}, id="responses"),
        pytest.param("/v1/rerank", {"llamacpp", "sglang", "vllm"}, id="rerank"),
        pytest.param("/v1/score", {"sglang", "vllm"}, id="score"),
        pytest.param("/v1/messages/count_tokens", {"llamacpp", "sglang", "vllm"}, id="counting tokens"),
    ],
)
def test_an_engine_is_asked_what_it_speaks(path: str, engines: set[str]) -> None:
    endpoint = ENDPOINTS[path]
    spoken = {engine for engine in ("llamacpp", "sglang", "sim", "vllm") if endpoint.path_on(engine)}
    assert spoken == engines


def test_an_engine_without_a_name_is_asked_as_all_are() -> None:
    assert ENDPOINTS["/v1/score"].path_on("") == "/v1/score"


def test_a_model_whose_engine_does_not_speak_it_says_which_does() -> None:
    with pytest.raises(Refused) as caught:
        surface.check_spoken(ENDPOINTS["/v1/score"], _model(engines=("llamacpp",)))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_endpoint")
    assert "its engine llamacpp does not speak it" in caught.value.message
    assert "sglang or vllm" in caught.value.message


@pytest.mark.parametrize("engines", [(), ("llamacpp", "vllm")])
def test_one_engine_that_speaks_it_is_enough(engines: tuple[str, ...]) -> None:
    surface.check_spoken(ENDPOINTS["/v1/score"], _model(engines=engines))


def test_an_unknown_path_is_met_with_those_that_are_served() -> None:
    refused = surface.unknown_path("/v1/" + "x" * 5000)
    assert refused.status == 404
    assert len(refused.message) < 600
    assert all(path in refused.message for path in ("/v1/models", *ENDPOINTS))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        pytest.param(400, "invalid_request_error", id="what the client sent"),
        pytest.param(401, "authentication_error", id="who the client is"),
        pytest.param(404, "not_found_error", id="what is not there"),
        pytest.param(413, "request_too_large", id="too much at once"),
        pytest.param(429, "rate_limit_error", id="too much in a minute"),
        pytest.param(500, "api_error", id="our fault"),
        pytest.param(503, "overloaded_error", id="not now"),
    ],
)
def test_anthropics_clients_hear_errors_in_their_own_words(status: int, kind: str) -> None:
    body = surface.error_body(Refused(status, "a_code", "Sentence."), ANTHROPIC)
    assert body == {"type": "error", "error": {"type": kind, "message": "Sentence.", "code": "a_code"}}


def test_openais_clients_hear_errors_in_theirs() -> None:
    refused = Refused(400, "a_code", "Sentence.", param="model")
    assert surface.error_body(refused, OPENAI) == refused.as_dict()


# --- what is needed -----------------------------------------------------------------------------------------


def test_a_key_opens_all_models_or_those_on_its_list() -> None:
    limited = KeyEntry("k", "d", models=frozenset({2}))
    assert needs.opens(OPEN, _model())
    assert [needs.opens(limited, _model(id_=each)) for each in (1, 2)] == [False, True]
    assert list(needs.visible_names(limited, {"a": 1, "b": 2, "c": 2})) == ["b", "c"]
    assert not needs.opens(KeyEntry("k", "d", models=frozenset()), _model())


ABLE = [_model(f"can-{at}", at, capabilities={"vision": True, "tools": True}) for at in range(9)]


@pytest.mark.parametrize(
    ("endpoint", "wanted", "says"),
    [
        pytest.param(CHAT, {"tools"}, "not set up for calls of tools.", id="tools"),
        pytest.param(CHAT, {"vision"}, "not set up for images.", id="images"),
        pytest.param(CHAT, {"vision", "tools"}, "calls of tools and images.", id="both"),
        pytest.param(EMBEDDINGS, {"embeddings"}, "not set up for embeddings.", id="embeddings"),
    ],
)
def test_what_a_model_cannot_do_is_named(endpoint: surface.Endpoint, wanted: set[str], says: str) -> None:
    with pytest.raises(Refused) as caught:
        needs.check_model(_model(), Needs(endpoint, frozenset(wanted)), [])
    assert (caught.value.status, caught.value.code) == (400, "unsupported_capability")
    assert says in caught.value.message
    assert "No model that this key may use can" in caught.value.message


def test_some_models_that_can_are_named() -> None:
    with pytest.raises(Refused) as caught:
        needs.check_model(_model(), Needs(CHAT, frozenset({"tools"})), [*reversed(ABLE), _model("cannot")])
    assert 'Use "can-0" or "can-1" or "can-2" or "can-3" or "can-4" and others.' in caught.value.message
    assert "cannot" not in caught.value.message


def test_a_model_that_can_is_let_through() -> None:
    needs.check_model(ABLE[0], Needs(CHAT, frozenset({"tools", "vision"})), [])


@pytest.mark.parametrize(
    ("model", "wanted", "key", "is_fit"),
    [
        pytest.param(_model(), Needs(CHAT), OPEN, True, id="nothing special"),
        pytest.param(_model(), Needs(CHAT, frozenset({"tools"})), OPEN, False, id="lacks a capability"),
        pytest.param(
            _model(engines=("llamacpp",)), Needs(ENDPOINTS["/v1/score"]), OPEN, False, id="another engine"
        ),
        pytest.param(
            _model(), Needs(CHAT), KeyEntry("k", "d", models=frozenset()), False, id="the key opens it not"
        ),
        pytest.param(
            _model(context_length=100),
            Needs(CHAT, prompt=Span(101, 200)),
            OPEN,
            False,
            id="a prompt too long",
        ),
        pytest.param(
            _model(context_length=100), Needs(CHAT, prompt=Span(10, 2000)), OPEN, True, id="perhaps too long"
        ),
        pytest.param(
            _model(context_length=100), Needs(CHAT, output_tokens=101), OPEN, False, id="an answer too long"
        ),
        pytest.param(
            _model(max_output=10),
            Needs(CHAT, output_tokens=11),
            OPEN,
            False,
            id="more than the operator allows",
        ),
    ],
)
def test_a_fallback_must_fit(model: ModelEntry, wanted: Needs, key: KeyEntry, is_fit: bool) -> None:
    assert needs.fits(model, (), wanted, key) is is_fit


def test_a_replica_is_left_out_for_its_engine_and_for_its_context() -> None:
    model = _model(context_length=1000)
    replicas = (_target("llamacpp", 50), _target("vllm"), _target("vllm", 60), _target("sim", 50))
    asked = Needs(ENDPOINTS["/v1/messages"], prompt=Span(55, 55), output_tokens=5)
    assert needs.fitting(model, replicas, asked) == [replicas[1], replicas[2]]
    assert needs.fitting(model, replicas, Needs(CHAT, prompt=UNKNOWN)) is replicas


@pytest.mark.parametrize(
    ("targets", "length"),
    [
        pytest.param((), 1000, id="nothing runs: the catalog's word"),
        pytest.param((_target(context_length=400),), 400, id="the running engine's word counts more"),
        pytest.param(
            (_target(context_length=400), _target(context_length=900)), 900, id="the longest of two"
        ),
        pytest.param((_target(),), 1000, id="an engine that does not say"),
    ],
)
def test_a_models_context_is_what_a_request_may_really_use(targets: tuple[Target, ...], length: int) -> None:
    assert needs.context_of(_model(context_length=1000), targets) == length
    assert needs.context_of(_model(), (_target(), _target(context_length=5))) == 0, "one that nobody knows"
