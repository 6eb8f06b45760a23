"""A cluster of values: agents as state machines, a database in dictionaries, passes that may die half-way.

It does with a plan what `nodes/reconcile.py` and the agents do, in the same order, and nothing that needs a
clock, a socket or a table. Whatever happens is drawn from one seeded source, so that a history can be had
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random

from catalog.spec import ModelSpec
from nodes import scaling
from nodes.buckets import Plan
from nodes.orders import Order, orders
from nodes.placement import Node, freshness
from nodes.plan import plan
from nodes.protocol import (
    CAPACITY,
    CONFIGURATION,
    DRAINING,
    FAILED,
    FETCHING,
    NODE,
    READY,
    STARTING,
    STOPPED,
    TRANSIENT,
    EngineReport,
    GpuReport,
    RankReport,
    StateReport,
)
from nodes.retry import Failure
from nodes.snapshot import (
    DRAIN,
    LOST,
    PENDING,
    RUN,
    STOP,
    Demand,
    Model,
    Rank,
    Replica,
    Roll,
    Snapshot,
    Stranger,
)

TELLING = (FAILED, PENDING, STOPPED, DRAINING, FETCHING, STARTING, READY)
OVER = (STOPPED, FAILED)
BEAT = timedelta(seconds=5)


@dataclass
class Agent:
    """A node's agent: runs engines, obeys, refuses what is taken or was deleted, may be out of reach."""

    id: int
    gpus: int
    fabric: str
    is_reachable: bool = True
    is_cordoned: bool = False
    is_draining: bool = False
    seen_at: datetime | None = None
    engines: dict[tuple[str, int], RankReport] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)

    def report(self) -> StateReport:
        return StateReport(
            "cluster",
            f"n{self.id}",
            gpus=tuple(
                GpuReport(f"n{self.id}-{index}", index, gpu_class="sim") for index in range(self.gpus)
            ),
            engines=(EngineReport("sim"),),
            fabric=self.fabric,
            runs_gangs=True,
            ranks=tuple(self.engines.values()),
        )

    def obey(self, order: Order) -> RankReport:
        """What it says to a message; the message may be one that it has had before."""
        key = (order.replica, order.rank)
        known = self.engines.get(key)
        if order.launch is None:
            self.tombstones.add(order.replica)
            if known is None:
                return self._says(order, STOPPED)
            self.engines[key] = replace(known, state=DRAINING if known.state == READY else STOPPED)
            return self.engines[key]
        if order.replica in self.tombstones:
            return self._says(order, FAILED, TRANSIENT)
        if known is not None:
            return known
        if bool(order.rank) != bool(order.meeting):
            return self._says(order, FAILED, CONFIGURATION)
        taken = {gpu for each in self.engines.values() if each.state not in OVER for gpu in each.gpus}
        if taken.intersection(order.gpus):
            return self._says(order, FAILED, NODE)
        meeting = "" if order.rank else f"n{self.id}:{order.replica}"
        self.engines[key] = replace(
            self._says(order, FETCHING), gpus=order.gpus, launch=order.launch, meeting=meeting
        )
        return self.engines[key]

    @staticmethod
    def _says(order: Order, state: str, kind: str = "") -> RankReport:
        return RankReport(order.replica, order.generation, order.rank, state, kind=kind, reason="It said so.")


