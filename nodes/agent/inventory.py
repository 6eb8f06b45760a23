"""What this node has besides its GPUs: engines, processor, memory and disk.

What cannot be told is None, which excludes the node from nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nodes.agent.processes import inherited
from nodes.engines import ENGINES, Adapter
from nodes.protocol import EngineReport

VERSION_TIMEOUT_S = 5
ROOT = Path(__file__).resolve().parents[2]
PLACES = ("env", "gpus", "model", "name", "checkout")
TLS_PLACES = ("tls_certificate", "tls_key")
ENV_WORD = "{env}"
_PLACE = re.compile(r"\{(\w+)\}")


class InventoryError(Exception):
    """The agent was told of something that is not there; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that can be started here. `words` are the first of its command line, once they are filled."""

    adapter: Adapter
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    def fill(
        self,
        *,
        env: Sequence[str],
        gpus: Sequence[str],
        model: str,
        name: str,
        tls: tuple[Path, Path] | None = None,
    ) -> tuple[str, ...]:
        """env: names alone, since a container takes their values from its client's environment."""
        values = {"gpus": ",".join(gpus), "model": model, "name": name, "checkout": str(ROOT)}
        values |= zip(TLS_PLACES, map(str, tls or ()), strict=False)
        filled: list[str] = []
        for word in self.words:
            if word == ENV_WORD:
                filled += [part for variable in env for part in ("--env", variable)]
            else:
                filled.append(_PLACE.sub(lambda found: values.get(found[1], found[0]), word))
        return tuple(filled)

    @property
    def report(self) -> EngineReport:
        return EngineReport(self.adapter.name, self.version)


def find_engines(given: Mapping[str, Sequence[str]], *, with_tls: bool = False) -> dict[str, FoundEngine]:
    """Those given by the node's own configuration, as the words to start them by, and those on PATH.
    with_tls: they are started with a certificate. Raises InventoryError."""
    choice = [name for name, adapter in ENGINES.items() if adapter.executables]
    for name in given:
        if name not in choice:
            raise InventoryError(
                f"--engine {name}: there is no such engine to be given; choose from {', '.join(choice)}."
            )
    found = {}
    for name, adapter in ENGINES.items():
        env = {"PYTHONPATH": str(ROOT)} if adapter.needs_checkout else {}
        if not adapter.executables:
            found[name] = FoundEngine(adapter, (sys.executable, "-m", "nodes.agent.sim"), env)
            continue
        words = given.get(name, ())
        _judge_places(name, words, with_tls=with_tls)
        candidates = words[:1] or adapter.executables
        program = next((path for each in candidates if (path := shutil.which(each))), None)
        if program is None and words:
            raise InventoryError(f"--engine {name}={words[0]}: there is no such program to run.")
        if program is not None:
            words = (os.path.abspath(program), *words[1:])
            found[name] = FoundEngine(adapter, words, env, _version(words, adapter.package))
    return found


def _judge_places(name: str, words: Sequence[str], *, with_tls: bool) -> None:
    named = set(_PLACE.findall(" ".join(words)))
    for place in TLS_PLACES:
        if place in named and not with_tls:
            raise InventoryError(
                f"--engine {name}: there is no {{{place}}} to hand it without --engine-tls; add that, or "
                f"leave it out."
            )
        if place not in named and "model" in named and with_tls:
            raise InventoryError(
                f"--engine {name}: its words hand it {{model}} and not {{{place}}}, without which it cannot "
                f"answer over TLS; add it, as in -v {{{place}}}:{{{place}}}:ro, or leave --engine-tls out."
            )
    for word in words:
        for place in _PLACE.findall(word):
            if place in TLS_PLACES:
                continue
            if place not in PLACES or (place == "env" and word != ENV_WORD):
                known = ", ".join(f"{{{each}}}" for each in PLACES)
                raise InventoryError(
                    f"--engine {name}: {{{place}}} in {word} stands for nothing; of {known}, {ENV_WORD} must "
                    f"be a word of its own."
                )


def _version(words: Sequence[str], package: str) -> str:
    """As its package has it, or as the program tells it; empty where neither does. Words with places to fill
    run something only with a launch."""
    if any(_PLACE.search(word) for word in words):
        return ""
    if len(words) > 1:
        return _told([*words, "--version"])
    program = words[0]
    python = _interpreter(program) if package else ()
    ask = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return (python and _told([*python, "-c", ask])) or _told([program, "--version"])


def _interpreter(program: str) -> tuple[str, ...]:
    """What a script says that it is run by."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(program, "rb") as file:
        first = file.readline(500)
        if first.startswith(b"#!"):
            return tuple(first[2:].decode().split())
    return ()


def _told(command: Sequence[str]) -> str:
    """The first line with a number in it."""
    try:
        told = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=inherited(os.environ),
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = told.stdout.decode("utf-8", "replace").splitlines()
    line = next((line for line in lines if any(map(str.isdigit, line))), "")
    return line.removeprefix("version:").strip()[:80] if told.returncode == 0 else ""


# --- memory and disk ------------------------------------------------------------------------------------


def cpu() -> tuple[str, int | None]:
    """The processor's model, as it calls itself, and how many of its cores are for this process and what it
    starts. ARM's tell no model."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split())[:100] if found else "", len(os.sched_getaffinity(0))


def host_memory_mib() -> tuple[int | None, int | None]:
    """Total, and what could be had without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None, None
    told = {name: int(kib) // 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return told.get("MemTotal"), told.get("MemAvailable")


CGROUPS = Path("/sys/fs/cgroup")
OF_ALL = Path("/proc/vmstat")


def oom_counter(pid: int) -> Path:
    """Where the kernel counts whom of a process's cgroup it has ended for want of memory; of the whole node
    where it counts that alone."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return OF_ALL
    for line in lines:
        _, controllers, path = line.split(":", 2)
        counter = CGROUPS / path.lstrip("/") / "memory.events"
        if "memory" in controllers.split(","):
            counter = CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        if counter.exists():
            return counter
    return OF_ALL


def oom_kills(counter: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def disk_bytes(path: Path) -> tuple[int | None, int | None]:
    """How large the disk is that the path is on, or will be, and how much of it is free."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free
