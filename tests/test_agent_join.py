"""A machine becomes a node by one line: for real, in a bare environment that pip fills. Where it
cannot, that is told before the token is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.home import Home
from nodes.agent.join import REFUSALS, JoinError, join, parser, uninstall
from nodes.bundle import ROOT, bundle
from tests.services import free_port
from tests.trial import Trial
from tests.waiting import wait_until
from tests.wheelhouse import wheelhouse

pytestmark = [pytest.mark.e2e, pytest.mark.lasting_database, pytest.mark.one_database]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    trial = Trial(tmp_path_factory.mktemp("trial"))
    try:
        trial.start_web()
        trial.start_worker()
        yield trial
    finally:
        trial.end()


class Machine:
    """One on which the line is run, with a home of its own and nothing else of ours."""

    def __init__(self, trial: Trial, folder: Path, *options: str) -> None:
        self.trial, self.home = trial, folder / "agent"
        self.port = free_port()
        self.options = ("--no-service", "--home", str(self.home), *options)
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}

    @property
    def listen(self) -> tuple[str, ...]:
        return ("--listen", f"127.0.0.1:{self.port}") if self.port else ()

    def paste(self, line: str, token: str) -> str:
        """The line, as it was printed but for what an operator adds; what it said."""
        words = " ".join((line, *self.options, *self.listen))
        done = subprocess.run(
            ["sh", "-c", words],
            input=f"{token}\n",
            capture_output=True,
            text=True,
            cwd="/",
            env=self.environment,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def join(self, token: str, *options: str) -> str:
        """What the line comes to once it has installed. Empty, or the sentence that it ends with."""
        words = [*self.options, "--control-plane", self.trial.url, *self.listen, *options]
        home = Home(self.home)
        home.path.mkdir(exist_ok=True)
        try:
            join(home, parser().parse_args(words), token)
        except REFUSALS as no:
            return str(no)
        return ""

    def kept_by(self) -> str:
        """What `uninstall` is refused with."""
        with pytest.raises(JoinError) as no:
            uninstall(Home(self.home))
        return str(no.value)

    def run(self, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.home / script), *options],
            capture_output=True,
            text=True,
            cwd="/",
            env=self.environment,
            timeout=60,
        )

    @property
    def identity(self) -> dict[str, Any]:
        return dict(json.loads((self.home / "identity.json").read_text()))


def new_token(trial: Trial, name: str = "", **asked: Any) -> dict[str, Any]:
    return dict(trial.api("POST", "join-tokens", {"name": name, **asked}))


@pytest.mark.timeout(400)
def test_a_machine_joins_by_one_line_runs_a_replica_and_leaves(trial: Trial, tmp_path: Path) -> None:
    machine = Machine(trial, tmp_path, "--sim-gpus", "1:sim", "--name", "box")
    wheels = wheelhouse(tmp_path / "wheels", ROOT / "nodes/agent/requirements.txt")
    machine.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    made = new_token(trial, labels={"zone": "a"})
    assert made["token"] not in made["line"]

    said = machine.paste(made["line"], made["token"])
    assert "Installing the agent" in said
    assert f'This machine is the node "box" of cluster {machine.identity["cluster"]}.' in said
    trial.mark(machine.identity["node"])
    private = {"identity.json": 0o600, "claim": 0o600, "agent.toml": 0o600, "run": 0o700}
    assert {name: stat.S_IMODE((machine.home / name).stat().st_mode) for name in private} == private
    assert holding(machine.home, made["token"]) == []
    (release,) = (machine.home / "releases").iterdir()
    blocked = subprocess.run(
        [release / "venv/bin/python", "-c", "import django"], capture_output=True, cwd=release / "code"
    )
    assert b"No module named 'django'" in blocked.stderr

    # The same line again, with the same token, is the same join: nothing is new, and nothing is installed.
    identity = machine.identity
    again = machine.paste(made["line"], made["token"])
    assert "Installing" not in again
    assert machine.identity == identity
    assert [node["name"] for node in trial.api("GET", "nodes")["results"]] == ["box"]

    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [machine.home / "run"], stdout=log, stderr=log, env=machine.environment, cwd="/"
        )
    try:
        profile = {"name": "p", "engine": "sim", "gpu_class": "sim", "node_selector": {"zone": "a"}}
        scaling = {"min": 1, "max": 1}
        parrot = {"name": "parrot", "source": "sim/parrot", "profiles": [profile], "scaling": scaling}
        trial.api("POST", "models", parrot)
        wait_until(
            lambda: [each["state"] for each in trial.replicas()] == ["ready"],
            "a ready replica on the machine that joined",
            tell=lambda: trial.story() + (tmp_path / "agent.log").read_text(),
            timeout_s=60,
        )
        assert trial.replicas()[0]["node"] == "box"
        checked = machine.run("run", "--check")
        assert checked.returncode == 0, checked.stderr
        assert f"llmgw at {trial.url} knows this node" in checked.stderr
        assert "runs 1 replica; drain it first" in machine.kept_by()

        trial.api("DELETE", "models/parrot")
        wait_until(
            lambda: {each["state"] for each in trial.replicas()} == {"stopped"},
            "the replica to be over",
            tell=trial.story,
            timeout_s=30,
        )
        assert trial.engines() == []
        assert f"runs; stop it (kill {agent.pid}), then run this again." in machine.kept_by()
    finally:
        agent.terminate()
        agent.wait(20)
    assert machine.run("uninstall").returncode == 0
    assert not machine.home.exists()
    trial.api("DELETE", "nodes/box")
    assert "box" not in {node["name"] for node in trial.api("GET", "nodes")["results"]}


def holding(folder: Path, secret: str) -> list[Path]:
    """The files that have it."""
    files = [path for path in folder.rglob("*") if path.is_file() and "venv" not in path.parts]
    return [path for path in files if secret.encode() in path.read_bytes()]


def test_beyond_loopback_an_agent_shows_a_certificate_that_is_known_by_its_checksum(
    trial: Trial, tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    machine = Machine(trial, tmp_path, "--sim-gpus", "1:sim")
    options = ("--listen", f"0.0.0.0:{machine.port}")
    made = new_token(trial, "afar")
    said = machine.join(made["token"], *options)
    assert said.endswith("or add --plain-http where the network is trusted or encrypted.")
    assert machine.join(made["token"], *options, "--plain-http") == ""
    trial.mark(machine.identity["node"])
    node = trial.api("GET", "nodes/afar")
    assert node["address"] == f"https://127.0.0.1:{machine.port}"
    assert node["certificate"] == fingerprint(machine.home / "tls.crt")

    agent = ("agent-afar", "-m", "nodes.agent", "--config", str(machine.home / "agent.toml"))
    trial.start(*agent)
    wait_until(lambda: trial.api("GET", "nodes/afar")["state"] == "fresh", "it to be seen", tell=trial.story)
    trial.kill("agent-afar")

    # Another that answers there is not talked to.
    for file in ("tls.crt", "tls.key"):
        (machine.home / file).unlink()
    assert Home(machine.home).has_certificate()
    trial.start(*agent)
    wait_until(lambda: "shows another certificate" in problem(trial), "the stranger to be noticed")
    trial.kill("agent-afar")


def test_an_agent_whose_engines_are_to_speak_tls_shows_a_certificate_on_loopback_too(
    trial: Trial, tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    machine = Machine(trial, tmp_path)
    assert machine.join(new_token(trial, "near")["token"], "--engine-tls") == ""
    node = trial.api("GET", "nodes/near")
    assert node["address"] == f"https://127.0.0.1:{machine.port}"
    assert node["certificate"] == fingerprint(machine.home / "tls.crt")
    assert "engine_tls = true" in (machine.home / "agent.toml").read_text().splitlines()


def fingerprint(certificate: Path) -> str:
    """As openssl has it."""
    words = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", str(certificate)]
    shown = subprocess.run(words, capture_output=True, text=True).stdout
    return shown.partition("=")[2].strip().replace(":", "").lower()


def problem(trial: Trial) -> str:
    return str(trial.api("GET", "nodes/afar")["problem"])


# --- what can be wrong ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def joined(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine that is the node "here", by a token that is used up."""
    machine = Machine(trial, tmp_path_factory.mktemp("joined"))
    assert machine.join(new_token(trial, "here")["token"]) == ""
    return machine


