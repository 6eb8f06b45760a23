"""Every "no" of the gateway's core, as a table of sentences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from catalog.keys import KeyText
from llmgw.gateway import admission
from llmgw.gateway.admission import KeyEntry, Refused

PEPPER = b"a pepper for tests"
KEY = KeyText.from_bytes(b"\x01" * 6, b"\x02" * 24)
ENTRY = KeyEntry(KEY.id, KEY.digest(PEPPER))


def _refusal(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def test_a_refusal_has_the_shape_that_openai_clients_read() -> None:
    refused = Refused(503, "loading", "Wait.", param="model", retry_after_s=10)
    assert refused.as_dict() == {
        "error": {"message": "Wait.", "type": "server_error", "param": "model", "code": "loading"}
    }
    assert refused.headers() == [(b"retry-after", b"10")]


def test_a_client_whose_body_does_not_come_loses_its_connection() -> None:
    assert (b"connection", b"close") in admission.body_too_slow(120).headers()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        pytest.param(400, "invalid_request_error", id="what the client sent"),
        pytest.param(401, "authentication_error", id="who the client is"),
        pytest.param(403, "permission_error", id="what the client may do"),
        pytest.param(404, "invalid_request_error", id="what is not there"),
        pytest.param(429, "rate_limit_error", id="how much the client asks"),
        pytest.param(503, "server_error", id="what llmgw cannot do now"),
    ],
)
def test_the_status_gives_a_refusal_its_type(status: int, kind: str) -> None:
    assert Refused(status, "code", "Sentence.").kind == kind


# --- the credential ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([(b"authorization", b"Bearer abc")], id="a Bearer header"),
        pytest.param([(b"authorization", b"bearer  abc ")], id="a Bearer header, carelessly written"),
        pytest.param([(b"x-api-key", b"abc"), (b"accept", b"*/*")], id="an X-Api-Key header"),
    ],
)
def test_one_credential_is_found(headers: list[tuple[bytes, bytes]]) -> None:
    assert admission.credential(headers) == "abc"


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        pytest.param([], 401, "needs an API key", id="none"),
        pytest.param([(b"authorization", b"Basic abc")], 401, "not a Bearer one", id="a password"),
        pytest.param(
            [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
            400,
            "two credentials, authorization and authorization",
            id="two Authorization headers",
        ),
        pytest.param(
            [(b"x-api-key", b"a"), (b"authorization", b"Bearer a")],
            400,
            "two credentials, x-api-key and authorization",
            id="the same key in two headers",
        ),
    ],
)
def test_no_or_two_credentials_are_refused(
    headers: list[tuple[bytes, bytes]], status: int, says: str
) -> None:
    refused = _refusal(lambda: admission.credential(headers))
    assert refused.status == status
    assert says in refused.message


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("sk-1234567890", id="somebody else's"),
        pytest.param(KEY.reveal()[:-1], id="cut short"),
        pytest.param(KEY.reveal().replace("_1", "_2").swapcase(), id="mistyped"),
        pytest.param("", id="empty"),
    ],
)
def test_a_text_that_is_no_key_is_told_so_without_a_look_up(text: str) -> None:
    refused = _refusal(lambda: admission.read_key(text))
    assert (refused.status, refused.code) == (401, "invalid_api_key")
    assert "checksum does not match" in refused.message


def _check(
    entry: KeyEntry | None, key: KeyText = KEY, *, now_s: float = 100, is_table_fresh: bool = True
) -> None:
    admission.check_key(key, key.digest(PEPPER), entry, now_s=now_s, is_table_fresh=is_table_fresh)


def test_a_known_key_is_let_in_by_a_fresh_table_and_by_an_old_one() -> None:
    _check(ENTRY)
    _check(ENTRY, is_table_fresh=False)


def test_a_key_is_let_in_until_the_moment_it_expires() -> None:
    entry = KeyEntry(KEY.id, KEY.digest(PEPPER), expires_at_s=100)
    _check(entry, now_s=99.9)
    assert "has expired" in _refusal(lambda: _check(entry, now_s=100)).message


@pytest.mark.parametrize(
    ("entry", "key", "says"),
    [
        pytest.param(None, KEY, "not known here", id="a key that nobody made"),
        pytest.param(
            ENTRY, KeyText(KEY.id, "x" * 32), "not known here", id="the id of one with another secret"
        ),
        pytest.param(
            KeyEntry(KEY.id, KEY.digest(PEPPER), is_revoked=True), KEY, "was revoked", id="a revoked key"
        ),
        pytest.param(
            KeyEntry(KEY.id, KEY.digest(PEPPER), is_revoked=True),
            KeyText(KEY.id, "x" * 32),
            "not known here",
            id="a wrong secret learns nothing of a revoked key",
        ),
    ],
)
def test_a_key_that_is_not_good_is_refused(entry: KeyEntry | None, key: KeyText, says: str) -> None:
    refused = _refusal(lambda: _check(entry, key))
    assert (refused.status, refused.code) == (401, "invalid_api_key")
    assert says in refused.message
    assert key.secret not in refused.message


def test_a_table_that_is_behind_does_not_call_a_key_unknown() -> None:
    refused = _refusal(lambda: _check(None, is_table_fresh=False))
    assert (refused.status, refused.code) == (503, "database_away")
    assert refused.retry_after_s is not None


# --- the request --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        pytest.param([(b"content-encoding", b"gzip")], 415, "unsupported_encoding", id="a compressed body"),
        pytest.param(
            [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")],
            400,
            "ambiguous_length",
            id="two ways to say how long the body is",
        ),
    ],
)
def test_headers_that_hide_the_body_are_refused(
    headers: list[tuple[bytes, bytes]], status: int, code: str
) -> None:
    refused = _refusal(lambda: admission.check_headers(headers))
    assert (refused.status, refused.code) == (status, code)


def test_bodies_are_held_in_bounded_room() -> None:
    admission.check_room(10, 90, 100)
    refused = _refusal(lambda: admission.check_room(11, 90, 100))
    assert (refused.status, refused.retry_after_s is not None) == (503, True)
    assert "100" in refused.message


# --- the model ----------------------------------------------------------------------------


def test_an_unknown_model_is_met_with_names_that_are_close() -> None:
    refused = admission.unknown_model("qwen3-8", ["qwen3-8b", "qwen3-80b", "gemma3"])
    assert (refused.status, refused.code, refused.param) == (404, "model_not_found", "model")
    assert 'no model "qwen3-8"' in refused.message
    assert '"qwen3-8b"' in refused.message
    assert "gemma3" not in refused.message


def test_an_unknown_model_like_no_other_is_met_with_where_to_look() -> None:
    assert "GET /v1/models" in admission.unknown_model("x" * 5000, ["qwen3-8b"]).message
