"""The real huggingface_hub client against a real server: every way a hub has of answering, or not."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import constants

from catalog import hub as asking
from catalog.source import Answer, HubFacts, HubFile, HubSource
from tests.hub_server import COMMIT, Hub, Reply, listing, running_hub

REPO = "org/m"
INFO = f"/api/models/{REPO}"
TOKEN = "hf_a-token-of-this-test"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


def ask(
    hub: Hub, *, repo: str = REPO, revision: str = "", token: str = "", timeout_s: float = 10
) -> HubFacts:
    return asking.ask(HubSource(repo, revision), endpoint=hub.url, token=token, timeout_s=timeout_s)


def test_a_repository_is_found_with_what_is_worth_recording(hub: Hub) -> None:
    gguf = {"architecture": "llama", "context_length": 8192, "total": 1}
    hub.has_repository(REPO, "q.gguf", "README.md", pipeline_tag="text-generation", gguf=gguf)
    assert ask(hub) == HubFacts(
        Answer.FOUND,
        hub.url,
        repo=REPO,
        commit=COMMIT,
        files=(HubFile("q.gguf", 1000), HubFile("README.md", 1000)),
        pipeline_tag="text-generation",
        architecture="llama",
        context_length=8192,
    )
    assert hub.asked == [(f"{INFO}?blobs=true", None)]


def test_the_architecture_of_a_config_is_recorded(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors", config={"architectures": ["LlamaForCausalLM"]})
    assert ask(hub).architecture == "LlamaForCausalLM"


def test_a_revision_is_asked_for_by_name(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors", revision="refs%2Fpr%2F1")
    assert ask(hub, revision="refs/pr/1").answer is Answer.FOUND


def error(status: int, code: str = "", message: str = "") -> Reply:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return Reply(status, {"error": "no"}, {name: value for name, value in headers.items() if value})


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        pytest.param(
            error(401, "RepoNotFound"), Answer.NOT_FOUND_OR_PRIVATE, id="missing, as the hub says to nobody"
        ),
        pytest.param(error(404, "RepoNotFound"), Answer.NOT_FOUND, id="missing, as the hub says to a user"),
        pytest.param(error(401), Answer.NOT_FOUND_OR_PRIVATE, id="401 of a mirror without codes"),
        pytest.param(error(404), Answer.NOT_FOUND, id="404 of a mirror without codes"),
        pytest.param(error(404, "RevisionNotFound"), Answer.NO_REVISION, id="no such revision"),
        pytest.param(error(401, "GatedRepo"), Answer.GATED, id="gated, as the hub says to nobody"),
        pytest.param(error(403, "GatedRepo"), Answer.GATED, id="gated, as the hub says to a user"),
        pytest.param(
            error(401, message="Invalid credentials in Authorization header"),
            Answer.BAD_TOKEN,
            id="a bad token",
        ),
        pytest.param(error(403), Answer.FORBIDDEN, id="a token without the right"),
    ],
)
def test_a_refusal_is_told_for_what_it_is(hub: Hub, reply: Reply, answer: Answer) -> None:
    hub.replies[INFO] = hub.replies[f"{INFO}/revision/v1"] = reply
    assert ask(hub).answer is answer
    assert ask(hub, revision="v1").answer is answer


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        pytest.param(error(500), "it answers with status 500", id="broken"),
        pytest.param(error(503), "it answers with status 503", id="overloaded"),
        pytest.param(error(429), "it answers with status 429", id="too many questions"),
        pytest.param(Reply(body=b"<html>Sign in</html>"), "is not what a hub says", id="a login page"),
        pytest.param(Reply(body=[1, 2]), "is not what a hub says", id="JSON, but a list"),
        pytest.param(Reply(body={"error": "?"}), "is not what a hub says", id="JSON, but no repository"),
        pytest.param(
            Reply(body={"id": REPO, "siblings": [{"name": "x"}]}),
            "is not what a hub says",
            id="files without names",
        ),
        pytest.param(
            Reply(302, b"", {"Location": "http://other.example/login"}),
            "on to another host, other.example",
            id="elsewhere",
        ),
        pytest.param(Reply(302, b"", {"Location": INFO}), "TooManyRedirects", id="in circles"),
    ],
)
def test_what_is_not_an_answer_is_never_called_missing(hub: Hub, reply: Reply, cause: str) -> None:
    hub.replies[INFO] = reply
    facts = ask(hub)
    assert facts.answer is Answer.UNREACHABLE
    assert cause in facts.cause


def test_a_renamed_repository_answers_with_its_new_id(hub: Hub) -> None:
    hub.replies[INFO] = Reply(307, b"", {"Location": "/api/models/new/m"})
    hub.has_repository("new/m", "a.safetensors")
    assert ask(hub).repo == "new/m"


def test_a_gated_repository_is_asked_whether_it_may_be_read(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors", gated="auto")
    hub.replies[f"{INFO}/auth-check"] = error(403, "GatedRepo")
    assert ask(hub, token=TOKEN).answer is Answer.GATED
    hub.replies[f"{INFO}/auth-check"] = Reply(body={})
    facts = ask(hub, token=TOKEN)
    assert (facts.answer, facts.is_gated, facts.may_read) == (Answer.FOUND, True, True)
    hub.replies[f"{INFO}/auth-check"] = error(404)
    assert ask(hub, token=TOKEN).may_read is None


def test_a_token_is_sent_when_there_is_one_and_only_then(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", __file__)  # somebody is logged in on this machine
    hub.has_repository(REPO, "a.safetensors")
    assert not ask(hub).has_token
    assert ask(hub, token=TOKEN).has_token
    assert [authorization for _, authorization in hub.asked] == [None, f"Bearer {TOKEN}"]


def test_a_token_goes_to_no_other_host(hub: Hub) -> None:
    with running_hub() as other:
        other.has_repository(REPO, "a.safetensors")
        hub.replies[INFO] = Reply(307, b"", {"Location": f"{other.url}{INFO}"})
        assert ask(hub, token=TOKEN).answer is Answer.UNREACHABLE
        assert other.asked == []


def test_a_password_in_the_mirrors_address_is_not_repeated(hub: Hub) -> None:
    hub.replies[INFO] = error(500)
    url = hub.url.replace("http://", "http://somebody:secret@")
    facts = asking.ask(HubSource(REPO), endpoint=url, token="", timeout_s=10)
    assert facts.endpoint == hub.url
    assert "secret" not in repr(facts)


def test_a_hub_that_is_down_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    facts = asking.ask(HubSource(REPO), endpoint=url, token="", timeout_s=5)
    assert facts.answer is Answer.UNREACHABLE
    assert "refused" in facts.cause


def test_a_hub_that_speaks_no_tls_is_unreachable(hub: Hub) -> None:
    url = hub.url.replace("http://", "https://")
    facts = asking.ask(HubSource(REPO), endpoint=url, token="", timeout_s=5)
    assert facts.answer is Answer.UNREACHABLE
    assert "SSL" in facts.cause


def test_offline_mode_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ask(hub).cause == "offline mode is on (HF_HUB_OFFLINE)"


def took_s(hub: Hub, timeout_s: float) -> tuple[HubFacts, float]:
    began_s = time.monotonic()
    facts = ask(hub, timeout_s=timeout_s)
    return facts, time.monotonic() - began_s


def test_a_hub_that_says_nothing_is_left_after_the_time_out(hub: Hub) -> None:
    hub.replies[INFO] = Reply(drip=lambda _: bool(hub.is_closing.wait(30)))
    facts, seconds = took_s(hub, 0.4)
    assert facts.answer is Answer.UNREACHABLE
    assert "no answer" in facts.cause
    assert seconds < 3


def test_an_answer_that_drips_has_to_end_in_time_as_a_whole(hub: Hub) -> None:
    def drip(out: Any) -> None:
        with contextlib.suppress(OSError):  # the asker has gone, as it should
            while not hub.is_closing.wait(0.05):
                out.write(b" ")
                out.flush()

    hub.replies[INFO] = Reply(drip=drip)
    facts, seconds = took_s(hub, 0.4)
    assert facts.answer is Answer.UNREACHABLE
    assert "no answer" in facts.cause
    assert seconds < 3


def test_an_answer_without_an_end_is_cut(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_ANSWER_LIMIT_BYTES", 1024**2)
    hub.replies[INFO] = Reply(body=b" " * (2 * 1024**2))
    assert ask(hub).cause == "its answer is longer than 1 MiB"


def test_names_that_could_not_be_shown_or_stored_are_left_out(hub: Hub) -> None:
    body = listing(REPO, "a.safetensors", "b\0.safetensors", sha="not a commit", pipeline_tag="x\0")
    hub.replies[INFO] = Reply(body=body)
    facts = ask(hub)
    assert facts.files == (HubFile("a.safetensors", 1000),)
    assert facts.commit == ""
    assert facts.pipeline_tag == r"x\x00"
