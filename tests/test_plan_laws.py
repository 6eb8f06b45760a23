"""Laws of the plan, over worlds that nobody would think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from catalog.spec import ModelSpec
from nodes.buckets import Plan
from nodes.placement import Freshness, Node
from nodes.plan import plan
from nodes.protocol import (
    FAILED,
    RANK_STATES,
    STOPPED,
    EngineReport,
    GpuReport,
    Launch,
    RankReport,
    StateReport,
)
from nodes.retry import Failure
from nodes.snapshot import Demand, Model, Rank, Replica, Snapshot, Stranger, launch_of
from tests.worlds import NOW, ago

ALIVE = ("pending", *(state for state in RANK_STATES if state not in (STOPPED, FAILED)))


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    """Nodes with few GPUs, models that want them, and replicas that hold them without conflict."""
    nodes = []
    for number in range(draw(st.integers(0, 4))):
        name = f"n{number}"
        gpus = tuple(
            GpuReport(f"{name}-{index}", index, gpu_class="sim") for index in range(draw(st.integers(0, 4)))
        )
        freshness = draw(st.sampled_from([Freshness.FRESH] * 3 + list(Freshness)))
        report = StateReport("cluster", name, gpus=gpus, engines=(EngineReport("sim"),))
        is_known = freshness is not Freshness.NEVER
        nodes.append(
            Node(
                number,
                name,
                freshness,
                is_cordoned=draw(st.booleans()) and draw(st.booleans()),
                report=report if is_known else None,
            )
        )
    models = []
    for number in range(draw(st.integers(0, 4))):
        low = draw(st.integers(0, 3))
        profile = {"name": "p", "engine": "sim", "gpu_class": "sim", "tp": draw(st.integers(1, 3))}
        scaling = {
            "min": low,
            "max": low + draw(st.integers(0, 2)),
            "idle_timeout": draw(st.sampled_from([0, "1s"])),
        }
        spec = ModelSpec.load(
            {"name": f"m{number}", "source": "org/m", "profiles": [profile], "scaling": scaling}
        )
        asked_at = draw(st.none() | st.floats(0, 2000).map(ago))
        demand = Demand(asked_at, draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.booleans()))
        models.append(Model(number, spec, demand=demand))
    free = {node.id: [gpu.id for gpu in node.report.gpus] if node.report else [] for node in nodes}

    def take(node: Node) -> tuple[str, ...]:
        count = draw(st.integers(0, len(free[node.id])))
        taken, free[node.id] = free[node.id][:count], free[node.id][count:]
        return tuple(taken)

    replicas, strangers, failures = [], [], []
    launches = {model.id: launch_of(model, model.spec.profiles[0]) for model in models}
    if nodes and models:
        for number in range(draw(st.integers(0, 5))):
            node, model = draw(st.sampled_from(nodes)), draw(st.sampled_from(models))
            state = draw(st.sampled_from(ALIVE))
            is_lost = node.freshness is Freshness.LOST and draw(st.booleans())
            replicas.append(
                Replica(
                    id=f"r{number}",
                    model=draw(st.sampled_from([model.id, model.id, None])),
                    launch=launches[model.id],
                    ranks=(Rank(node.id, gpus=take(node), state=state),),
                    created_at=ago(draw(st.floats(0, 9000))),
                    state_since=ago(draw(st.floats(0, 9000))),
                    state="lost" if is_lost else state,
                    fingerprint=draw(st.sampled_from([launches[model.id].fingerprint, "", "0" * 16])),
                    wanted=draw(st.sampled_from(["run", "run", "run", "drain", "stop"])),
                )
            )
        for number in range(draw(st.integers(0, 2))):
            node, model = draw(st.sampled_from(nodes)), draw(st.sampled_from(models))
            if node.freshness is not Freshness.FRESH:  # a stranger was reported just now
                continue
            launch = draw(st.sampled_from([launches[model.id], None, Launch("x", "", {})]))
            state = draw(st.sampled_from(RANK_STATES))
            said = RankReport(f"s{number}", 1, 0, state, gpus=take(node), launch=launch)
            strangers.append(Stranger(node.id, said, draw(st.booleans()) and draw(st.booleans())))
        for number in range(draw(st.integers(0, 3))):
            model = draw(st.sampled_from(models))
            kind = draw(st.sampled_from(["transient", "configuration", "disk", "node"]))
            at = ago(draw(st.floats(0, 900)))
            node = draw(st.sampled_from(nodes))
            failures.append(
                (model.id, Failure(f"f{number}", launches[model.id], at, kind, "It exited.", node.id))
            )
    answered = frozenset(node.id for node in nodes if node.freshness is Freshness.FRESH)
    return Snapshot(
        NOW,
        tuple(nodes),
        tuple(models),
        tuple(replicas),
        tuple(strangers),
        tuple(failures),
        answered=answered,
    )


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
    for number, start in enumerate(decision.start):
        replicas[f"new{number}"] = Replica(
            id=f"new{number}",
            model=start.model,
            launch=start.launch,
            ranks=tuple(Rank(place.node, number, place.gpus) for number, place in enumerate(start.places)),
            created_at=snapshot.now,
            state_since=snapshot.now,
            fingerprint=start.launch.fingerprint,
        )
    adopted = {adopt.report.replica for adopt in decision.adopt}
    strangers = tuple(each for each in snapshot.strangers if each.report.replica not in adopted)
    return replace(snapshot, replicas=tuple(replicas.values()), strangers=strangers)


def node_of(snapshot: Snapshot, node_id: int) -> Node:
    return next(node for node in snapshot.nodes if node.id == node_id)


def alive(snapshot: Snapshot, model: Model) -> list[Replica]:
    lost = {node.id for node in snapshot.nodes if node.freshness is Freshness.LOST}
    return [
        replica
        for replica in snapshot.replicas
        if replica.model == model.id and not any(rank.node in lost for rank in replica.ranks)
    ]


def held(snapshot: Snapshot) -> list[tuple[int, str]]:
    """Every GPU that something holds, once for each holder."""
    claims = [(rank.node, gpu) for each in snapshot.replicas for rank in each.ranks for gpu in rank.gpus]
    running = [each for each in snapshot.strangers if each.report.state not in (STOPPED, FAILED)]
    return claims + [(each.node, gpu) for each in running for gpu in each.report.gpus]


@given(worlds())
def test_acting_on_a_plan_leaves_nothing_to_plan(world: Snapshot) -> None:
    after = acted(world, plan(world))
    again = plan(after)
    assert not again.acts, again
    assert {each.model for each in again.blocked} == {each.model for each in plan(world).blocked}


@given(worlds())
def test_nothing_is_started_beyond_the_maximum(world: Snapshot) -> None:
    decision = plan(world)
    after = acted(world, decision)
    started = Counter(start.model for start in decision.start)
    for model in world.models:
        if started[model.id]:
            assert len(alive(after, model)) <= model.spec.scaling.max
        kept = [replica for replica in alive(after, model) if replica.wanted == "run"]
        assert len(kept) <= model.spec.scaling.max


@given(worlds())
def test_no_gpu_is_claimed_twice(world: Snapshot) -> None:
    twice = [gpu for gpu, count in Counter(held(acted(world, plan(world)))).items() if count > 1]
    assert not twice


@given(worlds())
def test_only_a_fresh_and_open_node_gets_something_that_fits(world: Snapshot) -> None:
    for start in plan(world).start:
        assert len(start.places) == start.launch.profile["nodes"]
        for place in start.places:
            node = node_of(world, place.node)
            assert node.freshness is Freshness.FRESH
            assert not node.is_cordoned
            assert node.report is not None
            assert {gpu.id for gpu in node.report.gpus}.issuperset(place.gpus)
            assert len(place.gpus) == start.launch.profile["gpus_per_node"]


@given(worlds())
def test_never_fewer_than_the_minimum_while_there_is_room(world: Snapshot) -> None:
    world = replace(world, failures=())
    decision = plan(world)
    after = acted(world, decision)
    taken = set(held(after))
    holes = [
        sum((node.id, gpu.id) not in taken for gpu in node.report.gpus)
        for node in world.nodes
        if node.report and node.freshness is Freshness.FRESH and not node.is_cordoned
    ]
    for model in world.models:
        scaling = model.spec.scaling
        kept = [replica for replica in alive(after, model) if replica.wanted == "run"]
        if len(kept) < scaling.min and len(alive(after, model)) < scaling.max:
            assert max(holes, default=0) < model.spec.profiles[0].gpus_per_node
            assert model.id in {each.model for each in decision.blocked}


@given(worlds(), st.lists(st.sampled_from(["--ttft", "1s"]), min_size=1))
def test_an_edit_of_a_profile_ends_nothing(world: Snapshot, args: Sequence[str]) -> None:
    """As many end with the edit as without it: those that are too many, idle, or of no model."""

    def edited(model: Model) -> Model:
        (profile,) = model.spec.profiles
        return replace(model, spec=replace(model.spec, profiles=(replace(profile, args=tuple(args)),)))

    after = plan(replace(world, models=tuple(edited(model) for model in world.models)))
    before = plan(world)

    def ends(decision: Plan) -> Counter[int | None]:
        models = {replica.id: replica.model for replica in world.replicas}
        models |= {adopt.report.replica: adopt.model for adopt in decision.adopt}
        return Counter(models[end.replica] for end in (*decision.drain, *decision.stop))

    assert ends(after) == ends(before)


@given(worlds())
def test_every_end_has_its_reason(world: Snapshot) -> None:
    decision = plan(world)
    replicas = {replica.id: replica for replica in acted(world, decision).replicas}
    models = {model.id: model for model in world.models}
    for end in (*decision.drain, *decision.stop):
        replica = replicas[end.replica]
        if replica.model is None:
            continue
        model = models[replica.model]
        wanted = [
            each for each in alive(acted(world, Plan(adopt=decision.adopt)), model) if each.wanted == "run"
        ]
        is_idle = model.spec.on_demand and model.demand.is_known and not model.demand.waiting
        assert len(wanted) > model.spec.scaling.max or (is_idle and not model.demand.in_flight)


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(world: Snapshot, random: Random) -> None:
    shuffled = replace(
        world,
        nodes=tuple(random.sample(world.nodes, len(world.nodes))),
        models=tuple(random.sample(world.models, len(world.models))),
        replicas=tuple(random.sample(world.replicas, len(world.replicas))),
        strangers=tuple(random.sample(world.strangers, len(world.strangers))),
        failures=tuple(random.sample(world.failures, len(world.failures))),
    )
    assert plan(shuffled) == plan(world)


@given(worlds())
def test_silence_alone_ends_nothing(world: Snapshot) -> None:
    quiet = replace(
        world,
        nodes=tuple(
            replace(node, freshness=Freshness.SUSPECT) if node.freshness is Freshness.FRESH else node
            for node in world.nodes
        ),
    )
    heard, unheard = plan(world), plan(quiet)
    assert (unheard.drain, unheard.stop, unheard.lost) == (heard.drain, heard.stop, heard.lost)
    assert not unheard.start


@given(worlds())
def test_what_waits_says_why(world: Snapshot) -> None:
    for each in plan(world).blocked:
        assert each.missing > 0
        assert each.why
