"""What an agent is told by flags, environment and a file; engines that are started by words of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.configuration import Configuration, configure
from nodes.agent.inventory import InventoryError, find_engines
from nodes.agent.options import OPTIONS, ConfigurationError
from nodes.agent.paths import is_outside
from tests.agent_process import CLUSTER, KEY, ROOT, AgentProcess, assignment
from tests.engine_stand_in import stand_in

NODE = "00000000-0000-4000-8000-00000000000d"


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., Configuration]:
    """What comes of a file, an environment and flags, for an agent that has an identity."""
    identity = tmp_path / "identity.json"
    identity.touch(0o600)
    identity.write_text(json.dumps({"cluster": CLUSTER, "node": NODE, "name": "n", "token": "t"}))

    def configured(
        *flags: str, file: str | None = None, environment: Mapping[str, str] | None = None
    ) -> Configuration:
        needed = ["--identity", str(identity), "--state", str(tmp_path / "state")]
        if file is not None:
            (tmp_path / "agent.toml").write_text(file)
            needed += ["--config", str(tmp_path / "agent.toml")]
        configuration, is_check = configure([*needed, *flags], environment or {})
        assert not is_check
        return configuration

    return configured


FILE = """
listen = "127.0.0.1:1111"
port_range = "17000-17009"
plain_http = true
stop_grace = "1m"
allow_arg = ["--a"]

[engine]
vllm = "podman run --rm {env} 'an image'"
sglang = ["nice", "-n", "5", "/opt/with space/sglang"]

[label]
zone = "a"
rack = "7"

