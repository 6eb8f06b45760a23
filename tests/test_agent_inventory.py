"""The node's GPUs, as a driver tells them: the real NVML client before a library that stands in for the
driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.gpus import check_gpu_classes, gpu_class, parse_sim_gpus
from nodes.agent.inventory import InventoryError
from tests.agent_process import ROOT, AgentProcess, assignment
from tests.waiting import wait_until

GIB = 2**30
MIB = 2**20
NOT_TOLD = -1
LOST = 15

# Reads the cards once a line: the process groups that are ours.
WATCH = """
import json, logging, sys
from nodes.agent.gpus import Devices, check_gpu_classes
from nodes.protocol import to_json
logging.basicConfig(format="%(message)s")
devices = Devices(node="node-1", classes=check_gpu_classes({"NVIDIA L4": "small"}))
for line in sys.stdin:
    print(json.dumps([to_json(each) for each in devices.read(json.loads(line))]), flush=True)
"""


@dataclass(frozen=True)
class Card:
    """A card, or a slice of the one before it."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-1"
    total: int = 81559 * MIB
    used: int = 0
    mig_mode: int = 0
    row_failure: int = 0
    recovery: int = 0
    code: int = 0
    pages: int = NOT_TOLD
    errors: int = 0
    processes: str = ""
    is_slice: bool = False

    def __str__(self) -> str:
        return "\t".join(
            str(each)
            for each in (
                "slice" if self.is_slice else "card", self.name, self.uuid, self.total, self.used,
                self.mig_mode, self.row_failure, self.recovery, self.code, self.pages, self.errors,
                self.processes,
            )
        )  # fmt: skip


class Driver:
    """What a driver would tell, and a process that asks it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._file = folder / "cards"
        self.env = {"LD_LIBRARY_PATH": str(library.parent), "NVML_STAND_IN": str(self._file)}
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", WATCH],
                cwd=ROOT,
                env={**self.env, "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def has(self, *cards: Card) -> None:
        draft = self._file.with_suffix(".part")
        draft.write_text("".join(f"{card}\n" for card in cards))
        draft.rename(self._file)

    def goes(self) -> None:
        self._file.unlink()

    def told(self, *groups: int) -> Any:
        """What the agent makes of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(groups) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.log
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, so no library to stand in for the driver's")
    made = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stand_in.c")
    subprocess.run(
        [compiler, "-D_GNU_SOURCE", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", made, source],
        check=True,
    )
    return made


@pytest.fixture
def driver(tmp_path: Path, library: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path, library)
    yield driver
    driver.close()


# --- what a driver tells --------------------------------------------------------------------------------


def test_cards_are_told_with_their_class_and_memory(driver: Driver) -> None:
    driver.has(
        Card(used=1000 * MIB),
        Card("NVIDIA L40S", "GPU-2", total=46068 * MIB),
        Card("NVIDIA L4", "GPU-3", total=23034 * MIB),
    )
    assert driver.told() == [
        {
            "id": "GPU-1",
            "index": 0,
            "name": "NVIDIA H100 80GB HBM3",
            "gpu_class": "h100-80g",
            "memory_mib": 81559,
            "used_mib": 1000,
            "foreign_mib": 0,
            "is_healthy": True,
        },
        {
            "id": "GPU-2",
            "index": 1,
            "name": "NVIDIA L40S",
            "gpu_class": "l40s-48g",
            "memory_mib": 46068,
            "used_mib": 0,
            "foreign_mib": 0,
            "is_healthy": True,
        },
        {
            "id": "GPU-3",
            "index": 2,
            "name": "NVIDIA L4",
            "gpu_class": "small",  # by the operator's own table
            "memory_mib": 23034,
            "used_mib": 0,
            "foreign_mib": 0,
            "is_healthy": True,
        },
    ]


def test_memory_that_is_shared_with_the_host_has_no_numbers(driver: Driver) -> None:
    driver.has(
        Card("NVIDIA GB10", total=NOT_TOLD, mig_mode=NOT_TOLD, row_failure=NOT_TOLD, recovery=NOT_TOLD)
    )
    (card,) = driver.told()
    assert (card["gpu_class"], card["is_healthy"]) == ("gb10", True)
    assert not card.keys() & {"memory_mib", "used_mib"}


def test_a_divided_card_is_told_as_its_slices(driver: Driver) -> None:
    driver.has(
        Card(mig_mode=1, processes="?"),
        Card("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-a", 40448 * MIB, is_slice=True),
        Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "MIG-b", 9856 * MIB, 10 * MIB, is_slice=True),
        Card("NVIDIA H100 80GB HBM3", "GPU-2"),
        Card("NVIDIA H100 80GB HBM3", "GPU-3", mig_mode=1),
    )
    told = [(each["id"], each["index"], each["gpu_class"], each["memory_mib"]) for each in driver.told()]
    assert told == [
        ("MIG-a", 0, "h100-mig-3g.40gb", 40448),
        ("MIG-b", 0, "h100-mig-1g.10gb-me", 9856),
        ("GPU-2", 1, "h100-80g", 81559),
    ]


