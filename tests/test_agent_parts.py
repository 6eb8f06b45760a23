"""The agent's parts alone: how it starts, what it keeps, which ports it gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.configuration import (
    parse_listen,
    parse_port_range,
    parse_time_s,
    read_identity,
)
from nodes.agent.inventory import InventoryError, find_engines
from nodes.agent.logs import KEPT_BYTES, LIMIT_BYTES, bound_log, read_tail
from nodes.agent.options import ConfigurationError, parse_pairs
from nodes.agent.ports import PortError, check_port_range, find_port
from nodes.agent.state import LOGS_LIMIT, TOMBSTONES_LIMIT, Record, StateError, StateFolder
from nodes.protocol import Assignment, Launch
from tests.agent_process import CLUSTER, ROOT
from tests.services import free_port

NODE = "00000000-0000-4000-8000-00000000000d"
REPLICA = "00000000-0000-4000-8000-000000000001"
IDENTITY = {"cluster": CLUSTER, "node": NODE, "name": "n", "token": "t"}


# --- how it starts --------------------------------------------------------------------------------------


def identity_file(tmp_path: Path, content: str, mode: int = 0o600) -> Path:
    path = tmp_path / "identity.json"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_an_identity_is_read(tmp_path: Path) -> None:
    identity = read_identity(identity_file(tmp_path, json.dumps({**IDENTITY, "later": "field"})))
    assert (identity.cluster, identity.node, identity.name, identity.token) == (CLUSTER, NODE, "n", "t")


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        pytest.param(json.dumps(IDENTITY), 0o644, "others may read it; run `chmod 600", id="open to all"),
        pytest.param(json.dumps(IDENTITY), 0o640, "others may read it", id="open to a group"),
        pytest.param("{", 0o600, "is not a JSON object", id="no JSON"),
        pytest.param("[1]", 0o600, "is not a JSON object", id="no object"),
        pytest.param(
            json.dumps({"cluster": CLUSTER}), 0o600, "with cluster, node, name and token", id="half"
        ),
        pytest.param(json.dumps({**IDENTITY, "node": "x"}), 0o600, "must be UUIDs", id="a node that is none"),
        pytest.param(json.dumps({**IDENTITY, "token": ""}), 0o600, "token not empty", id="no token"),
    ],
)
def test_an_identity_is_refused(tmp_path: Path, content: str, mode: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_identity(identity_file(tmp_path, content, mode))


def test_a_missing_identity_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere cannot be read: No such file"):
        read_identity(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "is_plain_allowed", "address"),
    [
        ("127.0.0.1:80", False, ("127.0.0.1", 80)),
        ("localhost:8378", False, ("127.0.0.1", 8378)),
        ("[::1]:8378", False, ("::1", 8378)),
        ("10.0.0.7:8378", True, ("10.0.0.7", 8378)),
    ],
    ids=str,
)
def test_an_address_is_read(text: str, is_plain_allowed: bool, address: tuple[str, int]) -> None:
    assert parse_listen(text, is_plain_allowed=is_plain_allowed) == address


REFUSED_OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "plain HTTP on a network": (
        lambda: parse_listen("10.0.0.7:1", is_plain_allowed=False),
        "add --plain-http",
    ),
    "plain HTTP everywhere": (lambda: parse_listen("0.0.0.0:1", is_plain_allowed=False), "add --plain-http"),
    "a name for an address": (lambda: parse_listen("gpu7:1", is_plain_allowed=True), "an address and a port"),
    "an address alone": (lambda: parse_listen("127.0.0.1", is_plain_allowed=True), "an address and a port"),
    "a port beyond all": (lambda: parse_listen("127.0.0.1:70000", is_plain_allowed=True), "from 1 to 65535"),
    "ports that are none": (lambda: parse_port_range("many"), "write two ports"),
    "ports back to front": (lambda: parse_port_range("19000-18000"), "write two ports"),
    "ports of the system": (lambda: parse_port_range("80-90"), "write two ports"),
    "a label without a value": (lambda: parse_pairs("--label", ["zone"]), "--label zone: write NAME=VALUE"),
    "a grace that is no duration": (
        lambda: parse_time_s("--stop-grace", "soon"),
        "--stop-grace soon must be a duration",
    ),
    "a grace that is too short": (
        lambda: parse_time_s("--stuck-after", "1s", least_s=5),
        "--stuck-after 1s is too short; give 5s or more",
    ),
    "an engine nobody knows": (lambda: find_engines({"tgi": ["/x"]}), "there is no such engine"),
    "an engine that the agent brings along": (
        lambda: find_engines({"sim": ["/x"]}),
        "no such engine to be given; choose from vllm, sglang, llamacpp",
    ),
    "an engine that is not there": (lambda: find_engines({"llamacpp": ["/x/y"]}), "no such program"),
}


def test_an_engine_that_is_asked_for_its_version_sees_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = tmp_path / "llama-server"
    program.write_text('#!/bin/sh\necho "version: 7 token=$HF_TOKEN path=${PATH:+given}"\n')
    program.chmod(0o755)
    assert find_engines({"llamacpp": [str(program)]})["llamacpp"].version == "7 token= path=given"


@pytest.mark.parametrize(("parse", "words"), REFUSED_OPTIONS.values(), ids=REFUSED_OPTIONS)
def test_an_option_is_refused_in_one_sentence(parse: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigurationError, InventoryError), match=words) as refused:
        parse()
    assert str(refused.value).endswith(".")


def test_what_keeps_an_agent_from_starting_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    identity = identity_file(tmp_path, json.dumps(IDENTITY))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        listen = f"127.0.0.1:{busy.getsockname()[1]}"
        agent = subprocess.run(
            [
                sys.executable,
                "-m",
                "nodes.agent",
                "--identity",
                identity,
                "--state",
                tmp_path,
                "--listen",
                listen,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert agent.returncode == 1
    assert agent.stderr.startswith(f"--listen {listen} is not to be had (Address already in use)")
    assert agent.stderr.count("\n") == 1


def test_an_agent_runs_without_django(tmp_path: Path) -> None:
    code = "import sys; sys.modules['django'] = None; import nodes.agent.__main__, nodes.agent.sim.__main__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


# --- ports ----------------------------------------------------------------------------------------------


def is_free(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) != 0


def test_ports_are_given_in_turn_and_never_one_that_is_in_use() -> None:
    first = next(port for port in range(9_000, 11_000, 6) if all(map(is_free, range(port, port + 6))))
    with socket.create_server(("127.0.0.1", first + 1)):
        given = [
            find_port("127.0.0.1", first, first + 5, start=start, taken={first + 2})
            for start in (0, first + 1, first + 4, first + 6)
        ]
    assert given == [first, first + 3, first + 4, first]


def test_when_no_port_is_free_it_is_said() -> None:
    port = free_port()
    with pytest.raises(PortError, match=f"No port from {port} to {port} is free"):
        find_port("127.0.0.1", port, port, start=port, taken={port})
    with pytest.raises(PortError, match=r"Engines cannot listen on 203\.0\.113\.1"):
        find_port("203.0.113.1", port, port, start=port, taken=set())


def test_ephemeral_ports_are_not_given_to_engines() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for first, last in ((low, high), (low - 10, low), (high, high), (low + 1, low + 2)):
        with pytest.raises(PortError, match="overlaps the ephemeral ports"):
            check_port_range(first, last)
    check_port_range(low - 10, low - 1)


# --- what it keeps --------------------------------------------------------------------------------------


def record(replica: str = REPLICA) -> Record:
    launch = Launch("m", "s", {"engine": "sim", "args": ["--x"]}, context_length=7)
    return Record(
        Assignment(CLUSTER, replica, 3, 9, launch, "k" * 20, ("sim-0",)), port=18000, command=("a", "b")
    )


def test_a_record_survives_as_it_was_and_is_nobody_elses_to_read(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path / "state")
    folder.save(record())
    folder.raise_fence(5)
    folder.raise_fence(4)
    folder.bury("gone", 2)
    folder.bury("gone", 1)
    folder.close()
    again = StateFolder.open(tmp_path / "state")
    assert again.records() == [record()]
    assert again.ledger.fence == 5
    stone = again.tombstone("gone")
    assert stone is not None
    assert stone.generation == 2
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in files) == [f"{REPLICA}.json", "agent.json", "lock"]
    again.close()


def test_tombstones_are_bounded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path)
    stones = {
        str(number): {"generation": 1, "boot": "b", "since_s": 0.0} for number in range(TOMBSTONES_LIMIT)
    }
    folder.close()
    (tmp_path / "agent.json").write_text(json.dumps({"tombstones": stones}))
    folder = StateFolder.open(tmp_path)
    folder.bury("newest", 1)
    assert folder.tombstone("newest")
    assert folder.tombstone("0") is None
    assert folder.tombstone("1") is not None, "a reboot does not end the week"
    folder.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="file/state cannot be used: Not a directory"):
        StateFolder.open(tmp_path / "file" / "state")


def test_a_record_that_cannot_be_read_is_named_and_not_passed_over(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path)
    (tmp_path / "replicas" / f"{REPLICA}.json").mkdir()
    with pytest.raises(StateError, match=f"{REPLICA}.json cannot be read: Is a directory"):
        folder.records()
    folder.close()


def test_a_failed_write_leaves_the_old_record_and_no_draft(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path)
    folder.save(record())
    broken = Record(record().assignment, command=(object(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        folder.save(broken)
    assert folder.records() == [record()]
    assert os.listdir(tmp_path / "replicas") == [f"{REPLICA}.json"]
    folder.close()


def test_a_draft_that_a_killed_agent_left_is_swept_away(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path)
    folder.save(record())
    folder.close()
    for left in (tmp_path / ".draft-agent.json.x1", tmp_path / "replicas" / f".draft-{REPLICA}.json.x2"):
        left.write_text('{"half": ')
    folder = StateFolder.open(tmp_path)
    assert folder.records() == [record()]
    assert not list(tmp_path.rglob(".*"))
    folder.close()


def test_logs_of_the_dead_are_bounded_in_number(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path)
    names = [f"00000000-0000-4000-8000-{number:012d}" for number in range(LOGS_LIMIT + 5)]
    for age, name in enumerate(names):
        path = folder.log_path(name, 1)
        path.touch()
        os.utime(path, (10**9 - age, 10**9 - age))
    folder.prune_logs({names[-1]})
    left = {path.name[:36] for path in (tmp_path / "logs").iterdir()}
    assert left == {*names[:LOGS_LIMIT], names[-1]}
    folder.close()


def test_the_logs_of_the_last_attempts_are_kept(tmp_path: Path) -> None:
    folder = StateFolder.open(tmp_path)
    assert folder.next_attempt(record()) == 1
    for attempt in (9, 10, 2, 11, 4, 12):
        folder.log_path(REPLICA, attempt).touch()
    assert folder.last_attempt(REPLICA) == 12
    assert folder.next_attempt(record()) == 13
    assert [*folder.logs(REPLICA)] == [12, 11, 10, 9], "the thirteenth is the fifth that is kept"
    folder.close()


def test_a_log_that_grows_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab") as engine:
        engine.write(b"x" * LIMIT_BYTES + b"the end\n")
        engine.flush()
        bound_log(path)
        engine.write(b"and more\n")
    assert path.stat().st_size < 2 * KEPT_BYTES
    assert path.read_bytes().startswith(b"[the agent cut this log here]\n")
    assert read_tail(path, 17) == b"the end\nand more\n"
    assert read_tail(tmp_path / "none") == b""


def test_a_log_that_cannot_be_cut_is_left_alone(tmp_path: Path) -> None:
    bound_log(tmp_path / ("x" * 300))  # a name that no disk takes
