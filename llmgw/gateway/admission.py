"""Who may ask for what, and every "no" a client can hear.

Plain values in; silence or a Refused with its one sentence out. Nothing here parses JSON, reads a clock or
knows where an engine is: the door parses, the table knows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from catalog.keys import KeyText
from catalog.parts import Limits
from catalog.reading import quote

READY, LOADING, ON_DEMAND, OFF, UNAVAILABLE = "ready", "loading", "on_demand", "off", "unavailable"

RETRY_SOON_S, RETRY_LOADING_S = 1, 10
"""What a refused client is told to wait: until another try may meet another replica; until a load may have
moved."""

# Fields that let a client reach files, hosts or code through the engine. All others are the engine's to
# judge.
REFUSED_FIELDS: Mapping[str, str] = {
    "chat_template": "a template is a program that the engine would run, and comes with the model",
    "logits_processors": "they are programs that the engine would run",
    "custom_logit_processor": "it is a program that the engine would run",
    "prompt_embeds": "the engine would unpack it without looking",
    "input_embeds": "the engine would unpack it without looking",
    "image_embeds": "the engine would unpack it without looking",
    "audio_embeds": "the engine would unpack it without looking",
    "lora_path": "it names a file on the engine's machine",
    "lora_request": "it names a file on the engine's machine",
    "api_base": "llmgw chooses where a request goes",
    "api_key": "llmgw chooses where a request goes",
    "api_url": "llmgw chooses where a request goes",
    "base_url": "llmgw chooses where a request goes",
    "bootstrap_host": "it names a host that the engine would connect to",
    "bootstrap_port": "it names a host that the engine would connect to",
    "kv_transfer_params": "it names a host that the engine would connect to",
}
MEDIA_FIELDS = frozenset({"image_url", "audio_url", "video_url"})

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A "no", in the shape that OpenAI's clients read. `retry_after_s` is None where trying again changes
    nothing."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = "",
        retry_after_s: int | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s, self.allow = retry_after_s, allow

    def as_dict(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 408:
            headers.append((b"connection", b"close"))
        return headers


# --- what was set -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a model's requests wait: for a replica to be there, for its engine to take the connection, for
    the first byte of an answer, and for each further one. None is what the gateway is set to."""

    hold_s: float | None = None
    connect_s: float | None = None
    first_byte_s: float | None = None
    idle_s: float | None = None


# --- the key ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key as the table holds it. Moments are seconds of the database's clock; None is never.

    `models` are the ids of those it opens, None where it opens all. Keys of one `cache_scope` may share what
    engines have cached of a prompt.
    """

    id: str
    digest: str
    expires_at_s: float | None = None
    is_revoked: bool = False
    models: frozenset[int] | None = None
    limits: Limits = Limits()
    cache_scope: str = ""


def credential(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The one credential of a request, from `Authorization: Bearer` or `X-Api-Key`."""
    found = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if not found:
        raise Refused(
            401,
            "missing_api_key",
            "This address needs an API key: send `Authorization: Bearer llmgw_...`. An operator makes one.",
        )
    if len(found) > 1:
        names = " and ".join(name.decode() for name, _ in found)
        raise Refused(400, "two_credentials", f"The request carries two credentials, {names}: send one.")
    name, value = found[0]
    text = value.decode("latin-1").strip()
    if name == b"authorization":
        scheme, _, text = text.partition(" ")
        if scheme.lower() != "bearer":
            raise Refused(
                401,
                "invalid_api_key",
                "The Authorization header is not a Bearer one: send `Bearer llmgw_...`.",
            )
    return text.strip()


def read_key(text: str) -> KeyText:
    key = KeyText.parse(text)
    if key is None:
        raise Refused(
            401,
            "invalid_api_key",
            "The API key is not one of llmgw's, or is mistyped or cut short: its checksum does not match.",
        )
    return key