def test_slices_that_are_made_anew_replace_the_old_ones(driver: Driver) -> None:
    driver.has(Card(mig_mode=1), Card("NVIDIA H100 MIG 3g.40gb", "MIG-a", is_slice=True))
    driver.told()
    driver.has(Card(mig_mode=1), Card("NVIDIA H100 MIG 1g.10gb", "MIG-b", is_slice=True))
    assert [(each["id"], each["is_healthy"]) for each in driver.told()] == [("MIG-b", True)]


SICK = {
    "a row that could not be replaced": (Card(row_failure=1), "a faulty row of its memory"),
    "a page that is to be retired": (Card(pages=1), "a faulty page of its memory is in use until the driver"),
    "an error that was not corrected": (Card(errors=1), "1 error of its memory could not be corrected"),
    "errors that were not corrected": (Card(errors=7), "7 errors of its memory could not be corrected"),
    "a reset that is asked for": (Card(recovery=1), "the driver asks for a reset of it"),
    "a reboot that is asked for": (Card(recovery=2), "the driver asks for a reboot of the node"),
    "a recovery that nobody knows yet": (Card(recovery=99), "the driver asks for recovery action 99"),
}


@pytest.mark.parametrize(("card", "words"), SICK.values(), ids=SICK)
def test_a_sick_card_is_told_as_such_and_why_once(driver: Driver, card: Card, words: str) -> None:
    driver.has(card, Card(uuid="GPU-2"))
    for _ in range(3):
        sick, well = driver.told()
        assert (sick["is_healthy"], well["is_healthy"]) == (False, True)
        assert sick["sickness"].startswith(words)
        assert "sickness" not in well
    assert driver.log.count("is not healthy") == 1
    assert f"GPU 0 (NVIDIA H100 80GB HBM3, GPU-1) is not healthy: {words}" in driver.log


def test_the_slices_of_a_sick_card_are_sick(driver: Driver) -> None:
    driver.has(Card(mig_mode=1, recovery=1), Card("NVIDIA H100 MIG 3g.40gb", "MIG-a", is_slice=True))
    assert [each["is_healthy"] for each in driver.told()] == [False]


def test_a_card_that_is_lost_stays_on_the_list_and_takes_no_other_along(driver: Driver) -> None:
    driver.has(Card(used=GIB), Card(uuid="GPU-2"))
    driver.told()
    driver.has(Card(code=LOST), Card(uuid="GPU-2"))
    lost, other = driver.told()
    assert (lost["id"], lost["is_healthy"], lost.get("used_mib")) == ("GPU-1", False, None)
    assert (lost["gpu_class"], lost["memory_mib"]) == ("h100-80g", 81559)
    assert other["is_healthy"]
    assert lost["sickness"] == "it no longer answers"
    assert "GPU-1) is not healthy: it no longer answers." in driver.log
    driver.has(Card(), Card(uuid="GPU-2"))
    assert [each["is_healthy"] for each in driver.told()] == [True, True]


