"""The node's GPUs: what the driver tells of them by NVML, or cards made up for trials.

No driver means no GPU and is no error; one that comes later is found then. What cannot be told is None. A
card that was there and no longer answers is told as unhealthy instead of left out: what was put on it
is still there. A card that is divided (MIG) is told as its slices, each a device of its own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pynvml

from nodes.agent.inventory import InventoryError
from nodes.agent.processes import NODE_MARK, read_environment, read_stat
from nodes.protocol import GpuReport

log = logging.getLogger("llmgw.agent")

MIB = 1024 * 1024
MADE_UP_LIMIT = 256
DRIVERS_OWN_MIB = 1024  # what a driver may keep on a card that nobody uses
_CLASS = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

# Memory as cards are sold, in GB; what a driver reports is somewhat below.
_SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 180, 192, 288)
_CHIP = re.compile(
    r"\b(?:rtx (?:pro )?\w+(?: ti| super| ada)*|gtx \w+(?: ti| super)*|[a-z]{1,2}\d{1,4}[a-z]{0,2})\b"
)
_SLICE = re.compile(r"\bMIG (?P<slice>(?:\d+c\.)?\d+g\.\d+gb)(?P<more>\+[\w.]+)?", re.IGNORECASE)

# What a card or a driver does not tell, as opposed to a card that does not answer.
_UNTOLD = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_NotFound,
)
_PROCESSES = (
    pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
    pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
    pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
)


def parse_sim_gpus(text: str) -> tuple[GpuReport, ...]:
    """Made-up cards from `2:sim` or `4:h100-80g,4:l40s-48g`. Raises InventoryError."""
    cards: list[GpuReport] = []
    for part in filter(None, text.split(",")):
        count, _, gpu_class = part.strip().partition(":")
        if not re.fullmatch(r"[0-9]{1,3}", count) or not _CLASS.fullmatch(gpu_class):
            raise InventoryError(f"--sim-gpus {text}: write a number and a class, such as 2:sim.")
        if len(cards) + int(count) > MADE_UP_LIMIT:
            raise InventoryError(f"--sim-gpus {text}: a node has at most {MADE_UP_LIMIT} cards; give fewer.")
        for _ in range(int(count)):
            index = len(cards)
            cards.append(GpuReport(f"sim-{index}", index, "simulated", gpu_class))
    return tuple(cards)


def check_gpu_classes(given: Mapping[str, str]) -> dict[str, str]:
    """The operator's own table: a product's name, as the driver tells it, and its class. Raises
    InventoryError."""
    for name, gpu_class in given.items():
        if not _CLASS.fullmatch(gpu_class):
            raise InventoryError(
                f"--gpu-class {name}={gpu_class}: a class has small letters, digits, dots, dashes and "
                f"underscores; write one such as h100-80g."
            )
    return {name.casefold(): gpu_class for name, gpu_class in given.items()}


def gpu_class(name: str, memory_mib: int | None) -> str:
    """`h100-80g` from "NVIDIA H100 80GB HBM3" and its memory; `h100-mig-1g.10gb` of a slice of it."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("nvidia", "").replace("geforce", "")).strip()
    chip = _CHIP.search(plain)
    label = (chip[0] if chip else plain).replace(" ", "-") or "gpu"
    if part := _SLICE.search(name):
        return f"{label}-mig-{part['slice'].lower()}{(part['more'] or '').lower().replace('+', '-')}"
    told = re.search(r"\b(\d+)gb\b", plain)
    if told and (memory_mib is None or abs(memory_mib / 1024 / int(told[1]) - 1) < 0.2):
        return f"{label}-{told[1]}g"
    if memory_mib is None:
        return label
    gigabytes = memory_mib / 1024
    sold = next((each for each in _SOLD_GB if each >= gigabytes - 0.5), round(gigabytes))
    return f"{label}-{sold}g"


def unreturned(cards: Sequence[GpuReport], before: Mapping[str, int]) -> str:
    """What is held on these cards beyond what was before an engine came there, as a phrase; empty where that
    is little, or cannot be told. before: MiB by card.

    By numbers alone: a driver goes on listing processes that have ended.
    """
    for card in cards:
        if card.id in before and card.used_mib is not None:
            held_mib = card.used_mib - before[card.id]
            if held_mib > DRIVERS_OWN_MIB:
                return f"the driver has not yet given back {held_mib} MiB on GPU {card.id}"
    return ""