def check_key(
    key: KeyText, entry: KeyEntry | None, pepper: bytes, *, now_s: float, is_table_fresh: bool
) -> None:
    """`entry` is what the table holds under the key's id. A table that is behind cannot say that a key is
    unknown."""
    if entry is None and not is_table_fresh:
        raise Refused(
            503,
            "database_away",
            "The API key cannot be checked, because the database does not answer: try again.",
            retry_after_s=RETRY_LOADING_S,
        )
    if entry is None or not key.matches(entry.digest, pepper):
        raise Refused(
            401,
            "invalid_api_key",
            f"The API key llmgw_{key.id}_... is not known here: ask an operator for another.",
        )
    if entry.is_revoked:
        raise Refused(
            401,
            "invalid_api_key",
            f"The API key llmgw_{key.id}_... was revoked: ask an operator for another.",
        )
    if entry.expires_at_s is not None and entry.expires_at_s <= now_s:
        raise Refused(
            401,
            "invalid_api_key",
            f"The API key llmgw_{key.id}_... has expired: ask an operator for another.",
        )


# --- the request --------------------------------------------------------------------------------------------


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    names = {name for name, _ in headers}
    if b"content-encoding" in names:
        raise Refused(
            415, "unsupported_encoding", "The body is compressed (Content-Encoding): send it as plain JSON."
        )
    if b"content-length" in names and b"transfer-encoding" in names:
        raise Refused(
            400,
            "ambiguous_length",
            "The request has both Content-Length and Transfer-Encoding: send one of them.",
        )


def check_host(headers: Iterable[tuple[bytes, bytes]], is_allowed: Callable[[str], bool]) -> None:
    """A page that has its own name resolve to this machine speaks to us under that name."""
    for name, value in headers:
        if name == b"host" and not is_allowed(host := value.decode("latin-1")):
            raise Refused(
                400,
                "unknown_host",
                f"The host {quote(host)} is not one of llmgw's: use another address, or have an operator add "
                "it to LLMGW_ALLOWED_HOSTS.",
            )


def body_too_large(limit_bytes: int) -> Refused:
    return Refused(
        413,
        "body_too_large",
        f"The body is larger than {limit_bytes} bytes: send less, such as smaller images.",
    )


def body_too_slow(limit_s: float) -> Refused:
    return Refused(408, "body_too_slow", f"The body did not arrive within {limit_s:.0f} s: send it again.")


def malformed(cause: str) -> Refused:
    return Refused(400, "malformed_json", f"The body is not a JSON object: {cause}.")


def own_fault() -> Refused:
    return Refused(500, "gateway_fault", "The gateway itself failed; its log tells an operator more.")


def unknown_path(path: str) -> Refused:
    return Refused(
        404,
        "unknown_path",
        f"There is no {quote(path)} here: llmgw serves /v1/models, /v1/chat/completions, /v1/completions and "
        "/v1/embeddings.",
    )


def wrong_method(method: str, path: str, allowed: str) -> Refused:
    return Refused(
        405, "method_not_allowed", f"{path} does not take {quote(method)}: use {allowed}.", allow=allowed
    )


def https_only() -> Refused:
    return Refused(
        403,
        "https_only",
        "API keys travel over HTTPS only: use https://, or start llmgw with LLMGW_PLAIN_HTTP=1.",
    )


@dataclass(frozen=True, slots=True)
class Peek:
    """The few things of a body that are looked at: all field names, and where its media would come from."""

    model: object = None
    stream: object = None
    fields: frozenset[str] = frozenset()
    template_fields: frozenset[str] = frozenset()
    part_fields: frozenset[str] = frozenset()
    media_urls: tuple[str, ...] = ()


def check_body(peek: Peek) -> str:
    """The name that the request asks for."""
    if peek.model is None:
        raise Refused(
            400,
            "missing_model",
            "The request names no model: set `model`; GET /v1/models lists them.",
            param="model",
        )
    if not isinstance(peek.model, str) or not peek.model:
        raise Refused(400, "invalid_model", "`model` must be a text that names a model.", param="model")
    if peek.stream not in (None, True, False):
        raise Refused(400, "invalid_stream", "`stream` must be true or false.", param="stream")
    nested = (peek.template_fields & {"chat_template"}) | peek.part_fields
    for name in sorted((peek.fields | nested) & REFUSED_FIELDS.keys()):
        raise Refused(
            400,
            "field_not_accepted",
            f"The field `{name}` is not accepted: {REFUSED_FIELDS[name]}. Leave it out.",
            param=name,
        )
    for url in peek.media_urls:
        if url[:5].lower() != "data:":
            raise Refused(
                400,
                "remote_media",
                f"The URL {quote(url)} is not fetched for a request: send the content itself as a data: URL.",
                param="messages",
            )
    return peek.model


