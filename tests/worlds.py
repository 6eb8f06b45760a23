"""Situations for the plan, in the making: nodes called by a letter, replicas by a word, models by their name;
and a plan as sentences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from catalog.spec import ModelSpec
from nodes.buckets import Plan, RollEnd
from nodes.placement import Freshness, Node
from nodes.protocol import EngineReport, GpuReport, Launch, RankReport, StateReport
from nodes.retry import Failure
from nodes.snapshot import Demand, Model, Rank, Replica, Roll, Snapshot, Stranger, launch_of

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
NODES = ("a", "b")


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


@dataclass
class World:
    """A snapshot in the making. Nodes are called by a letter, replicas by a word, models by their name."""

    nodes: dict[str, Node] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    strangers: list[Stranger] = field(default_factory=list)
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    watching_since: datetime | None = None
    seen_revision: int | None = None

    def node(self, name: str, gpus: int = 4, *, fabric: str = "", **columns: Any) -> World:
        """With a fabric, its agent runs parts of gangs as well."""
        report = StateReport(
            "cluster",
            name,
            gpus=tuple(GpuReport(f"{name}{index}", index, gpu_class="sim") for index in range(gpus)),
            engines=(EngineReport("sim"),),
            fabric=fabric,
            runs_gangs=bool(fabric),
        )
        self.nodes[name] = Node(id=ord(name), name=name, report=report, **columns)
        return self

    def model(
        self,
        name: str = "m",
        low: int = 1,
        high: int = 1,
        *,
        idle_timeout: str = "",
        demand: Demand | None = None,
        profiles: list[dict[str, Any]] | None = None,
        **profile: Any,
    ) -> World:
        first = {"name": "p", "engine": "sim", "gpu_class": "sim"} | profile
        spec = ModelSpec.load(
            {
                "name": name,
                "source": "org/m",
                "profiles": [first, *(first | each for each in profiles or ())],
                "scaling": {"min": low, "max": high, "idle_timeout": idle_timeout or 0},
            }
        )
        self.models[name] = Model(ord(name[0]), spec, demand=demand or Demand())
        return self

    def says(self, name: str = "m", **columns: Any) -> World:
        """What else is known of a model: its load, a roll."""
        self.models[name] = replace(self.models[name], **columns)
        return self

    def replica(
        self,
        name: str,
        on: str = "a",
        gpus: str = "",
        *,
        of: str | None = "m",
        state: str = "ready",
        **columns: Any,
    ) -> World:
        """`on` is a letter a rank, each with the same GPUs."""
        model = self.models[of] if of else None
        launch = (
            launch_of(model, model.spec.profiles[0]) if model else Launch("gone", "org/gone", {"name": "p"})
        )
        rank_state, waiting = columns.pop("rank_state", state), columns.pop("waiting", 0)
        running, knows_launch = columns.pop("running", 0), columns.pop("knows_launch", True)
        ranks = tuple(
            Rank(ord(node), number, tuple(f"{node}{gpu}" for gpu in gpus), rank_state, running, waiting,
                 knows_launch=knows_launch)
            for number, node in enumerate(on)
        )  # fmt: skip
        columns = {
            "created_at": ago(3600),
            "state_since": ago(3600),
            "fingerprint": launch.fingerprint,
        } | columns
        self.replicas.append(
            Replica(name, model.id if model else None, launch, ranks, state=state, **columns)
        )
        return self

    def stranger(
        self, name: str, on: str = "a", gpus: str = "", *, launch: Launch | None = None, **columns: Any
    ) -> World:
        if launch is None and (model := self.models.get("m")):
            launch = launch_of(model, model.spec.profiles[0])
        is_over_here = columns.pop("is_over_here", False)
        report = RankReport(
            name, 2, columns.pop("rank", 0), columns.pop("state", "ready"), launch=launch,
            gpus=tuple(f"{on}{gpu}" for gpu in gpus), **columns,
        )  # fmt: skip
        self.strangers.append(Stranger(ord(on), report, is_over_here))
        return self

    def failed(self, kind: str, *ago_s: float, on: str = "a", profile: int = 0) -> World:
        model = self.models["m"]
        launch = launch_of(model, model.spec.profiles[profile])
        self.failures += [
            (
                model.id,
                Failure(
                    f"failed-{each}",
                    launch,
                    ago(each),
                    kind=kind,
                    reason="It exited.",
                    node=ord(on),
                    created_at=ago(each + 5),
                ),
            )
            for each in ago_s
        ]
        return self

    def snapshot(self) -> Snapshot:
        return Snapshot(
            now=NOW,
            watching_since=self.watching_since,
            seen_revision=self.seen_revision,
            nodes=tuple(self.nodes.values()),
            models=tuple(self.models.values()),
            replicas=tuple(self.replicas),
            strangers=tuple(self.strangers),
            failures=tuple(self.failures),
            answered=frozenset(node.id for node in self.nodes.values() if node.freshness is Freshness.FRESH),
        )


def two_nodes() -> World:
    return World().node("a").node("b")


def told(decision: Plan) -> list[str]:
    """The plan as sentences, one an action."""
    return [
        *(f"adopt {each.report.replica} on {chr(each.node)}" for each in decision.adopt),
        *(f"lost {each.replica}: {each.why}" for each in decision.lost),
        *(f"drain {each.replica}: {each.why}" for each in decision.drain),
        *(f"stop {each.replica}: {each.why}" for each in decision.stop),
        *(f"evict {each.replica}: {each.why}" for each in decision.evict),
        *(
            f"start {each.launch.model}/{each.launch.profile['name']} on "
            + ", ".join(" ".join((chr(place.node), *place.gpus)) for place in each.places)
            + (f" for {each.replaces}" if each.replaces else "")
            for each in decision.start
        ),
        *(f"blocked {chr(each.model)} x{each.missing}: {each.why}" for each in decision.blocked),
        *(f"orphan {each.report.replica}: {each.why}" for each in decision.orphans),
        *(
            f"{'halt' if each.is_halted else 'rolled'} {chr(each.model)}: {each.why}"
            for each in decision.rolls
        ),
        *([f"held: {decision.held.why}"] if decision.held else []),
        *([f"alarm: {decision.alarm}"] if decision.alarm else []),
    ]


def acted(snapshot: Snapshot, decision: Plan) -> Snapshot:
    """The world once the plan is on record: nothing has been told to anybody yet."""
    replicas = {replica.id: replica for replica in snapshot.replicas}
    for adopt in decision.adopt:
        report = adopt.report
        replicas[report.replica] = Replica(
            id=report.replica,
            model=adopt.model,
            launch=adopt.launch,
            ranks=(Rank(adopt.node, gpus=tuple(report.gpus), state=report.state),),
            created_at=snapshot.now,
            state_since=snapshot.now,
            state=report.state,
            fingerprint=adopt.launch.fingerprint,
        )
    ended = (("drain", decision.drain), ("stop", decision.stop), ("drain", decision.evict))
    for wanted, ends in ended:
        for end in ends:
            replicas[end.replica] = replace(replicas[end.replica], wanted=wanted)
    for end in decision.lost:
        replicas[end.replica] = replace(replicas[end.replica], state="lost")
    for start in decision.start:
        name = f"new{len(replicas)}"
        replicas[name] = Replica(
            id=name,
            model=start.model,
            launch=start.launch,
            ranks=tuple(Rank(place.node, number, place.gpus) for number, place in enumerate(start.places)),
            created_at=snapshot.now,
            state_since=snapshot.now,
            fingerprint=start.launch.fingerprint,
            replaces=start.replaces,
        )
    over = {each.model: each for each in decision.rolls}
    models = [
        replace(model, roll=_after(model.roll, over[model.id])) if model.id in over else model
        for model in snapshot.models
    ]
    adopted = {adopt.report.replica for adopt in decision.adopt}
    strangers = tuple(each for each in snapshot.strangers if each.report.replica not in adopted)
    return replace(snapshot, models=tuple(models), replicas=tuple(replicas.values()), strangers=strangers)


def _after(roll: Roll | None, over: RollEnd) -> Roll | None:
    return replace(roll, halted=over.why) if roll and over.is_halted else None