def test_a_card_that_was_never_seen_is_not_made_up(driver: Driver) -> None:
    driver.has(Card(code=LOST), Card(uuid="GPU-2"))
    assert [each["id"] for each in driver.told()] == ["GPU-2"]


def test_a_card_that_moves_to_another_place_is_the_same(driver: Driver) -> None:
    driver.has(Card(), Card(uuid="GPU-2"), Card(uuid="GPU-3"))
    driver.told()
    driver.has(Card(), Card(uuid="GPU-3"))
    told = [(each["id"], each["index"], each["is_healthy"]) for each in driver.told()]
    assert told == [("GPU-1", 0, True), ("GPU-2", 1, False), ("GPU-3", 1, True)]


def test_a_driver_that_goes_and_comes_back_loses_no_card(driver: Driver) -> None:
    assert driver.told() == [], "no driver is no GPU, and no error"
    driver.has(Card())
    assert [each["is_healthy"] for each in driver.told()] == [True], "a driver may come later"
    driver.goes()
    assert [each["is_healthy"] for each in driver.told()] == [False]
    driver.has(Card())
    assert [each["is_healthy"] for each in driver.told()] == [True]


# --- whose memory it is ---------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[Callable[..., int]]:
    """Starts a process with these marks, as the first of its group; tells its pid."""
    started = []

    def start(**env: str) -> int:
        started.append(subprocess.Popen(["sleep", "100"], env=env, start_new_session=True))
        return started[-1].pid

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_what_others_hold_is_foreign_and_what_our_engines_hold_is_not(
    driver: Driver, process: Callable[..., int]
) -> None:
    marked, grouped = process(LLMGW_NODE="node-1"), process()
    neighbour, stranger = process(LLMGW_NODE="node-2"), process()
    gone = 2**22 + 1
    held = {marked: 1000, grouped: 2000, neighbour: 30, stranger: 40, gone: 5}
    processes = ",".join(f"{pid}:{mib * MIB}:c" for pid, mib in held.items())
    driver.has(Card(processes=processes), Card(uuid="GPU-2", processes=f"{stranger}:{7 * MIB}:g"))
    assert [each["foreign_mib"] for each in driver.told(grouped)] == [75, 7]
    assert [each["foreign_mib"] for each in driver.told()] == [2075, 7]


HELD = {
    "nothing": ("", 0),
    "what is not told at all": ("?", None),
    "a process that is told twice": (f"1:{10 * MIB}:c,1:{30 * MIB}:g", 30),
    "a process that does not tell how much": (f"1:{NOT_TOLD}:c", None),
    "one that tells and one that does not": (f"1:{NOT_TOLD}:c,2:{30 * MIB}:c", 30),
    "many": (",".join(f"{pid}:{MIB}:c" for pid in range(1, 31)), 30),
}


@pytest.mark.parametrize(("processes", "foreign"), HELD.values(), ids=HELD)
def test_foreign_memory_is_what_is_told_of_it(driver: Driver, processes: str, foreign: int | None) -> None:
    driver.has(Card(processes=processes))
    (card,) = driver.told()
    assert card.get("foreign_mib") == foreign


def test_an_agent_tells_its_cards_and_runs_engines_on_them(
    driver: Driver, tmp_path: Path, process: Callable[..., int]
) -> None:
    driver.has(Card(), Card(uuid="GPU-2"))
    options = ("--sim-gpus", "", "--gpu-class", "NVIDIA H100 80GB HBM3=big")
    with AgentProcess(tmp_path, *options, environment=driver.env) as agent:
        assert [each["gpu_class"] for each in agent.state()["gpus"]] == ["big", "big"]
        rank = agent.run(gpus=["GPU-1"])
        held = f"{rank['pid']}:{9 * GIB}:c"
        stranger = process()
        driver.has(Card(processes=held), Card(uuid="GPU-2", processes=f"{held},{stranger}:{GIB}:c"))
        wait_until(
            lambda: [each["foreign_mib"] for each in agent.state()["gpus"]] == [0, 1024],
            "the stranger alone to be foreign",
            tell=agent.story,
        )


