"""What this node has: devices, memory, disk, engines and labels.

No driver means no GPU and is no error. What cannot be told is None, which excludes the node from nothing.
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

import pynvml

from nodes.agent.processes import inherited
from nodes.engines import ENGINES, Adapter
from nodes.protocol import EngineReport, GpuReport

VERSION_TIMEOUT_S = 20  # vllm imports all of itself first
MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[2]

# Memory as cards are sold, in GB; what a driver reports is somewhat below.
_SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 180, 192, 288)
_CHIP = re.compile(r"\b(?:rtx (?:pro )?\w+(?: ti| super| ada)?|gtx \w+|[a-z]{1,2}\d{1,4}[a-z]{0,2})\b")


class InventoryError(Exception):
    """The agent was told of something that is not there; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that can be started here. `words` are the first of its command line."""

    adapter: Adapter
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def report(self) -> EngineReport:
        return EngineReport(self.adapter.name, self.version)


def find_engines(given: Mapping[str, str]) -> dict[str, FoundEngine]:
    """Those given by the node's own configuration, and those on PATH. Raises InventoryError."""
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
        candidates = [given[name]] if name in given else adapter.executables
        program = next((path for each in candidates if (path := shutil.which(each))), None)
        if program is None and name in given:
            raise InventoryError(f"--engine {name}={given[name]}: there is no such program to run.")
        if program is not None:
            program = os.path.abspath(program)
            found[name] = FoundEngine(adapter, (program,), env, _version(program, adapter.asks_version))
    return found


def _version(program: str, asks_version: str) -> str:
    """The first line of what it tells with a number in it."""
    try:
        told = subprocess.run(
            [program, asks_version],
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
    return line.rpartition("version:")[2].strip()[:80] if told.returncode == 0 else ""


# --- devices --------------------------------------------------------------------------------------------


def parse_sim_gpus(text: str) -> tuple[GpuReport, ...]:
    """Made-up cards from `2:sim` or `4:h100-80g,4:l40s-48g`. Raises InventoryError."""
    cards: list[GpuReport] = []
    for part in filter(None, text.split(",")):
        count, _, gpu_class = part.strip().partition(":")
        if not count.isdecimal() or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", gpu_class):
            raise InventoryError(f"--sim-gpus {text}: write a number and a class, such as 2:sim.")
        for _ in range(int(count)):
            index = len(cards)
            cards.append(GpuReport(f"sim-{index}", index, "simulated", gpu_class))
    return tuple(cards)


class Devices:
    """The node's cards: those made up for trials, or else the real ones."""

    def __init__(self, made_up: Sequence[GpuReport] = ()) -> None:
        self._made_up = tuple(made_up)
        self._has_driver = not made_up and _start_nvml()

    def read(self) -> tuple[GpuReport, ...]:
        if not self._has_driver:
            return self._made_up
        cards = []
        with contextlib.suppress(pynvml.NVMLError):  # the driver went away under us
            for index in range(pynvml.nvmlDeviceGetCount()):
                with contextlib.suppress(pynvml.NVMLError):  # one that fell off its bus takes no other along
                    cards.append(_read_card(index))
        return tuple(cards)


def _start_nvml() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _read_card(index: int) -> GpuReport:
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = str(pynvml.nvmlDeviceGetName(card))
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(card)
        total, used = memory.total // MIB, memory.used // MIB
    except pynvml.NVMLError:  # unified memory has no numbers of its own
        total = used = None
    uuid = str(pynvml.nvmlDeviceGetUUID(card))
    return GpuReport(uuid, index, name, gpu_class(name, total), total, used)


def gpu_class(name: str, memory_mib: int | None) -> str:
    """`h100-80g` from "NVIDIA H100 80GB HBM3" and its memory."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("nvidia", "").replace("geforce", "")).strip()
    chip = _CHIP.search(plain)
    label = (chip[0] if chip else plain).replace(" ", "-") or "gpu"
    told = re.search(r"\b(\d+)gb\b", plain)
    if told:
        return f"{label}-{told[1]}g"
    if memory_mib is None:
        return label
    gigabytes = memory_mib / 1024
    sold = next((each for each in _SOLD_GB if each >= gigabytes - 0.5), round(gigabytes))
    return f"{label}-{sold}g"


# --- memory and disk ------------------------------------------------------------------------------------


def host_memory_mib() -> tuple[int | None, int | None]:
    """Total, and what could be had without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None, None
    told = {name: int(kib) // 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return told.get("MemTotal"), told.get("MemAvailable")


def disk_free_bytes(path: Path) -> int | None:
    """Of the disk that the path is on, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
