"""Recorded inventories: what fits on each kind of node, on which devices, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from catalog.spec import ModelSpec
from nodes.placement import Holding, Node, Seat, Unseated, Want
from nodes.protocol import StateReport, read
from nodes.seating import Room, place

RECORDED = Path(__file__).parent / "data" / "inventories"


def room_of(*names: str) -> Room:
    return Room(
        Node(number, name, report=read(StateReport, json.loads((RECORDED / f"{name}.json").read_text())))
        for number, name in enumerate(names)
    )


def want(**profile: Any) -> Want:
    spec = ModelSpec.load(
        {
            "name": "m",
            "source": "org/m",
            "profiles": [{"name": "p"} | profile],
            "scaling": {"min": 1, "max": 9},
        }
    )
    return Want(spec, spec.profiles)


def seated(room: Room, **profile: Any) -> list[str]:
    """Takes as many as fit, one after another: the indices of the devices that each has."""
    found = []
    while isinstance(seat := place(want(**profile), room), Seat):
        (only,) = seat.places
        room.take(Holding(only, memory_gb=seat.profile.min_memory_gb, has_begun=False))
        cards = {gpu.id: gpu.index for gpu in room.spots[only.node].node.report.gpus}
        found.append(" ".join(str(cards[gpu]) for gpu in only.gpus))
        if len(found) == 20:
            break
    return found


H100 = {"gpu_class": "h100-80g"}


@pytest.mark.parametrize(
    ("inventory", "profile", "devices"),
    [
        pytest.param("eight_h100", H100 | {"tp": 4}, ["0 1 2 3", "4 5 6 7"], id="8 x h100: fours"),
        pytest.param("eight_h100", H100 | {"tp": 3}, ["0 1 2", "3 4 5"], id="8 x h100: threes"),
        pytest.param("eight_h100", H100 | {"tp": 8}, ["0 1 2 3 4 5 6 7"], id="8 x h100: all"),
        pytest.param("mixed_classes", H100, ["0", "1"], id="mixed: neither one that is ill nor one in use"),
        pytest.param(
            "mixed_classes", {"gpu_class": "l40s-48g", "tp": 2}, ["4 5", "6 7"], id="mixed: the other class"
        ),
        pytest.param(
            "mig_slices", {"gpu_class": "h100-mig-3g.40g"}, ["0", "0", "1", "1"], id="MIG: slice by slice"
        ),
        pytest.param("mig_slices", H100 | {"tp": 2}, ["2 3"], id="MIG: the cards that are whole"),
        pytest.param(
            "cpu_only",
            {"engine": "llamacpp", "min_memory_gb": 20},
            ["", "", ""],
            id="no card: as many as its memory holds",
        ),
        pytest.param("sim", {"engine": "sim", "gpu_class": "sim"}, ["0", "1"], id="sim"),
        pytest.param(
            "unified_memory",
            {"gpu_class": "gb10", "min_memory_gb": 100},
            ["0"],
            id="memory without numbers of its own",
        ),
        pytest.param(
            "older_agent",
            {"gpu_class": "a100-80g", "min_memory_gb": 500, "min_disk_gb": 500},
            ["0", "1"],
            id="an older agent: what it does not tell excludes nobody",
        ),
    ],
)
def test_what_fits(inventory: str, profile: dict[str, Any], devices: list[str]) -> None:
    assert seated(room_of(inventory), **profile) == devices


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        pytest.param(
            H100 | {"tp": 8, "engine": "sglang", "min_memory_gb": 3000},
            "0 of 6 nodes: 4 without sglang, 1 lacks 8 free h100-80g, 1 short of memory (need 3000 GB)",
            id="by engine, by cards, by memory",
        ),
        pytest.param(
            {"gpu_class": "gb10", "min_disk_gb": 4000},
            "0 of 6 nodes: 3 lack 1 free gb10, 2 without vllm, 1 short of disk (need 4000 GB)",
            id="by disk",
        ),
        pytest.param(
            H100 | {"node_selector": {"zone": "b"}, "tp": 4},
            "0 of 6 nodes: 3 without the label zone=b, 2 without vllm, 1 lacks 4 free h100-80g",
            id="by label",
        ),
    ],
)
def test_why_nothing_fits(profile: dict[str, Any], says: str) -> None:
    room = room_of("eight_h100", "mixed_classes", "mig_slices", "cpu_only", "sim", "unified_memory")
    found = place(want(**profile), room)
    assert isinstance(found, Unseated)
    assert found.why == says
