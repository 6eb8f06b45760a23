"""Who may ask for what, and the shape of every "no" that a client can hear.

Plain values in; silence or a Refused with its one sentence out. Nothing here parses JSON, reads a clock or
knows where an engine is: the door parses, the table knows.
"""

from __future__ import annotations

import difflib
import hmac
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from catalog.keys import KeyText
from catalog.parts import Limits
from catalog.reading import quote

RETRY_SOON_S, RETRY_LOADING_S = 1, 10
"""What a refused client is told to wait: until another try may meet another replica; until a load may have
moved."""

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A "no", in the shape that OpenAI's clients read. `retry_after_s` is None where trying again changes
    nothing; `loading` is how far a model is that was waited for."""

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
        loading: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s, self.allow, self.loading = retry_after_s, allow, loading

    def as_dict(self) -> dict[str, dict[str, object]]:
        error: dict[str, object] = {"message": self.message, "type": self.kind, "param": self.param}
        error["code"] = self.code
        if self.loading is not None:
            error["loading"] = self.loading
        return {"error": error}

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        elif self.status >= 500:  # OpenAI's and Anthropic's clients ask again unless they are told not to
            headers.append((b"x-should-retry", b"false"))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 408:
            headers.append((b"connection", b"close"))
        return headers


# --- what was set -------------------------------------------------------------------------------------------


class Timeouts(NamedTuple):
    """How long a model's requests wait: for a replica to be there, for its engine to take the connection, for
    the first byte of an answer, and for each further one. None is what the gateway is set to."""

    hold_s: float | None = None
    connect_s: float | None = None
    first_byte_s: float | None = None
    idle_s: float | None = None


NO_TIMEOUTS = Timeouts()


UNLIMITED = Limits()
"""The one that is told from others at once."""


# --- the key ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key as the table holds it. Moments are seconds of the database's clock; None is never.

    `models` are the ids of those it opens, None where it opens all. Keys of one `cache_scope` may share what
    engines have cached of a prompt. `opens_metrics` is all that one of its scope opens.
    """

    id: str
    digest: str
    expires_at_s: float | None = None
    is_revoked: bool = False
    models: frozenset[int] | None = None
    limits: Limits = UNLIMITED
    cache_scope: str = ""
    opens_metrics: bool = False


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
    key: KeyText, digest: str, entry: KeyEntry | None, *, now_s: float, is_table_fresh: bool
) -> KeyEntry:
    """`digest` is the key's own, `entry` what the table holds under its id. A table that is behind cannot say
    that a key is unknown."""
    if entry is None and not is_table_fresh:
        raise Refused(
            503,
            "database_away",
            "The API key cannot be checked, because the database does not answer: try again.",
            retry_after_s=RETRY_LOADING_S,
        )
    if entry is None or not hmac.compare_digest(digest, entry.digest):
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
    return entry


def check_scope(entry: KeyEntry, *, for_metrics: bool) -> None:
    """A key that reads /metrics does nothing else, and no other does."""
    if entry.opens_metrics and not for_metrics:
        says = f"The API key llmgw_{entry.id}_... reads /metrics alone: use one whose scope is inference."
    elif for_metrics and not entry.opens_metrics:
        says = f"The API key llmgw_{entry.id}_... does not read /metrics: use one whose scope is metrics."
    else:
        return
    raise Refused(403, "wrong_scope", says)


# --- the request --------------------------------------------------------------------------------------------


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    names = dict(headers)
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


def check_room(size: int, held: int, limit: int) -> None:
    """Whether a body of this size may be held beside what this process holds already, all in bytes."""
    if held + size > limit:
        raise Refused(
            503,
            "out_of_room",
            f"The gateway holds as many bytes of requests as it may, {limit}: try again in a moment.",
            retry_after_s=RETRY_SOON_S,
        )


def own_fault() -> Refused:
    return Refused(500, "gateway_fault", "The gateway itself failed; its log tells an operator more.")


def stopping() -> Refused:
    return Refused(
        503,
        "gateway_stopping",
        "The gateway is being stopped, and could not wait for the end of this answer: ask again.",
        retry_after_s=1,
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
    limits: Limits = UNLIMITED
    timeouts: Timeouts = NO_TIMEOUTS
    over_max_output: str = ""
    engines: tuple[str, ...] = ()


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