[gpu_class]
"NVIDIA H100 80GB HBM3" = "big"
"""


def test_a_file_tells_all_that_flags_can(told: Callable[..., Configuration], tmp_path: Path) -> None:
    found = told(file=FILE)
    assert (found.address, found.port, found.ports) == ("127.0.0.1", 1111, (17000, 17009))
    assert (found.stop_grace_s, found.stuck_after_s) == (60.0, 15.0)
    assert found.allowed_args == {"--a"}
    assert found.engines == {
        "vllm": ("podman", "run", "--rm", "{env}", "an image"),
        "sglang": ("nice", "-n", "5", "/opt/with space/sglang"),
    }
    assert found.labels == {"zone": "a", "rack": "7"}
    assert found.gpu_classes == {"nvidia h100 80gb hbm3": "big"}
    assert found.store == tmp_path / "state" / "weights"


def test_flags_are_stronger_than_the_environment_and_that_than_the_file(
    told: Callable[..., Configuration],
) -> None:
    environment = {
        "LLMGW_AGENT_LISTEN": "127.0.0.1:2222",
        "LLMGW_AGENT_LABEL": "zone=b; shelf=1",
        "LLMGW_AGENT_ALLOW_ARG": "--b;--c",
        "LLMGW_AGENT_PLAIN_HTTP": "0",
    }
    assert told(file=FILE, environment=environment).port == 2222
    found = told("--listen=127.0.0.1:3333", "--label=shelf=2", file=FILE, environment=environment)
    assert found.port == 3333
    assert found.labels == {"zone": "b", "rack": "7", "shelf": "2"}
    assert found.allowed_args == {"--a", "--b", "--c"}
    with pytest.raises(ConfigurationError, match="add --plain-http"):
        told("--listen=10.0.0.7:1", file=FILE, environment=environment)


def test_the_environment_names_the_file(told: Callable[..., Configuration], tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('fabric = "ib0"')
    found = told(environment={"LLMGW_AGENT_CONFIG": str(tmp_path / "other.toml")})
    assert (found.fabric, found.runs_gangs) == ("ib0", True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a file that is not there": (
        {"environment": {"LLMGW_AGENT_CONFIG": "/nowhere"}}, "--config /nowhere cannot be read: No such file",
    ),
    "a file that is no TOML": ({"file": "listen ="}, "is not TOML"),
    "an option nobody knows": ({"file": "lable = 1"}, r"there is no option lable; did you mean label\?"),
    "a variable nobody knows": (
        {"environment": {"LLMGW_AGENT_FABRICS": "x"}},
        r"LLMGW_AGENT_FABRICS stands for no option; did you mean LLMGW_AGENT_FABRIC\?",
    ),
    "a number for a text": ({"file": "listen = 8378"}, "listen must be a text"),
    "a text for yes": ({"file": 'plain_http = "yes"'}, "plain_http must be true or false"),
    "a word for yes": ({"environment": {"LLMGW_AGENT_PLAIN_HTTP": "yes"}}, "write 1 or 0"),
    "a text for a list": ({"file": 'allow_arg = "--a"'}, "allow_arg must be a list of texts"),
    "a list for a table": ({"file": 'label = ["a=b"]'}, "label must be a table of texts"),
    "a number in a table": ({"file": "label = {a = 1}"}, "label.a must be a text"),
    "a command of no words": ({"file": 'engine = {vllm = ""}'}, "names no program"),
    "a command without its last quote": ({"file": "engine = {vllm = \"podman 'run\"}"}, "correct the quotes"),
    "a fabric's address that is a name": ({"file": 'fabric_address = "gpu7"'}, "write an IP address"),
    "a fabric's address that is all": ({"file": 'fabric_address = "0.0.0.0"'}, "is no place to meet"),
    "a root that is no folder": ({"file": 'root = ["/nowhere"]'}, "--root /nowhere is not a folder"),
    "a root that is relative": ({"file": 'root = ["."]'}, r"--root \. is not a folder with an absolute path"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    told: Callable[..., Configuration], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as refused:
        told(**given)
    assert str(refused.value).endswith(".")


def test_what_an_agent_cannot_do_without_is_named() -> None:
    with pytest.raises(ConfigurationError, match="The agent needs --identity; see --help"):
        configure([], {})


@pytest.mark.parametrize(
    ("options", "runs_gangs"),
    [
        ((), False),
        (("--fabric=ib0",), True),
        (("--fabric=ib0", "--listen=0.0.0.0:1", "--plain-http"), False),
        (("--fabric=ib0", "--listen=0.0.0.0:1", "--plain-http", "--fabric-address=10.1.0.7"), True),
    ],
    ids=["in no fabric", "in one", "in one, listening everywhere", "with an address in it"],
)
def test_parts_of_a_replica_run_where_others_can_reach_them(
    told: Callable[..., Configuration], options: tuple[str, ...], runs_gangs: bool
) -> None:
    assert told(*options).runs_gangs is runs_gangs


def test_help_names_every_option() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nodes.agent", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert all(option.flag in done.stdout for option in OPTIONS)


# --- the check ------------------------------------------------------------------------------------------


def check(agent: AgentProcess, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*agent.command, "--check", *options], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_check_prints_what_would_be_told_and_touches_nothing(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, "--label", "zone=a") as agent:
        before = {path: path.read_bytes() for path in agent.state_folder.rglob("*") if path.is_file()}
        done = check(agent)
        told = json.loads(done.stdout)
        running = agent.state()
        assert {path: path.read_bytes() for path in before} == before
    assert done.returncode == 0
    for name in ("cluster", "node", "boot_id", "gpus", "engines", "labels", "memory_total_mib"):
        assert told[name] == running[name]
    assert "ranks" not in told


def test_a_check_that_fails_is_one_sentence(tmp_path: Path) -> None:
    done = check(AgentProcess(tmp_path), "--engine", "vllm=/nowhere/vllm")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "--engine vllm=/nowhere/vllm: there is no such program to run.\n"


# --- words of one's own ---------------------------------------------------------------------------------

PODMAN = """#!{python}
# As `podman run` does: of its own environment, what it is told by name is all that gets in.
import os, sys
words = sys.argv[1:]
assert words.pop(0) == "run", words
environment = {{"PATH": os.environ["PATH"]}}
while (word := words.pop(0)).startswith("--"):
    value = words.pop(0)
    if word == "--env":
        assert "=" not in value, "no value may stand on a command line"
        environment[value] = os.environ[value]
    else:
        print(f"podman: {{word}} {{value}}", flush=True)