class Devices:
    """The node's cards: those made up for trials, or else the real ones.

    node: whose mark makes a process one of ours. classes: by product name, ahead of what `gpu_class` says.
    """

    def __init__(
        self,
        made_up: Sequence[GpuReport] = (),
        *,
        node: str = "",
        classes: Mapping[str, str] | None = None,
    ) -> None:
        self._made_up = tuple(made_up)
        self._node, self._classes = node, dict(classes or {})
        self._known: dict[str, tuple[GpuReport, ...]] = {}  # by the card's UUID, slices under their card's
        self._is_started = False
        self._lock = threading.Lock()  # it is asked from several threads

    def read(self, groups: Collection[int] = ()) -> tuple[GpuReport, ...]:
        """groups: the process groups that are known to be ours."""
        if self._made_up:
            return self._made_up
        with self._lock:
            found: dict[str, tuple[GpuReport, ...]] = {}
            for index in range(self._start()):
                with contextlib.suppress(pynvml.NVMLError):  # a sick one takes no other along
                    card = pynvml.nvmlDeviceGetHandleByIndex(index)
                    found[str(pynvml.nvmlDeviceGetUUID(card))] = self._read_card(card, index, groups)
            for uuid in self._known.keys() - found.keys():
                found[uuid] = tuple(map(self._lost, self._known[uuid]))
            self._known = found
            reports = [report for each in found.values() for report in each]
            return tuple(sorted(reports, key=lambda report: (report.index, report.id)))

    def _start(self) -> int:
        """How many cards there are."""
        try:
            if not self._is_started:
                pynvml.nvmlInit()
                self._is_started = True
            return int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError:
            if self._is_started:  # the driver went away under us, and may come back
                self._is_started = False
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
            return 0

    def _read_card(self, card: Any, index: int, groups: Collection[int]) -> tuple[GpuReport, ...]:
        sickness = _sickness(card)
        reports = tuple(self._report(device, index, groups) for device in _devices_of(card))
        return tuple(self._sick(report, sickness) for report in reports) if sickness else reports

    def _lost(self, report: GpuReport) -> GpuReport:
        return self._sick(replace(report, used_mib=None, foreign_mib=None), "it no longer answers")

    def _sick(self, report: GpuReport, sickness: str) -> GpuReport:
        known = {each.id: each for reports in self._known.values() for each in reports}
        if report.id not in known or known[report.id].is_healthy:
            log.warning("GPU %s (%s, %s) is not healthy: %s.", report.index, report.name, report.id, sickness)
        return replace(report, is_healthy=False, sickness=sickness)

    def _report(self, device: Any, index: int, groups: Collection[int]) -> GpuReport:
        name = str(pynvml.nvmlDeviceGetName(device))
        memory = _told(pynvml.nvmlDeviceGetMemoryInfo, device)
        # Memory that is shared with the host has no numbers of its own.
        total = memory.total // MIB if memory is not None and memory.total else None
        return GpuReport(
            id=str(pynvml.nvmlDeviceGetUUID(device)),
            index=index,
            name=name,
            gpu_class=self._classes.get(name.casefold()) or gpu_class(name, total),
            memory_mib=total,
            used_mib=memory.used // MIB if total is not None else None,
            foreign_mib=self._foreign_mib(device, groups),
        )

    def _foreign_mib(self, device: Any, groups: Collection[int]) -> int | None:
        """What processes hold that are not ours; at least that much, where some do not tell."""
        told = [processes for ask in _PROCESSES if (processes := _told(ask, device)) is not None]
        if not told:
            return None
        held: dict[int, int | None] = {}  # a process may compute and draw, and is told twice then
        for process in (each for processes in told for each in processes):
            held[process.pid] = _most(held.get(process.pid), process.usedGpuMemory)
        foreign = [used for pid, used in held.items() if not self._is_ours(pid, groups)]
        known = [used for used in foreign if used is not None]
        return sum(known) // MIB if known or not foreign else None

    def _is_ours(self, pid: int, groups: Collection[int]) -> bool:
        """By group too: some engines overwrite their environment."""
        stat = read_stat(pid)
        if stat is not None and stat.group in groups:
            return True
        return bool(self._node) and read_environment(pid).get(NODE_MARK) == self._node


def _told(ask: Callable[[Any], Any], device: Any) -> Any:
    """None where it cannot be told. Raises NVMLError where the card does not answer."""
    try:
        return ask(device)
    except _UNTOLD:
        return None


def _devices_of(card: Any) -> list[Any]:
    """The card, or its slices; none while it is divided and has none."""
    mode = _told(pynvml.nvmlDeviceGetMigMode, card)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [card]
    slices = (
        _told(partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, index=place), card)
        for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card))
    )
    return [each for each in slices if each is not None]


def _sickness(card: Any) -> str:
    """What NVML says is wrong with it; empty where nothing is."""
    remapped = _told(pynvml.nvmlDeviceGetRemappedRows, card)
    if remapped is not None and remapped[3]:
        return "a faulty row of its memory could not be replaced by a spare one"
    if _told(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, card):
        return "a faulty page of its memory is in use until the driver is loaded anew"
    if errors := _told(_ecc_errors, card):
        many = "errors" if errors > 1 else "error"
        return f"{errors} {many} of its memory could not be corrected since the driver was loaded"
    ask = partial(pynvml.nvmlDeviceGetFieldValues, fieldIds=[pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    fields = _told(ask, card)
    if fields is not None and fields[0].nvmlReturn == pynvml.NVML_SUCCESS:
        action = fields[0].value.uiVal
        if action != pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
            return _RECOVERY.get(action, f"the driver asks for recovery action {action}")
    return ""


def _ecc_errors(card: Any) -> Any:
    return pynvml.nvmlDeviceGetTotalEccErrors(
        card, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    )


_RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "the driver asks for a reset of it",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "the driver asks for a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "the driver asks to end what uses its links to other cards",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "the driver asks for a reset of it once it is idle",
}


def _most(one: int | None, other: int | None) -> int | None:
    known = [each for each in (one, other) if each is not None]
    return max(known, default=None)
