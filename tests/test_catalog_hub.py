"""The real huggingface_hub client against a real server: every way a hub has of answering, or not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from catalog import hub as asking
from catalog.source import Answer, HubFacts, HubFile, HubSource
from tests.hub_server import COMMIT, Hub, Reply, listing, running_hub

ROOT = Path(__file__).parent.parent
REPO = "org/m"
INFO = f"/api/models/{REPO}"
TOKEN = "hf_a-token-of-this-test"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


def ask(
    hub: Hub, *, repo: str = REPO, revision: str = "", token: str = "", timeout_s: float = 10, **options: Any
) -> HubFacts:
    source = HubSource(repo, revision)
    return asking.ask(source, endpoint=hub.url, token=token, timeout_s=timeout_s, **options)


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
        pytest.param(
            error(403, message="Access to this resource is disabled."),
            Answer.DISABLED,
            id="disabled by the hub",
        ),
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
        pytest.param(Reply(body=b"[" * 100_000), "is not what a hub says", id="brackets without an end"),
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


ASK = """
import sys
from catalog import hub
from catalog.source import HubSource
print(hub.ask(HubSource("org/m"), endpoint=sys.argv[1], token="", timeout_s=10).answer)
"""


def test_nothing_is_asked_of_any_hub_but_the_one_that_was_named(hub: Hub, tmp_path: Path) -> None:
    hub.has_repository(REPO, "a.safetensors")
    with running_hub() as usual:
        done = subprocess.run(
            [sys.executable, "-c", ASK, hub.url],
            env={**os.environ, "HF_ENDPOINT": usual.url, "HF_HOME": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout, done.stderr) == ("found\n", "")
        assert usual.asked == []
    assert [path for path, _ in hub.asked] == [f"{INFO}?blobs=true"]


def test_a_password_in_the_mirrors_address_is_not_repeated(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.replies[INFO] = error(500)
    url = hub.url.replace("http://", "http://somebody:secret@")
    facts = asking.ask(HubSource(REPO), endpoint=url, token="", timeout_s=10)
    assert facts.endpoint == hub.url
    assert "secret" not in repr(facts) + caplog.text


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


def test_a_hub_whose_certificate_nobody_vouches_for_is_unreachable(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with running_hub(tls) as untrusted:
        untrusted.has_repository(REPO, "a.safetensors")
        facts = ask(untrusted, token=TOKEN)
    assert facts.answer is Answer.UNREACHABLE
    assert "certificate" in facts.cause.lower()
    assert untrusted.asked == []


def test_an_id_that_no_hub_can_have_is_not_asked_about(hub: Hub) -> None:
    assert ask(hub, repo="org/a--b").answer is Answer.NOT_FOUND
    assert hub.asked == []


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


def test_an_answer_without_an_end_is_cut(hub: Hub) -> None:
    hub.replies[INFO] = Reply(body=b" " * (2 * 1024**2))
    assert ask(hub, limit_bytes=1024**2).cause == "its answer is longer than 1 MiB"


def test_names_that_could_not_be_shown_or_stored_are_left_out(hub: Hub) -> None:
    body = listing(REPO, "a.safetensors", "b\0.safetensors", sha="not a commit", pipeline_tag="x\0")
    hub.replies[INFO] = Reply(body=body)
    facts = ask(hub)
    assert facts.files == (HubFile("a.safetensors", 1000),)
    assert facts.commit == ""
    assert facts.pipeline_tag == r"x\x00"


def test_a_size_that_no_file_can_have_is_unknown(hub: Hub) -> None:
    body = listing(REPO, "a.safetensors", "b.safetensors")
    body["siblings"][0]["size"], body["siblings"][1]["size"] = 10**400, -1
    hub.replies[INFO] = Reply(body=body)
    assert {each.size_bytes for each in ask(hub).files} == {None}


# --- the model's own config -----------------------------------------------------------------------


def configured(hub: Hub, config: object, **info: Any) -> HubFacts:
    hub.has_repository(REPO, "a.safetensors", "config.json", **info)
    hub.has_file(REPO, "config.json", config if isinstance(config, Reply) else Reply(body=config))
    return ask(hub)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "context_length", "heads"),
    [
        pytest.param({"max_position_embeddings": 32768, "num_attention_heads": 28}, 32768, 28, id="usual"),
        pytest.param({"n_positions": 1024, "n_head": 12}, 1024, 12, id="of an older family"),
        pytest.param({"max_seq_len": 8192, "n_heads": 32}, 8192, 32, id="of another family"),
        pytest.param(
            {
                "text_config": {"max_position_embeddings": 131072, "num_attention_heads": 8},
                "vision_config": {"num_attention_heads": 16, "max_position_embeddings": 77},
            },
            131072,
            8,
            id="of a model that sees, too",
        ),
        pytest.param(
            {"max_position_embeddings": 4096, "num_attention_heads": 32, "text_config": {"vocab_size": 9}},
            4096,
            32,
            id="told outside of the part for text",
        ),
        pytest.param({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072, 0, id="stretched"),
        pytest.param(
            {"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072, 0, id="stretched already"
        ),
        pytest.param(
            {"max_position_embeddings": 4096, "rope_scaling": YARN | {"factor": float("nan")}},
            4096,
            0,
            id="stretched by no number",
        ),
        pytest.param(
            {"max_position_embeddings": "4096", "num_attention_heads": True}, 0, 0, id="other types"
        ),
        pytest.param({"max_position_embeddings": 10**30, "num_attention_heads": -4}, 0, 0, id="out of range"),
        pytest.param({}, 0, 0, id="nothing"),
    ],
)
def test_a_config_tells_context_and_heads(hub: Hub, config: object, context_length: int, heads: int) -> None:
    facts = configured(hub, config)
    assert (facts.context_length, facts.attention_heads) == (context_length, heads)


def test_a_config_is_read_at_the_commit_that_was_found(hub: Hub) -> None:
    facts = configured(hub, {"architectures": ["LlamaForCausalLM"]})
    assert facts.architecture == "LlamaForCausalLM"
    assert [path for path, _ in hub.asked] == [
        f"{INFO}?blobs=true",
        f"/{REPO}/resolve/{COMMIT}/config.json",
        f"/api/resolve-cache/models/{REPO}/{COMMIT}/config.json",
    ]


def test_what_the_hub_itself_tells_of_a_model_comes_before_its_config(hub: Hub) -> None:
    facts = configured(hub, {"max_position_embeddings": 77}, gguf={"context_length": 8192})
    assert facts.context_length == 8192


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(error(404, "EntryNotFound"), id="missing"),
        pytest.param(error(403, "GatedRepo"), id="not for everybody"),
        pytest.param(error(500), id="broken"),
        pytest.param(Reply(body=b"<html>Sign in</html>"), id="a login page"),
        pytest.param(Reply(body=b"[" * 100_000), id="brackets without an end"),
        pytest.param(Reply(body=b"\xff\xfe{}"), id="no text"),
        pytest.param(Reply(body=[{"max_position_embeddings": 5}]), id="a list"),
        pytest.param(
            Reply(body={"text_config": [], "architectures": [[]], "rope_scaling": 3}), id="nonsense"
        ),
        pytest.param(Reply(body=b'{"n_ctx": 5}' + b" " * 2 * 1024**2), id="endless"),
        pytest.param(Reply(302, b"", {"Location": "//other.example/config.json"}), id="elsewhere"),
    ],
)
def test_a_config_that_cannot_be_read_is_no_refusal(hub: Hub, reply: Reply) -> None:
    facts = configured(hub, reply)
    assert (facts.answer, facts.commit, facts.context_length) == (Answer.FOUND, COMMIT, 0)


def test_a_config_that_never_ends_leaves_what_was_found(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors", "config.json")
    hub.has_file(REPO, "config.json", Reply(drip=lambda _: bool(hub.is_closing.wait(30))))
    facts, seconds = took_s(hub, 1.0)
    assert facts.answer is Answer.FOUND
    assert seconds < 4


def test_a_token_does_not_follow_a_config_to_another_host(hub: Hub) -> None:
    with running_hub() as other:
        other.replies["/config.json"] = Reply(body={"max_position_embeddings": 5})
        hub.has_repository(REPO, "a.safetensors", "config.json")
        hub.replies[f"/{REPO}/resolve/{COMMIT}/config.json"] = Reply(
            302, b"", {"Location": f"{other.url}/config.json"}
        )
        facts = ask(hub, token=TOKEN)
        assert (facts.answer, facts.context_length) == (Answer.FOUND, 0)
        assert other.asked == []
    assert [authorization for _, authorization in hub.asked] == [f"Bearer {TOKEN}"] * 2


def test_a_gated_repository_that_may_not_be_read_is_not_asked_for_its_config(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors", "config.json", gated="manual")
    hub.replies[f"{INFO}/auth-check"] = error(403, "GatedRepo")
    assert ask(hub, token=TOKEN).answer is Answer.GATED
    assert [path for path, _ in hub.asked] == [f"{INFO}?blobs=true", f"{INFO}/auth-check"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    ["max_position_embeddings", "num_attention_heads", "rope_scaling", "rope_type", "factor", "text_config",
     "architectures", "original_max_position_embeddings", "type"]
)  # fmt: skip


@trials(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(_KEYS, _JSON | st.just("yarn") | st.dictionaries(_KEYS, _JSON | st.just("yarn"))))
def test_any_config_is_read_or_passed_over(hub: Hub, config: dict[str, Any]) -> None:
    facts = configured(hub, Reply(body=json.dumps(config).encode()))
    assert facts.answer is Answer.FOUND
    assert facts.context_length >= 0
    assert facts.architecture.isprintable()


# --- answers that are kept ------------------------------------------------------------------------


def test_a_good_answer_is_given_again_for_a_while(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors")
    first = ask(hub, young_s=60)
    assert ask(hub, young_s=60) == first
    assert len(hub.asked) == 1
    hub.replies.clear()
    assert ask(hub).answer is Answer.NOT_FOUND_OR_PRIVATE  # asked now, whatever is kept


def test_what_was_asked_now_replaces_what_was_kept(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors")
    ask(hub)
    hub.has_repository(REPO, "b.safetensors")
    ask(hub)
    assert [each.name for each in ask(hub, young_s=60).files] == ["b.safetensors"]
    hub.replies.clear()
    ask(hub)
    assert ask(hub, young_s=60).answer is Answer.NOT_FOUND_OR_PRIVATE
    assert len(hub.asked) == 4


@pytest.mark.parametrize(
    "otherwise",
    [{"repo": "org/n"}, {"revision": "v1"}, {"token": TOKEN}],
    ids=["another repository", "another revision", "another token"],
)
def test_another_question_has_no_answer_yet(hub: Hub, otherwise: dict[str, str]) -> None:
    for repo in (REPO, "org/n"):
        hub.has_repository(repo, "a.safetensors")
        hub.has_repository(repo, "a.safetensors", revision="v1")
    ask(hub, young_s=60)
    ask(hub, young_s=60, **otherwise)
    assert len(hub.asked) == 2


def test_another_hub_has_no_answer_yet(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors")
    ask(hub, young_s=60)
    with running_hub() as other:
        assert ask(other, young_s=60).answer is Answer.NOT_FOUND_OR_PRIVATE


def test_a_refusal_and_a_failure_are_asked_about_each_time(hub: Hub) -> None:
    hub.replies[INFO] = error(403, "GatedRepo")
    assert ask(hub, young_s=60).answer is Answer.GATED
    hub.replies[INFO] = error(500)
    assert ask(hub, young_s=60).answer is Answer.UNREACHABLE
    hub.has_repository(REPO, "a.safetensors")
    assert ask(hub, young_s=60).answer is Answer.FOUND


def test_only_so_many_answers_are_kept(hub: Hub) -> None:
    names = [f"org/m{number}" for number in range(asking.KEPT_ANSWERS + 1)]
    for name in names:
        hub.has_repository(name, "a.safetensors")
        ask(hub, repo=name, young_s=60)
    ask(hub, repo=names[-1], young_s=60)
    assert len(hub.asked) == len(names)
    ask(hub, repo=names[0], young_s=60)
    assert len(hub.asked) == len(names) + 1


def test_many_may_ask_at_once(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors")
    found: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: found.append(ask(hub, young_s=0.001).answer)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Answer.FOUND] * 8