# --- the model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model as the table holds it. `revision` is the one that last changed it. `routing_profile` and
    `over_max_output` are empty where nobody chose; `fallbacks` are names as typed, in order; `engines` are
    those of its profiles, each once."""

    id: int
    name: str
    revision: int = 0
    aliases: tuple[str, ...] = ()
    description: str = ""
    context_length: int = 0
    max_output: int = 0
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    is_simulated: bool = False
    is_off: bool = False
    is_on_demand: bool = False
    created_s: int = 0
    routing_profile: str = ""
    fallbacks: tuple[str, ...] = ()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    over_max_output: str = ""
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Situation:
    """What stands between a model and its first ready replica: replicas on their way (state and reason of
    each), and why none could be placed; `needs_edit` when that will not change by waiting.
    """

    on_the_way: tuple[tuple[str, str], ...] = ()
    unplaced: str = ""
    needs_edit: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """A model's status, and the reason why it is not ready."""

    status: str
    reason: str = ""


def standing(model: ModelEntry, situation: Situation, *, is_ready: bool) -> Standing:
    if is_ready:
        return Standing(READY)
    if model.is_off:
        return Standing(OFF, "it is configured to be off (max 0)")
    if situation.on_the_way:
        state, reason = situation.on_the_way[0]
        return Standing(LOADING, f"{state}: {reason}" if reason else state)
    if situation.unplaced:
        return Standing(UNAVAILABLE, situation.unplaced)
    if model.is_on_demand:
        return Standing(ON_DEMAND, "it is loaded when asked for")
    return Standing(LOADING, "its replicas are about to be placed")


def unknown_model(name: str, names: Collection[str]) -> Refused:
    close = difflib.get_close_matches(name[:200], names, n=3, cutoff=0.6)
    hint = (
        f"Did you mean {' or '.join(quote(item) for item in close)}?"
        if close
        else "GET /v1/models lists them."
    )
    return Refused(404, "model_not_found", f"There is no model {quote(name[:200])}. {hint}", param="model")


def replaced(name: str) -> Refused:
    return Refused(
        503,
        "model_replaced",
        f"The model {quote(name)} was removed and added anew while this request waited for it: try again.",
        param="model",
        retry_after_s=RETRY_SOON_S,
    )


def check_is_on(model: ModelEntry) -> None:
    if model.is_off:
        raise Refused(
            503,
            "off",
            f"The model {quote(model.name)} is off: it is configured with max 0. An operator can raise it.",
            param="model",
        )


def check_can_be_ready(model: ModelEntry, situation: Situation) -> None:
    """Waiting does not help a model whose replicas fail because of what an operator wrote."""
    if situation.needs_edit and not situation.on_the_way:
        raise Refused(
            503,
            UNAVAILABLE,
            f"The model {quote(model.name)} cannot run until an operator edits it: {situation.unplaced}",
            param="model",
            retry_after_s=RETRY_LOADING_S,
        )


def not_ready_in_time(model: ModelEntry, situation: Situation, waited_s: float) -> Refused:
    now = standing(model, situation, is_ready=False)
    waits_for = now.reason if now.status != ON_DEMAND else "its load has not begun"
    return Refused(
        503,
        now.status if now.status in (LOADING, UNAVAILABLE) else LOADING,
        f"The model {quote(model.name)} is not ready after {waited_s:.0f} s: {waits_for}. Try again.",
        param="model",
        retry_after_s=RETRY_LOADING_S,
    )


def too_many_waiting(model: ModelEntry, limit: int) -> Refused:
    return Refused(
        503,
        "too_many_waiting",
        f"The model {quote(model.name)} is loading and {limit} requests wait for it already: try again.",
        param="model",
        retry_after_s=RETRY_LOADING_S,
    )
