"""Engines that answer over TLS alone, because their agent was told so."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.__main__ import open_session
from nodes.agent.configuration import Configuration
from nodes.agent.home import Home
from nodes.agent.inventory import FoundEngine, InventoryError, find_engines
from nodes.agent.options import ConfigurationError
from nodes.agent.probes import Probe
from nodes.agent.sim.__main__ import serve
from nodes.agent.sim.options import read_options
from nodes.certificates import checksum_of, is_checksum
from nodes.engines import ENGINES, RenderError, Seat, render
from nodes.protocol import Launch, RankReport, read, to_json
from tests.agent_process import KEY, AgentProcess, ask, assignment, llama_server
from tests.engine_stand_in import stand_in
from tests.test_agent_configuration import PODMAN, told

__all__ = ["told"]  # a fixture

pytestmark = pytest.mark.one_database


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """With a certificate that a join has made."""
    return a_home(tmp_path_factory.mktemp("home"))


def a_home(folder: Path) -> Home:
    home = Home(folder)
    if not home.has_certificate():
        pytest.skip("no openssl")
    return home


# --- what is told -----------------------------------------------------------------------------------------


def shown(home: Home) -> tuple[str, ...]:
    return ("--tls-certificate", str(home.certificate), "--tls-key", str(home.key))


def test_an_agent_whose_engines_speak_tls_may_listen_beyond_loopback(
    told: Callable[..., Configuration], home: Home
) -> None:
    assert not told("--listen=0.0.0.0:1", "--plain-http").engine_tls
    file = f'engine_tls = true\ntls_certificate = "{home.certificate}"\ntls_key = "{home.key}"\n'
    for found in (
        told("--listen=0.0.0.0:1", "--engine-tls", *shown(home)),
        told("--listen=0.0.0.0:1", file=file),
        told("--listen=0.0.0.0:1", *shown(home), environment={"LLMGW_AGENT_ENGINE_TLS": "1"}),
    ):
        assert (found.engine_tls, found.tls) == (True, (home.certificate, home.key))
    with pytest.raises(ConfigurationError, match="would send this node's token over the network unencrypted"):
        told("--engine-tls", *shown(home), "--control-plane=http://llmgw.example")


def test_engines_that_have_nothing_to_show_are_refused(
    told: Callable[..., Configuration], home: Home, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as no:
        told("--engine-tls")
    assert str(no.value) == (
        "--engine-tls has no certificate that engines could show; give --tls-certificate and --tls-key, or "
        "let the join make both where openssl is."
    )
    with pytest.raises(ConfigurationError, match=r"over TLS \(--engine-tls\), or add --plain-http where the"):
        told("--listen=10.0.0.7:1")


def test_of_a_chain_the_first_certificate_counts(home: Home, tmp_path: Path) -> None:
    own, other = home.certificate.read_text(), a_home(tmp_path).certificate.read_text()
    assert is_checksum(checksum_of(own))
    assert checksum_of(f"{home.key.read_text()}some words\n{own}{other}") == checksum_of(own)
    assert checksum_of(f"{other}{own}") == checksum_of(other) != checksum_of(own)
    with pytest.raises(ValueError, match="it holds no PEM certificate"):
        checksum_of(home.key.read_text())


def test_what_an_older_agent_says_is_that_its_engines_speak_plain_http() -> None:
    told = {"replica": "r", "generation": 1, "rank": 0, "state": "ready", "port": 1}
    assert read(RankReport, told).certificate == ""
    assert "certificate" not in to_json(read(RankReport, told)), "which an older control plane is not told"


FLAGS = {
    "vllm": "--ssl-certfile /c --ssl-keyfile /k",
    "sglang": "--ssl-certfile /c --ssl-keyfile /k",
    "llamacpp": "--ssl-cert-file /c --ssl-key-file /k",
    "sim": "--ssl-certfile /c --ssl-keyfile /k",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_is_given_its_files_last(engine: str) -> None:
    given = ["--ssl-certfile", "/theirs"] if engine == "vllm" else []
    launch = Launch("m", "s", {"name": "p", "engine": engine, "args": given})
    seat = Seat(["/engine"], "127.0.0.1", 18000, KEY, "/w", allowed_args={"--ssl-certfile"})
    plain = render(launch, seat).argv
    assert render(launch, replace(seat, tls=("/c", "/k"))).argv == (*plain, *FLAGS[engine].split())


def test_a_profile_may_not_say_what_an_engine_shows() -> None:
    for engine, flags in FLAGS.items():
        for flag in flags.split()[::2]:
            launch = Launch("m", "s", {"name": "p", "engine": engine, "args": [flag, "/theirs"]})
            with pytest.raises(
                RenderError, match=f"{flag} opens a file on the node, which a node allows only"
            ):
                render(launch, Seat(["/engine"], "127.0.0.1", 18000, KEY, "/w", tls=("/c", "/k")))


HANDS = "--engine llamacpp: its words hand it {model} and not"
REFUSED_WORDS = {
    "a container that the key does not come into": (
        "run -v {model}:{model} -v {tls_certificate}:{tls_certificate} IMAGE", True, f"{HANDS} {{tls_key}}",
    ),
    "a container that the certificate does not come into": (
        "run -v {model}:{model} -v {tls_key}:{tls_key} IMAGE", True, f"{HANDS} {{tls_certificate}}",
    ),
    "files that it does not use": (
        "run -v {tls_key}:{tls_key}:ro IMAGE", False,
        "--engine llamacpp: there is no {tls_key} to hand it without --engine-tls; add that",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "with_tls", "says"), REFUSED_WORDS.values(), ids=REFUSED_WORDS)
def test_words_that_cannot_start_an_engine_are_refused(words: str, with_tls: bool, says: str) -> None:
    with pytest.raises(InventoryError) as no:
        find_engines({"llamacpp": ["env", *words.split()]}, with_tls=with_tls)
    assert str(no.value).startswith(says)
    assert str(no.value).endswith(".")


def test_words_that_run_in_no_container_need_hand_nothing_on() -> None:
    assert "llamacpp" in find_engines({"llamacpp": ["env", "--", "{name}"]}, with_tls=True)
    words = ("podman", "-v", "{tls_certificate}:{tls_certificate}:ro", "-v", "{tls_key}:{tls_key}:ro")
    files = Path("/c"), Path("/k")
    filled = FoundEngine(ENGINES["vllm"], words).fill(env=(), gpus=(), model="", name="", tls=files)
    assert filled == ("podman", "-v", "/c:/c:ro", "-v", "/k:/k:ro")


# --- what runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """With a vllm in a container of its kind, and llama-server where there is one."""
    folder = tmp_path_factory.mktemp("agent")
    podman = folder / "podman"
    podman.write_text(PODMAN.format(python=sys.executable, program=stand_in(folder, "vllm")))
    podman.chmod(0o700)
    places = ("model", "checkout", "tls_certificate", "tls_key")
    volumes = " ".join(f"--volume {{{place}}}:{{{place}}}:ro" for place in places)
    options = ["--engine-tls", "--engine", f"vllm={podman} run {{env}} {volumes} 'an image'"]
    if (llama := llama_server()) is not None:
        options += ["--engine", f"llamacpp={llama}"]
    with AgentProcess(folder, *options, tls=(home.certificate, home.key)) as agent:
        yield agent


def health(rank: Any, certificate: Path, scheme: str = "https") -> int:
    return ask(f"{scheme}://127.0.0.1:{rank['port']}/health", certificate=certificate).status


def test_an_engine_answers_over_tls_and_not_in_the_clear(agent: AgentProcess, home: Home) -> None:
    rank = agent.run()
    assert rank["certificate"] == home.checksum()
    assert (rank["running"], rank["waiting"], rank["context_length"]) == (0, 0, 8192), (
        "its agent has asked it"
    )
    assert agent.state()["engine_tls"] is True
    assert health(rank, home.certificate) == 200
    with pytest.raises((OSError, urllib.error.URLError)):
        health(rank, home.certificate, scheme="http")
    end(agent, rank)


def end(agent: AgentProcess, *ranks: Any) -> None:
    for each in ranks:
        agent.delete(each["replica"])
        agent.wait_for(each["replica"], "stopped")


def test_nobody_else_is_taken_for_the_engine(agent: AgentProcess, home: Home) -> None:
    rank = agent.run()

    async def obstacle(scheme: str, certificate: str) -> str:
        async with open_session() as session:
            launch, where = Launch("m", "s", {"engine": "sim"}), f"{scheme}://127.0.0.1:{rank['port']}"
            probe = Probe(session, ENGINES["sim"], launch, base_url=where, key=KEY, certificate=certificate)
            return await probe.obstacle()

    assert asyncio.run(obstacle("https", home.checksum())) == ""
    assert asyncio.run(obstacle("https", "0" * 64)) == (
        "what listens there shows another certificate than it was started with"
    )
    assert asyncio.run(obstacle("http", "")).startswith("/health broke off")
    end(agent, rank)
    with plain_door() as port:
        rank = {"port": port}
        assert asyncio.run(obstacle("https", "0" * 64)) == "what listens there does not speak TLS"


@contextlib.contextmanager
def plain_door() -> Iterator[int]:
    class Door(BaseHTTPRequestHandler):
        def log_message(self, *told: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_certificate_that_is_gone_is_told_when_an_engine_is_to_start(
    agent: AgentProcess, home: Home, tmp_path: Path
) -> None:
    kept = home.certificate.read_bytes()
    agent.certificate = tmp_path / "kept"
    agent.certificate.write_bytes(kept)
    home.certificate.unlink()
    try:
        wanted = assignment()
        agent.put(wanted)
        rank = agent.wait_for(wanted["replica"], "failed")
    finally:
        home.certificate.write_bytes(kept)
        agent.certificate = home.certificate
    assert (rank["cause"], rank["kind"]) == ("no_certificate", "node")
    assert rank["reason"].startswith(f"The certificate {home.certificate} cannot be read (")
    assert rank["reason"].endswith("; correct it on the node.")


def test_a_sim_engine_that_cannot_speak_tls_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--model", "m", "--port", "1", "--ssl-certfile", "/c"]
    with pytest.raises(SystemExit):
        read_options(told, key="")
    assert "sim: error: --ssl-certfile and --ssl-keyfile go together" in capsys.readouterr().err
    end = asyncio.run(serve(read_options([*told, "--ssl-keyfile", "/k"], key="")))
    assert (end.code, "cannot be used: [Errno 2] No such file" in end.words) == (1, True)


def test_a_container_is_handed_what_its_engine_shows(agent: AgentProcess, home: Home, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    wanted = assignment(engine="vllm", source=str(tmp_path))
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready")
    assert rank["certificate"] == home.checksum()
    assert health(rank, home.certificate) == 200
    said = agent.log(rank["replica"])
    for file in (home.certificate, home.key):
        assert f"podman: --volume {file}:{file}:ro\n" in said
    end(agent, rank)


def test_a_build_of_llama_server_without_tls_is_told_of(agent: AgentProcess, tmp_path: Path) -> None:
    if llama_server() is None:
        pytest.skip("no llama-server that runs on this processor")
    (tmp_path / "m.gguf").touch()

    def end_of_a_start() -> Any:
        wanted = assignment(engine="llamacpp", source=str(tmp_path / "m.gguf"), gpus=[])
        agent.put(wanted)
        return agent.wait_for(wanted["replica"], "failed", timeout_s=30)

    # On a busy machine one in five ends before it has written its last words.
    rank = next(rank for _ in range(10) if (rank := end_of_a_start())["cause"] != "unknown")
    if rank["cause"] == "corrupt_weights":  # it got further
        pytest.skip("this llama-server was built with TLS")
    assert (rank["cause"], rank["kind"]) == ("no_tls", "node")
    assert rank["reason"] == (
        "This build of llama-server speaks no TLS, which --engine-tls asks for; put one that was built with "
        "OpenSSL on the node, or start its agent without --engine-tls."
    )


def test_an_engine_keeps_the_certificate_that_it_began_with(
    agent: AgentProcess, home: Home, tmp_path: Path
) -> None:
    """Whatever is renewed, and whoever takes it up; one that still loads begins with what it will read. It is
    the last test of the agent, which keeps the new one and is told no more that engines should show it."""
    rank = agent.run()
    loading = assignment("--load-time", "700ms", gpus=[])
    agent.put(loading)
    assert agent.wait_for(loading["replica"], "starting")["certificate"] == home.checksum()
    other, old = a_home(tmp_path), tmp_path / "old"
    old.write_bytes(home.certificate.read_bytes())
    home.certificate.write_bytes(other.certificate.read_bytes())
    home.key.write_bytes(other.key.read_bytes())
    agent.certificate = old  # its door shows what it was opened with
    newer = agent.run(gpus=["sim-1"])
    assert newer["certificate"] == other.checksum() != rank["certificate"]
    late = agent.wait_for(loading["replica"], "ready")
    assert late["certificate"] == other.checksum()
    agent.kill()
    (agent.state_folder / "replicas" / f"{rank['replica']}.json").unlink()
    agent.certificate, agent.options = home.certificate, shown(home)
    agent.start()
    assert agent.state()["engine_tls"] is False
    stray = agent.rank(rank["replica"])
    assert (stray["state"], stray["certificate"]) == ("starting", rank["certificate"])
    assert agent.put(assignment(replica=rank["replica"])).status == 200
    for known in (rank, newer, late):
        again = agent.wait_for(known["replica"], "ready")
        assert (again["pid"], again["certificate"]) == (known["pid"], known["certificate"])
    assert health(rank, old) == health(newer, home.certificate) == 200
    with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
        health(newer, old)