Refused = tuple[tuple[str, ...], Mapping[str, str], str]
REFUSED: dict[str, Refused] = {
    "a name that is another node's": (("--name", "here"), {}, 'There is a node "here" already'),
    "a name that no node can have": (("--name", "join"), {}, 'A node cannot be called "join"'),
    "an address that is none": (("--address", "nowhere"), {}, "is no address of an agent"),
    "an option that follows from the folder": (("--state", "/x"), {}, "--state follows from --home"),
    "a label without a value": (("--label", "zone"), {}, "write NAME=VALUE"),
    "an engine that is not there": (("--engine", "vllm=/nowhere"), {}, "there is no such program to run"),
    "half of a certificate": (("--tls-certificate", "/x"), {}, "--tls-certificate and --tls-key go together"),
    "a variable that stands for nothing": ((), {"LLMGW_AGENT_X": "1"}, "LLMGW_AGENT_X stands for no option"),
    "a control plane that is away": (("--control-plane", "http://127.0.0.1:9"), {}, "cannot be reached"),
    "a control plane that would hear the token in the clear": (
        ("--control-plane", "http://llmgw.example"), {}, "would send this node's token over the network",
    ),
    "a control plane that is something else": (
        ("--control-plane", "https://llmgw.example/x"), {}, "write scheme and host",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "environment", "words"), REFUSED.values(), ids=REFUSED)
def test_a_join_that_cannot_be_says_why_and_uses_nothing_up(
    trial: Trial,
    joined: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    environment: Mapping[str, str],
    words: str,
) -> None:
    machine, made = Machine(trial, tmp_path), new_token(trial)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = machine.join(made["token"], *options)
    assert words in said
    assert (len(said.splitlines()), said[-1]) == (1, ".")
    assert not (machine.home / "identity.json").exists()
    assert trial.api("GET", f"join-tokens/{made['id']}")["state"] == "live"


