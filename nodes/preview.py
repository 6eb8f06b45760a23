"""What a profile will run, before anything runs: what it needs of nodes, its command and its environment.

Rendered by the adapters that agents render with, on a seat whose port, key, weights and cards are not chosen
yet and stand there as `<port>`, `<key>` and so on. Values that look like secrets are hidden.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from catalog.hiding import HIDDEN, hide, looks_secret
from catalog.owned import OWNED_ENV
from catalog.spec import ModelSpec, ProfileSpec
from nodes.engines import ENGINES, RenderError, Seat, render
from nodes.engines.adapter import SHOWN_KEY
from nodes.snapshot import Model, launch_of

ADDRESS, WEIGHTS = "<address>", "<weights>"
MEETING = ("<address of rank 0>", "<meeting port>")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a node must have to take one replica, or one rank of it where nodes is above 1."""

    engine: str
    nodes: int = 1
    gpus_per_node: int = 0
    gpu_class: str = ""
    memory_gb: int = 0
    disk_gb: int = 0
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    fabric: bool = False

    def __str__(self) -> str:
        each = [self.engine]
        if self.gpus_per_node:
            each.append(f"{self.gpus_per_node} x {self.gpu_class}")
        if self.memory_gb:
            each.append(f"{self.memory_gb} GB of memory")
        if self.disk_gb:
            each.append(f"{self.disk_gb} GB of disk")
        each += [f"the label {name}={value}" for name, value in self.labels.items()]
        nodes = f"{self.nodes} nodes in one fabric, each" if self.fabric else "1 node"
        return f"{nodes} with {', '.join(each)}"


@dataclass(frozen=True, slots=True)
class Preview:
    """command is empty where refusal says why none can be made. env has its secrets hidden."""

    model: str
    profile: str
    fingerprint: str
    needs: Needs
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    refusal: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def command_line(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.command)

    def as_dict(self, *, sees_env: bool = False) -> dict[str, Any]:
        """As JSON. What the profile's own environment holds is for who may see it."""
        return {
            "model": self.model,
            "profile": self.profile,
            "fingerprint": self.fingerprint,
            "needs": asdict(self.needs) | {"words": str(self.needs)},
            "command": list(self.command),
            "command_line": self.command_line,
            "env": self.shown_env(sees_env=sees_env),
            "refusal": self.refusal,
            "remarks": list(self.remarks),
        }

    def shown_env(self, *, sees_env: bool) -> dict[str, str]:
        """The environment as one may see it: the node's own part is no secret."""
        theirs = {name: value for name, value in self.env.items() if name not in OWNED_ENV}
        return {**self.env, **hide(theirs, sees_env=sees_env)}


def preview(model: ModelSpec, profile: ProfileSpec, source_revision: str) -> Preview:
    """What a replica of this profile would be started with now. source_revision: the commit a launch pins."""
    launch = launch_of(Model(0, model, source_revision), profile)
    adapter = ENGINES.get(profile.engine)  # a row may be older than the law
    seat = Seat(
        executable=(adapter and adapter.executables[:1]) or ("python", "-m", "nodes.agent.sim"),
        host=ADDRESS,
        port=None,
        key=SHOWN_KEY,
        model_path=WEIGHTS,
        gpus=tuple(f"<gpu {number}>" for number in range(1, profile.gpus_per_node + 1)),
        meeting=MEETING,
    )
    remarks = [adapter.remark] if adapter and adapter.remark else []
    if profile.nodes > 1:
        remarks.append("this is what rank 0 is given; every other rank gets its own --node-rank")
    known: dict[str, Any] = {
        "model": model.name,
        "profile": profile.name,
        "fingerprint": launch.fingerprint,
        "needs": _needs(profile),
    }
    try:
        command = render(launch, seat)
    except RenderError as no:
        return Preview(**known, refusal=str(no))
    env = {
        name: value if name in OWNED_ENV or not looks_secret(name, value) else HIDDEN
        for name, value in command.env.items()
    }
    words = tuple(HIDDEN if looks_secret("", word) else word for word in command.shown)
    return Preview(**known, command=words, env=env, remarks=tuple(remarks))


def _needs(profile: ProfileSpec) -> Needs:
    return Needs(
        engine=profile.engine,
        nodes=profile.nodes,
        gpus_per_node=profile.gpus_per_node,
        gpu_class=profile.gpu_class,
        memory_gb=profile.min_memory_gb,
        disk_gb=profile.min_disk_gb,
        labels=profile.node_selector,
        fabric=profile.nodes > 1,
    )
