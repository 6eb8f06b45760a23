"""What every page of the control plane carries, and who is turned away before any page is made."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client, override_settings

from tests.stage import Web

PASSWORD = "a long enough password"


def test_pages_may_load_nothing_from_elsewhere_and_run_nothing_inline(client: Client) -> None:
    policy = client.get("/admin/login/").headers["Content-Security-Policy"]
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == "'self'"
    assert "unsafe" not in policy


def test_pages_cannot_be_framed_sniffed_or_told_of(client: Client) -> None:
    headers = client.get("/admin/login/").headers
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"


def test_static_files_are_for_everybody_here_and_for_no_other_origin(client: Client) -> None:
    answer = client.get("/static/admin/css/base.css", headers={"Origin": "https://elsewhere.example"})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/css")
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("path", ["/static/../manage.py", "/static/%2e%2e/manage.py", "/static/none.css"])
def test_nothing_but_static_files_is_below_static(client: Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_host_that_is_not_ours_is_refused() -> None:
    assert Client().get("/admin/login/", headers={"Host": "elsewhere.example"}).status_code == 400


@override_settings(SECURE_SSL_REDIRECT=True)
def test_without_plain_http_pages_are_served_over_https_alone(client: Client) -> None:
    answer = client.get("/admin/login/")
    assert answer.status_code == 301
    assert answer.headers["Location"].startswith("https://")


@pytest.mark.django_db
def test_guessing_a_password_is_slowed_down() -> None:
    get_user_model().objects.create_superuser("olga", password=PASSWORD)
    guesser, elsewhere = Client(REMOTE_ADDR="10.0.0.1"), Client(REMOTE_ADDR="10.0.0.2")
    for _ in range(10):
        guesser.post("/admin/login/", {"username": "olga", "password": "a guess"})
    right = {"username": "olga", "password": PASSWORD}
    assert guesser.post("/admin/login/", right).status_code == 429
    assert guesser.get("/admin/").status_code == 302
    assert elsewhere.post("/admin/login/", right).status_code == 302
    assert elsewhere.get("/admin/").status_code == 200


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["its length says so", "it only turns out to be"])
def test_a_page_takes_no_body_over_the_limit(settings: Any, is_chunked: bool) -> None:
    settings.LLMGW_MAX_BODY_BYTES = 100_000
    with Web() as web:
        connection = http.client.HTTPConnection(web.url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            connection.request(
                "POST",
                "/api/models/",
                iter([b"x" * 50_000] * 3) if is_chunked else b"x" * 150_000,
                {"Content-Type": "application/json"},
                encode_chunked=is_chunked,
            )
            answer = connection.getresponse()
            body = json.load(answer)
    assert answer.status == 413
    assert body["errors"][0]["sentence"] == (
        "The request is larger than the 100000 bytes that this server takes; send less."
    )


@pytest.mark.django_db(transaction=True)
def test_a_page_does_not_wait_for_a_body_without_end(settings: Any) -> None:
    settings.LLMGW_BODY_S = 0.2
    with Web() as web:
        connection = http.client.HTTPConnection(web.url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            connection.putrequest("POST", "/admin/login/")
            connection.putheader("Content-Length", "10")
            connection.endheaders(b"half")
            answer = connection.getresponse()
            body = json.load(answer)
    assert (answer.status, body["errors"][0]["code"]) == (408, "too_slow")