def test_a_port_that_is_taken_is_told_before_anything_is_used_up(trial: Trial, tmp_path: Path) -> None:
    machine, made = Machine(trial, tmp_path), new_token(trial)
    with socket.create_server(("127.0.0.1", machine.port)):
        said = machine.join(made["token"])
    assert said == (
        f"The agent cannot listen on 127.0.0.1:{machine.port} (Address already in use); give another address "
        "or port with --listen."
    )
    assert trial.api("GET", f"join-tokens/{made['id']}")["state"] == "live"


def test_an_agent_listens_where_the_control_plane_was_reached_from(trial: Trial, tmp_path: Path) -> None:
    machine, made = Machine(trial, tmp_path), new_token(trial, "by-itself")
    machine.port = 0
    said = machine.join(made["token"])
    where = "127.0.0.1:8378"
    if said:  # somebody else has that port on this machine
        assert f"The agent cannot listen on {where}" in said
    else:
        assert f'listen = "{where}"' in (machine.home / "agent.toml").read_text()
        assert trial.api("GET", "nodes/by-itself")["address"] == f"http://{where}"


def test_a_token_that_another_machine_has_used_opens_nothing(
    trial: Trial, joined: Machine, tmp_path: Path
) -> None:
    made = new_token(trial, "here")
    assert joined.join(made["token"]) == ""
    assert joined.join(made["token"]) == "", "the same machine again"
    assert "This join token was used already, by here; make a new one" in Machine(trial, tmp_path).join(
        made["token"]
    )
    assert "This is no join token" in Machine(trial, tmp_path).join("llmgw_x")


def test_what_the_operator_wrote_into_the_file_stays(trial: Trial, joined: Machine) -> None:
    file = joined.home / "agent.toml"
    file.write_text(f'{file.read_text()}\n[label]\nrack = "7"\n')
    assert joined.join(new_token(trial, "here")["token"]) == ""
    assert 'rack = "7"' in file.read_text()
    said = joined.join(new_token(trial, "here")["token"], "--fabric", "ib0")
    assert 'has no fabric = "ib0" as this line says; edit it' in said


def test_a_node_of_another_cluster_stays_there(trial: Trial, tmp_path: Path) -> None:
    machine = Machine(trial, tmp_path)
    assert machine.join(new_token(trial, "there")["token"]) == ""
    identity = machine.identity | {"cluster": "c1000000-0000-4000-8000-000000000001"}
    (machine.home / "identity.json").write_text(json.dumps(identity))
    said = machine.join(new_token(trial)["token"])
    assert "This machine is a node of another cluster; take that agent off first" in said
    assert machine.identity == identity


# --- before there is anything to run it with --------------------------------------------------------------


def run_bundle(folder: Path, *before: str, **environment: str) -> str:
    """What it says where nothing can be installed."""
    file = folder / "agent.pyz"
    file.write_bytes(bundle().content)
    done = subprocess.run(
        [
            sys.executable,
            *(before or (str(file),)),
            "--control-plane",
            "http://x",
            "--home",
            str(folder / "h"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        timeout=100,
    )
    assert done.returncode == 1
    return done.stderr.strip()


def test_a_python_that_is_too_old_is_told(tmp_path: Path) -> None:
    old = "import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path('agent.pyz', run_name='__main__')"
    assert run_bundle(tmp_path, "-c", old) == (
        "The agent needs Python 3.11 or newer, and this is 3.9; run the line with a newer one, such as "
        "python3.11."
    )


def test_a_python_without_virtual_environments_is_told(tmp_path: Path) -> None:
    (tmp_path / "venv.py").write_text("raise SystemExit('ensurepip is not available')")
    said = run_bundle(tmp_path, PYTHONPATH=str(tmp_path))
    assert "makes no virtual environment (ensurepip is not available); install what it lacks" in said


def test_a_pip_that_finds_no_package_is_told(tmp_path: Path) -> None:
    """A stand-in for the environment, whose pip is the real one of this python."""
    (tmp_path / "venv.py").write_text(
        "import pathlib, sys\n"
        "program = pathlib.Path(sys.argv[1], 'bin', 'python')\n"
        "program.parent.mkdir(parents=True)\n"
        "program.symlink_to(sys.executable)\n"
    )
    said = run_bundle(tmp_path, PYTHONPATH=str(tmp_path), PIP_NO_INDEX="1", PIP_TARGET=str(tmp_path / "t"))
    assert re.search(r"pip could not install what the agent imports \(.+\); if this machine reaches no", said)
    assert not list(tmp_path.glob("h/releases/*/complete"))


def test_a_line_that_is_older_than_the_code_says_so(trial: Trial, tmp_path: Path) -> None:
    made = new_token(trial)
    line = made["line"].replace(bundle().sha256, "0" * 64)
    done = subprocess.run(
        ["sh", "-c", line], input=made["token"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (
        1, "The code is another one than this line tells of; have the line printed again.",
    )  # fmt: skip


def test_the_line_tells_a_refusal_in_its_own_sentence(trial: Trial, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", new_token(trial)["line"]], input="llmgw_x", capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("This is no join token; give the one that was printed with the line")