def test_a_replica_is_over_once_the_driver_has_given_its_memory_back(driver: Driver, tmp_path: Path) -> None:
    driver.has(Card())
    with AgentProcess(tmp_path, "--sim-gpus", "", environment=driver.env) as agent:
        rank = agent.run(gpus=["GPU-1"])
        driver.has(Card(used=9 * GIB, processes=f"{rank['pid']}:{9 * GIB}:c"))
        agent.delete(rank["replica"])
        waiting = wait_until(
            lambda: "given back" in (found := agent.rank(rank["replica"]))["reason"] and found,
            "the memory to be waited for",
            tell=agent.story,
        )
        assert waiting["state"] == "draining"
        assert waiting["reason"] == (
            "its processes are gone, and the driver has not yet given back 9216 MiB on GPU GPU-1"
        )
        assert agent.engines() == []
        assert agent.put(assignment(gpus=["GPU-1"])).refusal[:2] == (409, "gpu_taken")
        driver.has(Card())
        agent.wait_for(rank["replica"], "stopped")
        agent.run(gpus=["GPU-1"])


# --- classes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "memory_mib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA H100 NVL", 95830, "h100-94g"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, "a100-mig-1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 40448, "h100-mig-1c.3g.40gb"),
        ("NVIDIA H200", 143771, "h200-141g"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96g"),
        ("NVIDIA B200", 183359, "b200-180g"),
        ("NVIDIA L40S", 46068, "l40s-48g"),
        ("NVIDIA L4", 23034, "l4-24g"),
        ("NVIDIA A10G", 23028, "a10g-24g"),
        ("Tesla T4", 15360, "t4-16g"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32g"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090-24g"),
        ("NVIDIA GeForce RTX 3080 Ti", 12288, "rtx-3080-ti-12g"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx-4070-ti-super-16g"),
        ("NVIDIA GeForce GTX 1080 Ti", 11264, "gtx-1080-ti-11g"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada-48g"),
        ("NVIDIA RTX A6000", 49140, "rtx-a6000-48g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-96g"),
        ("NVIDIA TITAN RTX", 24576, "titan-rtx-24g"),
        ("NVIDIA GB10", None, "gb10"),
        ("NVIDIA A100 80GB PCIe", None, "a100-80g"),
        ("", None, "gpu"),
    ],
    ids=str,
)
def test_a_card_has_a_class_that_people_would_give_it(
    name: str, memory_mib: int | None, expected: str
) -> None:
    assert gpu_class(name, memory_mib) == expected
    assert check_gpu_classes({"x": expected}) == {"x": expected}, "it may stand in a catalog"


def test_cards_are_made_up_by_class() -> None:
    cards = parse_sim_gpus("2:sim, 1:h100-80g")
    assert [(card.id, card.index, card.gpu_class) for card in cards] == [
        ("sim-0", 0, "sim"),
        ("sim-1", 1, "sim"),
        ("sim-2", 2, "h100-80g"),
    ]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cards without a class": (lambda: parse_sim_gpus("2"), "such as 2:sim"),
    "cards without a number": (lambda: parse_sim_gpus("many:sim"), "such as 2:sim"),
    "cards in another script": (lambda: parse_sim_gpus("\u0662:sim"), "such as 2:sim"),
    "cards beyond number": (lambda: parse_sim_gpus("200:a,200:b"), "a node has at most 256 cards"),
    "a class that no catalog takes": (
        lambda: check_gpu_classes({"NVIDIA L4": "Small Card"}),
        "--gpu-class NVIDIA L4=Small Card: a class has small letters",
    ),
}


@pytest.mark.parametrize(("parse", "words"), REFUSED.values(), ids=REFUSED)
def test_cards_that_cannot_be_are_refused_in_one_sentence(parse: Callable[[], Any], words: str) -> None:
    with pytest.raises(InventoryError, match=words) as refused:
        parse()
    assert str(refused.value).endswith(".")
