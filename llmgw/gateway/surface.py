"""What clients may ask for: each endpoint, the path that each engine has for it, and the shape of its errors.

A table, read by everyone who must know what an endpoint is; the path sent to an engine comes from here and
never from a client. An engine that is not in a row does not speak that endpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from catalog.reading import quote
from llmgw.gateway.admission import ModelEntry, Refused

OPENAI, ANTHROPIC = "openai", "anthropic"
CHAT, COMPLETION, EMBEDDING, OTHER = "chat", "completion", "embedding", "other"

LLAMACPP, SGLANG, SIM, VLLM = "llamacpp", "sglang", "sim", "vllm"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`engines` maps an engine to its own path. `prompt_fields` are what shapes the prompt, in the order that
    templates put it in; `output_fields` bound the tokens of the answer, the first that is there counts, and
    the last is the one that all engines know. `capability` is what a model must have to be asked this."""

    path: str
    kind: str
    engines: Mapping[str, str]
    prompt_fields: tuple[str, ...]
    output_fields: tuple[str, ...] = ()
    capability: str = ""
    can_stream: bool = False
    shape: str = OPENAI

    def path_on(self, engine: str) -> str | None:
        """None where the engine does not speak this endpoint. One that nobody named is asked the way all are,
        and says so itself."""
        return self.engines.get(engine) if engine else self.path


def _at(path: str, *engines: str) -> dict[str, str]:
    return dict.fromkeys(engines, path)


_ALL = (LLAMACPP, SGLANG, SIM, VLLM)
_REAL = (LLAMACPP, SGLANG, VLLM)

ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(
            "/v1/chat/completions",
            CHAT,
            _at("/v1/chat/completions", *_ALL),
            ("tools", "functions", "messages"),
            ("max_completion_tokens", "max_tokens"),
            can_stream=True,
        ),
        Endpoint(
            "/v1/completions",
            COMPLETION,
            _at("/v1/completions", *_ALL),
            ("prompt",),
            ("max_tokens",),
            can_stream=True,
        ),
        Endpoint(
            "/v1/embeddings", EMBEDDING, _at("/v1/embeddings", *_ALL), ("input",), capability="embeddings"
        ),
        Endpoint(
            "/v1/responses",
            OTHER,
            _at("/v1/responses", *_REAL),
            ("instructions", "tools", "input"),
            ("max_output_tokens",),
            can_stream=True,
        ),
        Endpoint("/v1/rerank", OTHER, _at("/v1/rerank", *_REAL), ("query", "documents")),
        Endpoint(
            "/v1/score",
            OTHER,
            _at("/v1/score", SGLANG, VLLM),
            ("text_1", "text_2", "queries", "query", "documents", "items"),
        ),
        Endpoint(
            "/v1/messages",
            OTHER,
            _at("/v1/messages", *_REAL),
            ("system", "tools", "messages"),
            ("max_tokens",),
            can_stream=True,
            shape=ANTHROPIC,
        ),
        Endpoint(
            "/v1/messages/count_tokens",
            OTHER,
            _at("/v1/messages/count_tokens", *_REAL),
            ("system", "tools", "messages"),
            shape=ANTHROPIC,
        ),
    )
}

MODELS_PATH = "/v1/models"


def unknown_path(path: str) -> Refused:
    *some, last = (MODELS_PATH, *ENDPOINTS)
    served = f"{', '.join(some)} and {last}"
    return Refused(404, "unknown_path", f"There is no {quote(path[:200])} here: llmgw serves {served}.")


def is_spoken(endpoint: Endpoint, engines: Collection[str]) -> bool:
    """Whether some of these engines speaks this endpoint. Where nobody named one, it is asked."""
    return not engines or not endpoint.engines.keys().isdisjoint(engines)


def check_spoken(endpoint: Endpoint, model: ModelEntry) -> None:
    """That some engine of the model's speaks this endpoint; the reason names them when none does."""
    if not is_spoken(endpoint, model.engines):
        raise unspoken(endpoint, model.name, model.engines)


def unspoken(endpoint: Endpoint, model: str, engines: Collection[str]) -> Refused:
    ours = " and ".join(sorted(engines))
    speak = " or ".join(sorted(endpoint.engines))
    return Refused(
        400,
        "unsupported_endpoint",
        f"The model {quote(model)} does not serve {endpoint.path}, because its engine {ours} does not speak "
        f"it: use a model that runs on {speak}.",
        param="model",
    )


# --- errors -------------------------------------------------------------------------------------------------

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error_body(refused: Refused, shape: str) -> dict[str, object]:
    """The error as the clients of this shape read it."""
    if shape == OPENAI:
        return dict(refused.as_dict())
    kind = _ANTHROPIC_KINDS.get(
        refused.status, "invalid_request_error" if refused.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": refused.message, "code": refused.code}}
