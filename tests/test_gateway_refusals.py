"""Bad input at the gateway: one clear sentence and the right status each, and no engine ever hears of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db.models.functions import Now
from pytest_django import DjangoDbBlocker

from catalog.keys import KeyText
from catalog.models import Key, database_now
from tests.stage import MESSAGES, Play, change, make_key, make_model, playing_for_many
from tests.waiting import wait_until

LIMIT_BYTES = 100_000

pytestmark = pytest.mark.lasting_database


@pytest.fixture(scope="module")
def all_plays(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Play]:
    with playing_for_many(django_db_blocker, LLMGW_MAX_BODY_BYTES=LIMIT_BYTES) as play:
        yield play


@pytest.fixture
def play(all_plays: Play) -> Play:
    return all_plays.begin_anew()


def _body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()


def _with_part(**part: Any) -> bytes:
    return _body(messages=[{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}])


# --- keys ---------------------------------------------------------------------------------

STRANGER = KeyText.from_bytes(b"\x05" * 6, b"\x06" * 24).reveal()


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        pytest.param({"Authorization": ""}, 401, "missing_api_key", id="no key"),
        pytest.param({"Authorization": "Bearer sk-123"}, 401, "invalid_api_key", id="another kind of key"),
        pytest.param({"Authorization": f"Bearer {STRANGER}"}, 401, "invalid_api_key", id="a key nobody made"),
        pytest.param({"Authorization": "Basic YTpi"}, 401, "invalid_api_key", id="a password"),
        pytest.param({"X_Api_Key": STRANGER}, 400, "two_credentials", id="two credentials"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        pytest.param("GET", "/v1/models", id="models"),
        pytest.param("POST", "/v1/chat/completions", id="chat"),
        pytest.param("GET", "/v1/nothing-here", id="an unknown path"),
    ],
)
def test_nothing_is_told_without_a_good_key(
    play: Play, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    body = _body() if method == "POST" else None
    refusal = play.send(method, path, body, **headers)
    assert (refusal.status, refusal.body["code"]) == (status, code)
    assert ("www-authenticate" in refusal.headers) == (status == 401)
    assert not play.engine.heard


def test_a_new_key_is_good_at_once(play: Play) -> None:
    for _ in range(5):
        assert play.send("GET", "/v1/models", Authorization=f"Bearer {make_key()[1]}").status == 200


def test_a_revoked_key_is_refused_within_two_seconds(play: Play) -> None:
    row, key = make_key()
    assert play.send("GET", "/v1/models", Authorization=f"Bearer {key}").status == 200
    change(row, revoked_at=Now())
    refusal = wait_until(lambda: _refusal_of(play, key), "the key to be refused", timeout_s=2)
    assert "was revoked" in refusal


@pytest.mark.parametrize(
    "is_deleted", [pytest.param(True, id="deleted"), pytest.param(False, id="deactivated")]
)
def test_a_key_of_somebody_who_left_is_refused_within_two_seconds(play: Play, is_deleted: bool) -> None:
    row, key = make_key("grace")
    assert play.send("GET", "/v1/models", Authorization=f"Bearer {key}").status == 200
    grace = User.objects.filter(username="grace")
    if is_deleted:
        grace.delete()
    else:
        grace.update(is_active=False)
    wait_until(lambda: _refusal_of(play, key), "the key to be refused", timeout_s=2)
    assert play.send("GET", "/v1/models").status == 200, "others' keys go on"
    assert Key.objects.filter(pk=row.pk).exists() is not is_deleted


def _refusal_of(play: Play, key: str) -> str:
    """Why the key is refused; nothing while it is good."""
    answer = play.send("GET", "/v1/models", Authorization=f"Bearer {key}")
    return answer.body["message"] if answer.status == 401 else ""


def test_a_key_is_good_until_it_expires(play: Play) -> None:
    now = database_now()
    _, gone = make_key(expires_at=now - timedelta(seconds=1))
    _, good = make_key(expires_at=now + timedelta(hours=1))
    assert play.send("GET", "/v1/models", Authorization=f"Bearer {good}").status == 200
    assert "has expired" in _refusal_of(play, gone)


# --- bodies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(b"", "malformed_json", id="nothing"),
        pytest.param(b'{"model": "tiny"', "malformed_json", id="half of it"),
        pytest.param(
            b'{"model": "tiny", "temperature": NaN}', "malformed_json", id="what JSON does not know"
        ),
        pytest.param(b'["tiny"]', "malformed_json", id="a list"),
        pytest.param(b'{"model": "tiny", "user": "\xff"}', "malformed_json", id="not UTF-8"),
        pytest.param(b'{"model": "\\ud800"}', "malformed_json", id="half a character"),
        pytest.param(b'{"model": "tiny", "x": ' + b"[" * 50_000, "malformed_json", id="nested without end"),
        pytest.param(b'{"messages": []}', "missing_model", id="no model"),
        pytest.param(b'{"model": null}', "missing_model", id="null for a model"),
        pytest.param(b'{"model": 7}', "invalid_model", id="a number for a model"),
        pytest.param(b'{"model": "tiny", "stream": "true"}', "invalid_stream", id="a text for a truth"),
        pytest.param(_body(chat_template="{{ evil }}"), "field_not_accepted", id="a template"),
        pytest.param(
            _body(chat_template_kwargs={"chat_template": "{{ evil }}"}),
            "field_not_accepted",
            id="a template within its arguments",
        ),
        pytest.param(
            b'{"model": "tiny", "chat\\u005ftemplate": "{{ evil }}"}',
            "field_not_accepted",
            id="a hidden template",
        ),
        pytest.param(_body(lora_path="/etc/passwd"), "field_not_accepted", id="a file"),
        pytest.param(
            _with_part(type="image_url", image_url={"url": "http://10.0.0.1/admin"}),
            "remote_media",
            id="an image elsewhere",
        ),
        pytest.param(
            _with_part(type="audio_url", audio_url="file:///etc/passwd"),
            "remote_media",
            id="a sound in a file",
        ),
        pytest.param(
            _with_part(image_url={"url": "http://10.0.0.1/"}).replace(b"image_url", b"image\\u005furl"),
            "remote_media",
            id="a hidden image",
        ),
        pytest.param(
            _with_part(type="image_embeds", image_embeds="AAAA"),
            "field_not_accepted",
            id="embeddings in a message",
        ),
    ],
)
def test_a_bad_body_is_refused_with_400(play: Play, body: bytes, code: str) -> None:
    refusal = play.send("POST", "/v1/chat/completions", body)
    assert (refusal.status, refusal.body["code"]) == (400, code)
    assert refusal.body["type"] == "invalid_request_error"
    assert not play.engine.heard


def test_an_image_that_is_in_the_request_passes(play: Play) -> None:
    change(play.model, can_vision=True)
    wait_until(lambda: play.shown("tiny")["capabilities"]["vision"], "the model to be known to see")
    body = _with_part(type="image_url", image_url={"url": "data:image/png;base64,iVBORw0KGgo="})
    assert play.send("POST", "/v1/chat/completions", body).status == 200
    assert play.engine.heard[0].body == body


def test_an_unknown_model_is_met_with_close_names(play: Play) -> None:
    make_model("org/tiny-2")
    refusal = play.refused(model="tinny")
    assert (refusal.status, refusal.body["code"], refusal.body["param"]) == (404, "model_not_found", "model")
    assert 'Did you mean "tiny"' in refusal.body["message"]
    assert play.send("GET", "/v1/models/tinny").status == 404


@pytest.mark.parametrize(
    "is_chunked", [pytest.param(False, id="announced"), pytest.param(True, id="not announced")]
)
def test_a_body_over_the_limit_is_refused_before_it_is_there(play: Play, is_chunked: bool) -> None:
    piece = b"x" * 20_000
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 1000000000"
    with play.web.connection() as connection:
        connection.sendall(play.request(b"", length))
        if is_chunked:
            for _ in range(LIMIT_BYTES // len(piece) + 1):
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        assert b"413" in connection.recv(1000).split(b"\r\n")[0]


def test_a_body_up_to_the_limit_passes(play: Play) -> None:
    body = _body(user="x" * 20_000)
    body = body[:-1] + b" " * (LIMIT_BYTES - len(body)) + b"}"
    assert play.send("POST", "/v1/chat/completions", body).status == 200
    assert play.send("POST", "/v1/chat/completions", body + b" ").status == 413


def test_a_compressed_body_is_refused(play: Play) -> None:
    refusal = play.send("POST", "/v1/chat/completions", gzip.compress(_body()), Content_Encoding="gzip")
    assert (refusal.status, refusal.body["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        pytest.param("GET", "/v1/chat/completions", 405, "POST", id="reading a chat"),
        pytest.param("DELETE", "/v1/models/tiny", 405, "GET", id="deleting a model"),
        pytest.param("POST", "/v1/chat/completions/", 404, None, id="a slash too many"),
        pytest.param("POST", "/v1/%2e%2e/metrics", 404, None, id="an engine's own path"),
        pytest.param("GET", "/v1/", 404, None, id="nothing after v1"),
    ],
)
def test_what_is_not_served_is_told_apart(
    play: Play, method: str, path: str, status: int, allow: str | None
) -> None:
    refusal = play.send(method, path, b"{}" if method == "POST" else None)
    assert refusal.status == status
    assert refusal.headers.get("allow") == allow
    assert not play.engine.heard


# --- the wire -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"Content-Length: 2", b"Transfer-Encoding: chunked"], id="two lengths"),
        pytest.param([b"Content-Length: 2", b"Content-Length: 3"], id="one length, twice"),
        pytest.param([b"Content-Length: 2", b"X-Odd: a\x00b"], id="a NUL in a header"),
        pytest.param([b"Content-Length: 2", b"X-Odd: a", b" folded"], id="a folded header"),
        pytest.param([b"Content-Length: 2", b"X Odd: a"], id="a space in a header's name"),
    ],
)
def test_a_request_that_two_readers_may_read_differently_is_refused(play: Play, lines: list[bytes]) -> None:
    with play.web.connection() as connection:
        connection.sendall(play.request(b"{}", *lines))
        assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]
    assert not play.engine.heard


def test_a_name_that_is_not_llmgws_is_refused_before_the_key_is_looked_at(play: Play) -> None:
    refusal = play.send("GET", "/v1/models", Host="evil.example", Authorization="")
    assert (refusal.status, refusal.body["code"]) == (400, "unknown_host")
    assert '"evil.example"' in refusal.body["message"]


def test_a_client_that_leaves_before_its_request_is_whole_leaves_nothing_behind(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    with play.web.connection() as connection:
        connection.sendall(play.request(b"{", b"Content-Length: 100"))
    assert play.chat().choices
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