assert word == "an image", word
os.execve({program!r}, [{program!r}, *words], environment)
"""


def test_an_engine_runs_in_a_container_by_words_of_the_nodes_own(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text(PODMAN.format(python=sys.executable, program=stand_in(tmp_path, "vllm")))
    podman.chmod(0o700)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").touch()
    template = (
        f"vllm={podman} run {{env}} --name {{name}} --device nvidia.com/gpu={{gpus}} "
        f"--volume {{model}}:{{model}}:ro --volume {{checkout}}:{{checkout}}:ro 'an image'"
    )
    with AgentProcess(tmp_path, "--engine", template) as agent:
        wanted = assignment(engine="vllm", source=str(weights), env={"GREETING": "hello"})
        agent.put(wanted)
        rank = agent.wait_for(wanted["replica"], "ready")
        assert rank["command"][:2] == [str(podman), "run"]
        environ = Path(f"/proc/{rank['pid']}/environ").read_bytes().decode().split("\0")
        assert {f"VLLM_API_KEY={KEY}", "GREETING=hello", f"LLMGW_NODE={agent.node}"} <= set(environ)
        log = agent.ask("GET", f"/v1/replicas/{rank['replica']}/log").body.decode()
        assert f"podman: --name llmgw-{rank['replica']}-1-0\n" in log
        assert "podman: --device nvidia.com/gpu=sim-0\n" in log
        assert f"podman: --volume {weights}:{weights}:ro\n" in log
        assert KEY not in json.dumps(agent.state()) + log
        agent.delete(rank["replica"])
        agent.wait_for(rank["replica"], "stopped")
        assert agent.engines() == []


def test_a_wrapper_is_asked_for_the_version_of_what_it_runs(tmp_path: Path) -> None:
    engine = tmp_path / "llama-server"
    engine.write_text('#!/bin/sh\necho "version: 7"\n')
    engine.chmod(0o700)
    found = find_engines({"llamacpp": ["env", "GREETING=hello", str(engine)]})["llamacpp"]
    assert found.version == "7"
    assert os.path.isabs(found.words[0])
    assert find_engines({"llamacpp": [str(engine), "{gpus}"]})["llamacpp"].version == ""


@pytest.mark.parametrize("word", ["{image}", "--env={env}", "{Model}"])
def test_a_place_that_nothing_is_put_into_is_refused(word: str) -> None:
    with pytest.raises(InventoryError, match=r"stands for nothing; of \{env\}, \{gpus\}"):
        find_engines({"llamacpp": ["env", word]})


# --- roots ----------------------------------------------------------------------------------------------


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models-of-others").mkdir()
    (tmp_path / "models" / "out").symlink_to(tmp_path / "models-of-others")
    (tmp_path / "in").symlink_to(tmp_path / "models")
    return [str(tmp_path / "models")]


@pytest.mark.parametrize(
    ("path", "outside"),
    [
        ("models", False),
        ("models/m", False),
        ("models/m/../m", False),
        ("models/nowhere", False),
        ("in/m", False),
        ("models/m/../..", True),
        ("models/out", True),
        ("models/out/x.gguf", True),
        ("models-of-others", True),
        ("", True),
        ("models/m/../../../../../../../../etc/passwd", True),
    ],
)
def test_a_path_may_not_lead_out_of_the_roots(
    tmp_path: Path, roots: list[str], path: str, outside: bool
) -> None:
    assert is_outside(f"{tmp_path}/{path}", roots) is outside
    assert not is_outside(f"{tmp_path}/{path}", [])


def test_a_node_tells_and_runs_nothing_outside_its_roots(tmp_path: Path, roots: list[str]) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    (tmp_path / "models-of-others" / "x.gguf").touch()
    source = f"{roots[0]}/out/x.gguf"
    with AgentProcess(tmp_path, "--root", roots[0], "--engine", f"llamacpp={program} {{gpus}}") as agent:
        (report,) = agent.ask("POST", "/v1/paths", body={"paths": [source]}).json["paths"]
        assert (report["exists"], "outside the folders" in report["reason"]) == (False, True)
        wanted = assignment(engine="llamacpp", source=source)
        agent.put(wanted)
        failed = agent.wait_for(wanted["replica"], "failed")
        assert (failed["cause"], failed["kind"]) == ("path_refused", "node")
        assert failed["reason"].endswith("start its agent with another --root.")
        assert agent.engines() == []
