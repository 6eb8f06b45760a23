"""By what an agent and its control plane know each other, and how it tells that something has changed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.configuration import parse_control_plane, parse_tls
from nodes.agent.home import Home
from nodes.agent.options import ConfigurationError
from nodes.agent.service import Service
from nodes.agents import Observation, observe
from nodes.conversation import cluster_keys
from nodes.models import Node
from tests.agent_process import CLUSTER, ROOT, AgentProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.one_database


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """With a certificate that a join has made."""
    home = Home(tmp_path_factory.mktemp("home"))
    if not home.has_certificate():
        pytest.skip("no openssl")
    return home


# --- certificates -----------------------------------------------------------------------------------------


def test_a_certificate_is_made_once_and_its_key_is_private(home: Home) -> None:
    before = home.certificate.read_bytes()
    assert home.has_certificate()
    assert home.certificate.read_bytes() == before
    assert home.key.stat().st_mode & 0o777 == 0o600


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as no:
        act()
    assert str(no.value).endswith(".")
    return str(no.value)


def test_what_cannot_be_a_certificate_is_told(home: Home, tmp_path: Path) -> None:
    certificate, key = str(home.certificate), str(home.key)
    assert parse_tls("", "") is None
    assert parse_tls(certificate, key) == (home.certificate, home.key)
    assert "go together" in refused(lambda: parse_tls(certificate, ""))
    assert "There is no file /nowhere for TLS" in refused(lambda: parse_tls("/nowhere", key))
    (tmp_path / "key").write_text("nonsense")
    (tmp_path / "key").chmod(0o644)
    assert "Others may read --tls-key" in refused(lambda: parse_tls(certificate, str(tmp_path / "key")))
    (tmp_path / "key").chmod(0o600)
    assert "cannot be used together" in refused(lambda: parse_tls(certificate, str(tmp_path / "key")))


CONTROL_PLANES = {
    "no address": ("llmgw.example", "write scheme and host"),
    "an address with a path": ("https://llmgw.example/api", "write scheme and host"),
    "an address with a password": ("https://a:b@llmgw.example", "write scheme and host"),
    "a port that is none": ("https://llmgw.example:x", "write scheme and host"),
    "one that hears in the clear": ("http://llmgw.example", "over the network unencrypted"),
}


@pytest.mark.parametrize(("text", "words"), CONTROL_PLANES.values(), ids=CONTROL_PLANES)
def test_a_control_plane_that_cannot_be_is_told(text: str, words: str) -> None:
    assert words in refused(lambda: parse_control_plane(text, is_plain_allowed=False))
    assert parse_control_plane("https://llmgw.example/", is_plain_allowed=False) == "https://llmgw.example"
    assert parse_control_plane("http://[::1]:80", is_plain_allowed=False) == "http://[::1]:80"
    assert parse_control_plane("http://llmgw.example", is_plain_allowed=True) == "http://llmgw.example"


@pytest.fixture
def agent(home: Home, tmp_path: Path) -> Iterator[AgentProcess]:
    """One that shows the certificate, and has the token that this control plane derives."""
    agent = AgentProcess(tmp_path, "--tls-certificate", str(home.certificate), "--tls-key", str(home.key))
    agent.token = cluster_keys()[0].node_token(agent.node, 1)
    identity = {"cluster": CLUSTER, "node": agent.node, "name": "n", "token": agent.token}
    agent.identity.write_text(json.dumps(identity))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(agent.command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield agent
    finally:
        process.terminate()
        process.wait(20)


def seen(agent: AgentProcess, certificate: str, scheme: str = "https") -> Observation:
    address = f"{scheme}://127.0.0.1:{agent.port}"
    (found,) = observe(
        [Node(name="n", uuid=agent.node, address=address, certificate=certificate)],
        cluster=CLUSTER,
        now=datetime.now(UTC),
    )
    return found


def test_an_agent_is_known_by_the_certificate_that_it_joined_with(agent: AgentProcess, home: Home) -> None:
    wait_until(lambda: seen(agent, home.checksum()).is_answered, "the agent to answer", timeout_s=30)
    assert seen(agent, home.checksum()).report.node == agent.node
    assert seen(agent, "00" * 32).problem == (
        f"What answers for n at https://127.0.0.1:{agent.port} shows another certificate than its agent "
        "joined with; see what it is, or have the machine join again (manage.py node_join_token)."
    )
    told = seen(agent, "").problem
    assert told.startswith(
        "No authority that this machine trusts vouches for the certificate of n at https://"
    )
    assert "(self-signed certificate); correct it, or have the machine join again" in told
    assert not seen(agent, "", scheme="http").is_answered, "it does not speak in the clear"


# --- hints ------------------------------------------------------------------------------------------------


class ControlPlane:
    """Hears hints, and answers them with `status`."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.status = 204
        ours = self

        class Door(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                ours.heard.append((self.path, self.headers["Authorization"]))
                self.send_response(ours.status)
                self.end_headers()

            def log_message(self, *told: Any) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> ControlPlane:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *told: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def check(agent: AgentProcess) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*agent.command, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_an_agent_tells_at_once_what_has_changed(tmp_path: Path) -> None:
    with ControlPlane() as there, AgentProcess(tmp_path, "--control-plane", there.url) as agent:
        wait_until(lambda: there.heard, "word that the agent is there")
        assert set(there.heard) == {(f"/api/nodes/{agent.node}/hint", f"Bearer {agent.token}")}

        def hints_of(act: Callable[[], object], state: str, replica: str) -> int:
            before = len(there.heard)
            act()
            agent.wait_for(replica, state)
            wait_until(lambda: len(there.heard) > before, f"word that it is {state}")
            return len(there.heard) - before

        rank = agent.run()
        wait_until(lambda: len(there.heard) > 1, "word that it is ready")
        replica = rank["replica"]
        pid = rank["pid"]
        assert hints_of(lambda: os.kill(pid, 9), "failed", replica) < 5, "several at once are one"
        there.status = 500
        before = len(there.heard)
        agent.run(gpus=["sim-1"])
        wait_until(lambda: len(there.heard) > before + 1, "word in spite of the refusal")
        there.status = 401
        done = subprocess.run(
            [*agent.command, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"llmgw at {there.url} does not know this node's token: the node was removed, or joined "
            "elsewhere; join it again."
        )
        there.status = 204
        done = subprocess.run(
            [*agent.command, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0
        assert f"llmgw at {there.url} knows this node" in done.stderr
    assert (tmp_path / "agent.log").read_text().count("answered a hint with status 500") == 1


def test_a_control_plane_that_is_away_delays_nothing(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, "--control-plane", "http://127.0.0.1:9") as agent:
        agent.run()
        told = (tmp_path / "agent.log").read_text()
        assert told.count("llmgw at http://127.0.0.1:9 cannot be reached") == 1
        done = subprocess.run(
            [*agent.command, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, "cannot be reached" in done.stderr) == (1, True)
        assert json.loads(done.stdout)["node"] == agent.node, "what it would tell is printed all the same"


# --- systemd ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_of_user", [False, True], ids=["of the machine", "of a user"])
def test_a_unit_is_one_that_systemd_takes(tmp_path: Path, is_of_user: bool) -> None:
    service = Service(is_of_user, "llmgw-agent.service")
    folder = tmp_path / 'it\'s a folder, 100% "odd" for $5'
    folder.mkdir()
    run = folder / "run"
    run.write_text("#!/bin/sh\n")
    run.chmod(0o700)
    text = service.unit(run)
    for line in ("Restart=always", "KillMode=process", "OOMPolicy=continue", "UMask=0077"):
        assert line in text.splitlines(), line
    assert ("NoNewPrivileges=yes" in text) is not is_of_user
    (tmp_path / service.name).write_text(text)
    words = ["systemd-analyze", *(["--user"] * is_of_user), "verify", str(tmp_path / service.name)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        )
    except FileNotFoundError:
        pytest.skip("no systemd-analyze")
    assert (done.returncode, done.stderr) == (0, "")


def test_where_systemd_does_not_run_nobody_asks_it(tmp_path: Path) -> None:
    is_booted = Path("/run/systemd/system").is_dir()
    assert is_booted or Service.here(tmp_path, is_wanted=True) is None
    assert Service.here(tmp_path, is_wanted=False) is None