class Cluster:
    """Everything, and what may happen to it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.started_at = self.now
        self.is_calm = False
        self.agents = {
            number: Agent(
                number, self.random.choice([0, 1, 2, 4, 4, 8]), self.random.choice(["", "f", "f", "g"])
            )
            for number in range(1, 6)
        }
        self.models: dict[int, Model] = {}
        self.replicas: dict[str, Replica] = {}
        self.ended: dict[str, Replica] = {}
        self.failures: list[tuple[int, Failure]] = []
        self.last_plan = Plan()
        self.history: list[str] = []
        self.numbered = 0
        for number in range(4):
            self.models[number] = Model(number, self._spec(number))
        usual = (self.run_pass, self.engines_go_on)
        better = (self.regain_contact, self.uncordon, self.stop_asking, self.add)
        worse = (
            self.ask, self.ask, self.crash, self.lose_contact, self.reboot, self.edit, self.scale,
            self.remove, self.cordon, self.drain_node, self.roll, self.stop_one, self.forget,
        )  # fmt: skip
        self.events: tuple[Callable[[], object], ...] = (*usual, *better, *worse)
        # No two histories are troubled by the same.
        troubles = [self.random.choice([0, 0, 1, 2, 4]) for _ in worse]
        self.weather = [20, 14, *(3 for _ in better), *troubles]

    # --- what may happen ------------------------------------------------------------------------------

    def step(self) -> None:
        """Something happens, and time goes on; a pass more often than anything else."""
        (event,) = self.random.choices(self.events, self.weather)
        self.history.append(event.__name__)
        event()
        self.now += timedelta(seconds=self.random.choice([0, 1, 1, 2, 5, 5, 30]))

    def engines_go_on(self) -> None:
        for agent in self.agents.values():
            for key, engine in list(agent.engines.items()):
                self._go_on(agent, key, engine)

    def _go_on(self, agent: Agent, key: tuple[str, int], engine: RankReport) -> None:
        following = {FETCHING: STARTING, STARTING: READY, DRAINING: STOPPED}
        if engine.state in OVER:
            if agent.is_reachable and key[0] not in self.replicas:
                del agent.engines[key]
            return
        if engine.state == STARTING and not self.is_calm and self.random.random() < 0.1:
            kind = self.random.choice([TRANSIENT, TRANSIENT, NODE, CAPACITY, CONFIGURATION])
            agent.engines[key] = replace(engine, state=FAILED, kind=kind, reason="It failed to load.")
        elif engine.state in following:
            agent.engines[key] = replace(engine, state=following[engine.state], running=0, waiting=0)
        elif engine.state == READY:
            busy = 0 if self.is_calm else self.random.choice([0, 0, 0, 0, 1, 3])
            agent.engines[key] = replace(engine, running=busy, waiting=max(0, busy - 1))

    def crash(self) -> None:
        running = [
            (agent, key)
            for agent in self.agents.values()
            for key, engine in agent.engines.items()
            if engine.state not in OVER
        ]
        if running:
            agent, key = self.random.choice(running)
            gone = replace(agent.engines[key], state=FAILED, kind=TRANSIENT, reason="It exited.")
            agent.engines[key] = gone

    def lose_contact(self) -> None:
        self._agent().is_reachable = False

    def regain_contact(self) -> None:
        self._agent().is_reachable = True

    def reboot(self) -> None:
        """All its engines are gone, and the agent knows that they were there."""
        agent = self._agent()
        for key, engine in agent.engines.items():
            if engine.state not in OVER:
                agent.engines[key] = replace(
                    engine, state=FAILED, kind=TRANSIENT, reason="The machine restarted."
                )

    def edit(self) -> None:
        self._change(lambda model: self._spec(model.id, scaling=model.spec.scaling.min))

    def scale(self) -> None:
        self._change(lambda model: self._spec(model.id, like=model.spec))

    def remove(self) -> None:
        if len(self.models) > 1:
            number = self.random.choice(sorted(self.models))
            del self.models[number]
            self.failures = [each for each in self.failures if each[0] != number]
            for id, replica in self.replicas.items():
                if replica.model == number:
                    self.replicas[id] = replace(replica, model=None)

    def add(self) -> None:
        number = next(each for each in range(9) if each not in self.models)
        if number < 5:
            self.models[number] = Model(number, self._spec(number))

    def ask(self) -> None:
        number = self.random.choice(sorted(self.models))
        demand = Demand(self.now, self.random.randint(0, 3), self.random.randint(0, 2))
        self.models[number] = replace(self.models[number], demand=demand)

    def stop_asking(self) -> None:
        for number, model in self.models.items():
            self.models[number] = replace(
                model, demand=replace(model.demand, waiting=0, in_flight=0, is_known=True)
            )

    def cordon(self) -> None:
        self._agent().is_cordoned = True

    def uncordon(self) -> None:
        agent = self._agent()
        agent.is_cordoned = agent.is_draining = False

    def drain_node(self) -> None:
        agent = self._agent()
        agent.is_cordoned = agent.is_draining = True

    def roll(self) -> None:
        number = self.random.choice(sorted(self.models))
        keep = sum(each.model == number and each.wanted == RUN for each in self.replicas.values())
        self.models[number] = replace(self.models[number], roll=Roll(self.now, "ann", keep))

    def stop_one(self) -> None:
        if self.replicas:
            id = self.random.choice(sorted(self.replicas))
            self.replicas[id] = replace(self.replicas[id], wanted=STOP)

    def forget(self) -> None:
        """The database is restored from a moment at which it did not know this replica."""
        if self.replicas and self.random.random() < 0.3:
            del self.replicas[self.random.choice(sorted(self.replicas))]

    def calm_down(self) -> None:
        """Faults end, and nobody asks for anything more."""
        self.is_calm = True
        for agent in self.agents.values():
            agent.is_reachable = True
        self.stop_asking()

    # --- a pass ---------------------------------------------------------------------------------------

    def run_pass(self) -> None:
        """Whole, or dead at one of the places where the real one may die."""
        dies = "" if self.is_calm else self.random.choice(["", "", "", "planned", "committed", "telling"])
        before = self.observe()
        decision = plan(before)
        self.last_plan = decision
        if dies == "planned":
            return
        self.commit(before, decision)
        to_tell = orders(replace(before, replicas=tuple(self.replicas.values())))
        if dies == "committed":
            return
        if dies == "telling":
            to_tell = to_tell[: self.random.randint(0, len(to_tell))]
        for order in to_tell:
            answer = self.agents[order.node].obey(order)
            if self.is_calm or self.random.random() < 0.8:  # an answer may be lost on its way
                self._hear_answer(order, answer)

    def observe(self) -> Snapshot:
        """Hear the agents within reach, and settle what became of each replica."""
        answered = {agent.id for agent in self.agents.values() if agent.is_reachable}
        strangers = []
        for number in answered:
            self.agents[number].seen_at = self.now
            heard = dict(self.agents[number].engines)
            for replica in list(self.replicas.values()):
                ranks = tuple(
                    self._heard(rank, heard.pop((replica.id, rank.rank), None))
                    if rank.node == number
                    else rank
                    for rank in replica.ranks
                )
                self.replicas[replica.id] = replace(replica, ranks=ranks)
            strangers += [Stranger(number, said, said.replica in self.ended) for said in heard.values()]
        for id in list(self.replicas):
            self._settle(id, answered)
        self._keep_loads()
        return Snapshot(
            now=self.now,
            nodes=tuple(self._node(agent) for agent in self.agents.values()),
            models=tuple(self.models.values()),
            replicas=tuple(self.replicas.values()),
            strangers=tuple(strangers),
            failures=tuple(each for each in self.failures),
            answered=frozenset(answered),
            idle_timeout_ns=1200 * 10**9,
            watching_since=self.started_at,
        )

    def commit(self, before: Snapshot, decision: Plan) -> None:
        for adopt in decision.adopt:
            said = adopt.report
            self.replicas[said.replica] = Replica(
                said.replica, adopt.model, adopt.launch,
                (Rank(adopt.node, said.rank, tuple(said.gpus), said.state),),
                self.now, self.now, said.state, adopt.launch.fingerprint,
            )  # fmt: skip
        for end in decision.lost:
            self.replicas[end.replica] = replace(self.replicas[end.replica], state=LOST)
        ended = ((DRAIN, decision.drain), (STOP, decision.stop), (DRAIN, decision.evict))
        for wanted, ends in ended:
            for end in ends:
                self.replicas[end.replica] = replace(self.replicas[end.replica], wanted=wanted)
        if decision.held:  # a person says yes, sooner or later
            for wanted, ends in ((DRAIN, decision.held.drain), (STOP, decision.held.stop)):
                for end in ends:
                    if self.is_calm or self.random.random() < 0.5:
                        self.replicas[end.replica] = replace(self.replicas[end.replica], wanted=wanted)
        for start in decision.start:
            self.numbered += 1
            id = f"r{self.numbered:05d}"
            ranks = tuple(Rank(place.node, number, place.gpus) for number, place in enumerate(start.places))
            self.replicas[id] = Replica(
                id, start.model, start.launch, ranks, self.now, self.now,
                fingerprint=start.launch.fingerprint, replaces=start.replaces,
            )  # fmt: skip
        for over in decision.rolls:
            model = self.models[over.model]
            halted = replace(model.roll, halted=over.why) if over.is_halted and model.roll else None
            self.models[over.model] = replace(model, roll=halted)

    def _heard(self, rank: Rank, said: RankReport | None) -> Rank:
        if said is None:
            return replace(rank, state=PENDING)
        return replace(
            rank, state=said.state, running=said.running, waiting=said.waiting, meeting=said.meeting
        )

    def _settle(self, id: str, answered: set[int]) -> None:
        replica = self.replicas[id]
        if replica.wanted != RUN and len(replica.ranks) > 1:  # its engine is gone: its GPUs are free
            ranks = tuple(replace(rank, gpus=()) if rank.state in OVER else rank for rank in replica.ranks)
            replica = self.replicas[id] = replace(replica, ranks=ranks)
        if not all(rank.node in answered for rank in replica.ranks):
            return
        telling = min(replica.ranks, key=lambda rank: (TELLING.index(rank.state), rank.rank))
        is_partly_over = replica.is_broken and not all(rank.is_over for rank in replica.ranks)
        state = DRAINING if is_partly_over else telling.state
        if state == replica.state:
            return
        replica = self.replicas[id] = replace(replica, state=state, state_since=self.now)
        if replica.state in OVER:
            self.ended[id] = self.replicas.pop(id)
            if replica.state == FAILED and replica.wanted == RUN and replica.model is not None:
                engine = self.agents[telling.node].engines.get((id, telling.rank))
                kind = engine.kind if engine else TRANSIENT
                self.failures.append(
                    (
                        replica.model,
                        Failure(
                            id, replica.launch, self.now, kind, "It failed.", telling.node, replica.created_at
                        ),
                    )
                )

    def _hear_answer(self, order: Order, answer: RankReport) -> None:
        replica = self.replicas.get(order.replica)
        if replica is None:
            return
        ranks = tuple(
            self._heard(rank, answer) if rank.rank == order.rank else rank for rank in replica.ranks
        )
        self.replicas[replica.id] = replace(replica, ranks=ranks)
        self._settle(replica.id, {agent.id for agent in self.agents.values() if agent.is_reachable})

    def _keep_loads(self) -> None:
        for number, model in self.models.items():
            replicas = [each for each in self.replicas.values() if each.model == number]
            self.models[number] = replace(model, load=scaling.load_now(model, replicas, model.load, self.now))

    def _node(self, agent: Agent) -> Node:
        return Node(
            agent.id,
            f"n{agent.id}",
            freshness(
                self.now - agent.seen_at if agent.seen_at else None,
                self.now - self.started_at,
                suspect_after_s=10,
                lost_after_s=90,
            ),
            is_cordoned=agent.is_cordoned,
            is_draining=agent.is_draining,
            report=replace(agent.report(), ranks=()) if agent.seen_at else None,
        )

    # --- what must hold -------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """What is wrong at this moment, whatever has happened."""
        faults = []
        claims = Counter(
            (rank.node, gpu) for each in self.replicas.values() for rank in each.ranks for gpu in rank.gpus
        )
        faults += [
            f"GPU {gpu} of node {node} is claimed twice" for (node, gpu), count in claims.items() if count > 1
        ]
        for agent in self.agents.values():
            running = [each for each in agent.engines.values() if each.state not in OVER]
            held = Counter(gpu for each in running for gpu in each.gpus)
            faults += [f"two engines run on {gpu}" for gpu, count in held.items() if count > 1]
        return faults

    def unsettled(self) -> list[str]:
        """What is not as it is wanted, once nothing happens any more."""
        faults = []
        blocked = {each.model for each in self.last_plan.blocked}
        for number, model in self.models.items():
            mine = [each for each in self.replicas.values() if each.model == number]
            ready = sum(each.is_ready for each in mine)
            low, high = model.spec.scaling.min, model.spec.scaling.max
            if not (low <= ready <= high or number in blocked):
                faults.append(f"model {number}: {ready} ready, {low} to {high} wanted, and nothing is said")
        faults += [f"{each.id} is still {each.state}" for each in self.replicas.values() if not each.is_ready]
        faults += [f"{each.id} is to {each.wanted}" for each in self.replicas.values() if each.wanted != RUN]
        assigned = {(each.id, rank.rank) for each in self.replicas.values() for rank in each.ranks}
        orphans = {(each.report.replica, each.report.rank) for each in self.last_plan.orphans}
        for agent in self.agents.values():
            running = {key for key, engine in agent.engines.items() if engine.state not in OVER}
            faults += [f"engine {key} runs for nobody" for key in running - assigned - orphans]
            if agent.is_draining and agent.id in {
                rank.node for each in self.replicas.values() for rank in each.ranks
            }:
                stays = any("stays on" in each.why for each in self.last_plan.blocked)
                faults += [] if stays else [f"n{agent.id} is draining and not empty"]
        return faults

    # --- parts ----------------------------------------------------------------------------------------

    def _agent(self) -> Agent:
        return self.agents[self.random.choice(sorted(self.agents))]

    def _change(self, spec: Callable[[Model], ModelSpec]) -> None:
        number = self.random.choice(sorted(self.models))
        self.models[number] = replace(self.models[number], spec=spec(self.models[number]))

    def _spec(self, number: int, *, like: ModelSpec | None = None, scaling: int | None = None) -> ModelSpec:
        low = self.random.choice([0, 0, 0, 1, 2]) if scaling is None else scaling
        high = low + self.random.choice([0, 1, 1, 2])
        if like is not None:
            return replace(like, scaling=replace(like.scaling, min=low, max=high))
        parts, gpus = self.random.choice([(1, 1), (1, 1), (1, 2), (2, 1)]), self.random.randint(1, 99)
        profiles = [
            {"name": name, "engine": "sim", "gpu_class": "sim", "tp": nodes * each, "nodes": nodes,
             "args": ["--seed", str(gpus)], "priority": -number}
            for number, (name, (nodes, each)) in enumerate((("p", parts), ("q", (1, 1))))
        ]  # fmt: skip
        return ModelSpec.load(
            {
                "name": f"m{number}",
                "source": "org/m",
                "profiles": profiles,
                "scaling": {"min": low, "max": high},
            }
        )
