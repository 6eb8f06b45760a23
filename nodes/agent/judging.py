"""What is wrong with an assignment by itself, whoever sends it and whatever runs here."""

from __future__ import annotations

import re

from nodes.agent.state import is_uuid
from nodes.protocol import PROTOCOL, Assignment, Launch

_KEY = re.compile(r"[\x21-\x7e]{16,200}")
_MEETING = re.compile(r"(?:[0-9.]{7,15}|\[[0-9a-fA-F:.]{2,45}\]):[1-9][0-9]{0,4}")


class Refusal(Exception):
    """A command that is not carried out. Nothing has changed."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.code, self.sentence = status, code, sentence


def judge_form(assignment: Assignment) -> None:
    """What JSON's types cannot say. Raises Refusal."""
    launch = assignment.launch
    faults = (
        (assignment.protocol < 1, "protocol must be 1 or more"),
        (assignment.protocol > PROTOCOL + 1, f"this agent speaks protocol {PROTOCOL}; bring it up to date"),
        (not is_uuid(assignment.replica), "replica must be a UUID in its usual form"),
        (assignment.generation < 1, "generation must be 1 or more"),
        (assignment.fence < 0, "fence must be 0 or more"),
        (assignment.rank < 0, "rank must be 0 or more"),
        (not _KEY.fullmatch(assignment.key), "key must be 16 to 200 visible ASCII characters"),
        (assignment.rank >= ranks_in(launch), "rank must be below launch.profile.nodes"),
        (
            not _MEETING.fullmatch(assignment.meeting) if assignment.rank > 0 else assignment.meeting != "",
            "meeting must be ADDRESS:PORT of rank 0 for the other ranks, and empty for rank 0",
        ),
        (not launch.model, "launch.model must be a name"),
        (not launch.engine, "launch.profile.engine must be a name"),
        (len(set(assignment.gpus)) != len(assignment.gpus), "gpus must not name one twice"),
        (any("," in gpu or not gpu for gpu in assignment.gpus), "gpus must be devices' ids"),
    )
    for is_so, sentence in faults:
        if is_so:
            raise Refusal(400, "malformed", f"The assignment cannot be read: {sentence}.")


def ranks_in(launch: Launch) -> int:
    nodes = launch.profile.get("nodes", 1)
    return nodes if isinstance(nodes, int) and nodes > 0 else 1
