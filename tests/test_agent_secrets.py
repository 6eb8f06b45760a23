"""What `secret:NAME` in a profile's environment stands for: on the node alone, for the engine alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.secrets import SecretError, Secrets, open_folder
from tests.agent_process import AgentProcess, assignment

VALUE = "the-planted-value"


def secret_file(folder: Path, name: str = "TOKEN", content: str = VALUE, mode: int = 0o600) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(content)
    path.chmod(mode)
    return path


def environ_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def everything_told(agent: AgentProcess, replica: str) -> str:
    """What the agent says, writes and keeps, and the engine's command line."""
    [rank] = [each for each in agent.state()["ranks"] if each["replica"] == replica]
    told = json.dumps(agent.state()) + Path(f"/proc/{rank['pid']}/cmdline").read_text()
    told += agent.ask("GET", f"/v1/replicas/{replica}/log").body.decode()
    kept = [path for path in agent.folder.rglob("*") if path.is_file() and "secrets" not in path.parts]
    return told + "".join(path.read_text(errors="replace") for path in kept)


@pytest.mark.parametrize("place", ["environment", "folder"])
def test_a_secret_reaches_the_engines_environment_and_nothing_else(tmp_path: Path, place: str) -> None:
    secret_file(tmp_path / "secrets", content="" if place == "environment" else f"{VALUE}\n")
    environment = (
        {"LLMGW_SECRET_TOKEN": VALUE, "LLMGW_SECRET": "no-secret-of-this"} if place == "environment" else {}
    )
    with AgentProcess(tmp_path, f"--secrets={tmp_path / 'secrets'}", environment=environment) as agent:
        rank = agent.run(env={"HF_TOKEN": "secret:TOKEN", "THREADS": "2"})
        environ, told = environ_of(rank["pid"]), everything_told(agent, rank["replica"])
    assert {f"HF_TOKEN={VALUE}", "THREADS=2"} <= set(environ)
    assert [entry for entry in environ if VALUE in entry] == [f"HF_TOKEN={VALUE}"]
    assert not any("no-secret-of-this" in entry for entry in environ)
    assert VALUE not in told
    assert rank["launch"]["profile"]["env"]["HF_TOKEN"] == "secret:TOKEN"


def test_a_secret_that_is_not_there_waits_for_another_node(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, environment={"LLMGW_SECRET": "x"}) as agent:
        wanted = assignment(env={"HF_TOKEN": "secret:TOKEN"})
        agent.put(wanted)
        failed = agent.wait_for(wanted["replica"], "failed")
    assert (failed["cause"], failed["kind"]) == ("no_secret", "node")
    assert failed["reason"] == (
        "env HF_TOKEN wants the secret TOKEN, which this node does not have; give it to the agent as "
        "LLMGW_SECRET_TOKEN or as a file in a folder of --secrets."
    )
    assert agent.engines() == []


def linked(folder: Path) -> None:
    (folder / "TOKEN").symlink_to(secret_file(folder.parent / "elsewhere"))


UNREADABLE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a file that others may read": (lambda at: secret_file(at, mode=0o640), "secret:TOKEN", "run `chmod 600"),
    "a link": (linked, "secret:TOKEN", "cannot be read: Too many levels of symbolic links"),
    "a folder": (lambda at: (at / "TOKEN").mkdir(), "secret:TOKEN", "is not a file"),
    "a pipe": (lambda at: os.mkfifo(at / "TOKEN", 0o600), "secret:TOKEN", "is not a file"),
    "nothing in it": (lambda at: secret_file(at, content="\n"), "secret:TOKEN", "does not have"),
    "no text": (lambda at: secret_file(at, content="a\0b"), "secret:TOKEN", "is no text"),
    "no end": (lambda at: secret_file(at, content="x" * 70_000), "secret:TOKEN", "is no text of at most"),
    "no such file": (lambda at: None, "secret:TOKEN", "or as a file in"),
    "a way out of the folder": (lambda at: secret_file(at.parent), "secret:../TOKEN", "is no reference"),
    "no name": (lambda at: None, "secret:", "is no reference"),
}


@pytest.mark.parametrize(("make", "reference", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_secret_is_refused_in_one_sentence(
    tmp_path: Path, make: Callable[[Path], object], reference: str, words: str
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    make(folder)
    with pytest.raises(SecretError) as refused:
        Secrets({}, folder).resolve({"HF_TOKEN": reference})
    assert words in str(refused.value)
    assert str(refused.value).endswith(".")
    assert VALUE not in str(refused.value)


def test_a_folder_of_secrets_that_is_not_there_keeps_the_agent_from_starting(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="nowhere is not a folder"):
        open_folder(tmp_path / "nowhere")


def test_what_is_known_of_secrets_is_not_printed() -> None:
    assert VALUE not in repr(Secrets({"LLMGW_SECRET_TOKEN": VALUE}))


@given(st.text(max_size=70), st.text(max_size=10))
def test_no_name_reaches_another_variable_or_file(name: str, variable: str) -> None:
    """Whatever is written after secret:, only the variable of that very name can answer."""
    environment = {"LLMGW_SECRET": VALUE, "HF_TOKEN": VALUE, "LLMGW_SECRET_": VALUE, variable: VALUE}
    try:
        value = Secrets(environment).resolve({"X": f"secret:{name}"})["X"]
    except SecretError:
        return
    assert (value, variable) == (VALUE, f"LLMGW_SECRET_{name}")
