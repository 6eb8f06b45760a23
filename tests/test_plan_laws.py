"""Laws of the plan, over worlds that nobody would think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
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
from nodes.snapshot import (
    PRESSED,
    SLACK,
    Demand,
    Load,
    Model,
    Rank,
    Replica,
    Roll,
    Snapshot,
    Stranger,
    launch_of,
)
from tests.worlds import NOW, acted, ago

ALIVE = ("pending", *(state for state in RANK_STATES if state not in (STOPPED, FAILED)))
seconds = st.integers(0, 9000)


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    """Nodes with few GPUs, models that want them, and replicas that hold them without conflict."""
    nodes = [draw(node_called(number)) for number in range(draw(st.integers(0, 4)))]
    models = [draw(model_called(number)) for number in range(draw(st.integers(0, 4)))]
    free = {node.id: [gpu.id for gpu in node.report.gpus] if node.report else [] for node in nodes}

    def take(node: Node) -> tuple[str, ...]:
        count = draw(st.integers(0, len(free[node.id])))
        taken, free[node.id] = free[node.id][:count], free[node.id][count:]
        return tuple(taken)

    replicas: list[Replica] = []
    strangers: list[Stranger] = []
    failures: list[tuple[int, Failure]] = []
    launches = {model.id: launch_of(model, model.spec.profiles[0]) for model in models}
    if nodes and models:
        for number in range(draw(st.integers(0, 6))):
            model = draw(st.sampled_from(models))
            parts = min(model.spec.profiles[0].nodes, len(nodes))
            on = draw(
                st.lists(
                    st.sampled_from(nodes), min_size=parts, max_size=parts, unique_by=lambda each: each.id
                )
            )
            state = draw(st.sampled_from(ALIVE))
            is_lost = any(node.freshness is Freshness.LOST for node in on) and draw(st.booleans())
            others = [each.id for each in replicas if each.model == model.id]
            replicas.append(
                Replica(
                    id=f"r{number}",
                    model=draw(st.sampled_from([model.id, model.id, model.id, None])),
                    launch=launches[model.id],
                    ranks=tuple(
                        Rank(node.id, part, take(node), state, draw(st.integers(0, 1)))
                        for part, node in enumerate(on)
                    ),
                    created_at=ago(draw(seconds)),
                    state_since=ago(draw(seconds)),
                    state="lost" if is_lost else state,
                    fingerprint=draw(st.sampled_from([launches[model.id].fingerprint, "", "0" * 16])),
                    wanted=draw(st.sampled_from(["run", "run", "run", "drain", "stop"])),
                    replaces=draw(st.sampled_from(["", "", *others])),
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
            model, node = draw(st.sampled_from(models)), draw(st.sampled_from(nodes))
            kind = draw(st.sampled_from(["transient", "configuration", "disk", "node"]))
            age = draw(st.integers(0, 900))
            failure = Failure(
                f"f{number}", launches[model.id], ago(age), kind, "It exited.", node.id, ago(age + 5)
            )
            failures.append((model.id, failure))
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


@st.composite
def node_called(draw: st.DrawFn, number: int) -> Node:
    name = f"n{number}"
    gpus = tuple(
        GpuReport(f"{name}-{index}", index, gpu_class="sim") for index in range(draw(st.integers(0, 4)))
    )
    freshness = draw(st.sampled_from([Freshness.FRESH] * 5 + list(Freshness)))
    fabric = draw(st.sampled_from(["", "f", "f", "g"]))
    report = StateReport(
        "cluster", name, gpus=gpus, engines=(EngineReport("sim"),), fabric=fabric, runs_gangs=bool(fabric)
    )
    is_cordoned = draw(st.integers(0, 3)) == 0
    return Node(
        number,
        name,
        freshness,
        is_cordoned=is_cordoned,
        is_draining=is_cordoned and draw(st.booleans()),
        report=None if freshness is Freshness.NEVER else report,
    )


@cache
def spec_of(number: int, parts: int, gpus: int, low: int, high: int, idle_timeout: int | str) -> ModelSpec:
    profile = {"name": "p", "engine": "sim", "gpu_class": "sim", "tp": parts * gpus, "nodes": parts}
    scaling = {"min": low, "max": high, "idle_timeout": idle_timeout}
    return ModelSpec.load(
        {"name": f"m{number}", "source": "org/m", "profiles": [profile], "scaling": scaling}
    )


@st.composite
def model_called(draw: st.DrawFn, number: int) -> Model:
    low = draw(st.integers(0, 3))
    parts, gpus = draw(st.sampled_from([1, 1, 1, 2])), draw(st.integers(1, 3))
    high, idle_timeout = low + draw(st.integers(0, 2)), draw(st.sampled_from([0, "1s"]))
    spec = spec_of(number, parts, gpus, low, high, idle_timeout)
    asked_at = ago(draw(st.integers(0, 2000))) if draw(st.booleans()) else None
    demand = Demand(asked_at, draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.booleans()))
    level = draw(st.sampled_from(["", PRESSED, SLACK]))
    load = Load(level, ago(draw(st.integers(0, 600))), 1) if level else None
    roll = Roll(ago(draw(seconds)), "ann", draw(st.integers(0, 3))) if draw(st.booleans()) else None
    return Model(number, spec, demand=demand, load=load, roll=roll)


def without_words(world: Snapshot) -> Snapshot:
    """The same where no person asked for anything to move, and nothing is busy or slack."""
    return replace(
        world,
        nodes=tuple(replace(node, is_draining=False) for node in world.nodes),
        models=tuple(replace(model, load=None, roll=None) for model in world.models),
        replicas=tuple(replace(replica, replaces="") for replica in world.replicas),
    )


def alive(snapshot: Snapshot, model: Model) -> list[Replica]:
    return [each for each in snapshot.replicas if each.model == model.id and not is_lost(snapshot, each)]


def is_lost(snapshot: Snapshot, replica: Replica) -> bool:
    lost = {node.id for node in snapshot.nodes if node.freshness is Freshness.LOST}
    return any(rank.node in lost for rank in replica.ranks)


def is_stand_in(snapshot: Snapshot, replica: Replica) -> bool:
    """Whether it will take the place of one that still runs, as far as is known, and is not ready for it. One
    has one: whatever else would take its place counts already."""
    running = [each for each in snapshot.replicas if each.wanted == "run" and not is_lost(snapshot, each)]
    others = [
        each.id
        for each in running
        if not each.is_ready and (each.model, each.replaces) == (replica.model, replica.replaces)
    ]
    return replica.replaces in {each.id for each in running} and others[:1] == [replica.id]


def held(snapshot: Snapshot) -> list[tuple[int, str]]:
    """Every GPU that something holds, once for each holder."""
    claims = [(rank.node, gpu) for each in snapshot.replicas for rank in each.ranks for gpu in rank.gpus]
    running = [each for each in snapshot.strangers if each.report.state not in (STOPPED, FAILED)]
    return claims + [(each.node, gpu) for each in running for gpu in each.report.gpus]


@given(worlds())
def test_acting_on_a_plan_leaves_nothing_to_plan(world: Snapshot) -> None:
    decision = plan(world)
    again = plan(acted(world, decision))
    assert not again.acts, (decision, again)
    assert {each.model for each in again.blocked} == {each.model for each in decision.blocked}
    assert (again.held, again.alarm) == (decision.held, decision.alarm)


@given(worlds())
def test_nothing_is_started_beyond_the_maximum(world: Snapshot) -> None:
    """What is to take the place of another does not count until it does."""
    decision = plan(world)
    after = acted(world, decision)
    for model in world.models:
        counted = [each for each in alive(after, model) if not is_stand_in(after, each)]
        if any(start.model == model.id and not start.replaces for start in decision.start):
            assert len(counted) <= model.spec.scaling.max
        if not decision.held and not decision.alarm:
            kept = [each for each in counted if each.wanted == "run"]
            assert len(kept) <= model.spec.scaling.max


@given(worlds())
def test_no_gpu_is_claimed_twice(world: Snapshot) -> None:
    twice = [gpu for gpu, count in Counter(held(acted(world, plan(world)))).items() if count > 1]
    assert not twice


@given(worlds())
def test_only_a_fresh_and_open_node_gets_something_that_fits(world: Snapshot) -> None:
    nodes = {node.id: node for node in world.nodes}
    for start in plan(world).start:
        for place in start.places:
            node = nodes[place.node]
            assert node.freshness is Freshness.FRESH
            assert not node.is_cordoned
            assert not node.is_draining
            assert node.report is not None
            assert {gpu.id for gpu in node.report.gpus}.issuperset(place.gpus)
            assert len(place.gpus) == start.launch.profile["gpus_per_node"]


@given(worlds())
def test_a_gang_is_all_ranks_in_one_fabric_or_none(world: Snapshot) -> None:
    nodes = {node.id: node for node in world.nodes}
    for start in plan(world).start:
        on = [nodes[place.node] for place in start.places]
        assert len({node.id for node in on}) == len(on) == start.launch.profile["nodes"]
        if len(on) > 1:
            (fabric,) = {node.report.fabric for node in on}
            assert fabric


@given(worlds())
def test_every_node_gives_its_reason(world: Snapshot) -> None:
    names = {node.name for node in world.nodes}
    for blocked in plan(world).blocked:
        for by_node in blocked.reasons.values():
            assert by_node.keys() == names
            assert all(by_node.values())


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
    if decision.alarm or decision.held:
        return
    for model in world.models:
        scaling, profile = model.spec.scaling, model.spec.profiles[0]
        counted = [each for each in alive(after, model) if not is_stand_in(after, each)]
        kept = [replica for replica in counted if replica.wanted == "run"]
        if len(kept) < scaling.min and len(counted) < scaling.max:
            assert model.id in {each.model for each in decision.blocked}
            assert profile.nodes > 1 or max(holes, default=0) < profile.gpus_per_node


@given(worlds(), st.lists(st.sampled_from(["--ttft", "1s"]), min_size=1))
def test_an_edit_of_a_profile_ends_nothing(world: Snapshot, args: Sequence[str]) -> None:
    """As many end with the edit as without it: those that are too many, idle, or of no model."""
    world = without_words(world)

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
    """Where no person asked: it is too many, or idle, or lost a part."""
    world = without_words(world)
    decision = plan(world)
    replicas = {replica.id: replica for replica in acted(world, decision).replicas}
    models = {model.id: model for model in world.models}
    lost = {node.id for node in world.nodes if node.freshness is Freshness.LOST}
    for end in (*decision.drain, *decision.stop):
        replica = replicas[end.replica]
        if replica.model is None or any(rank.node in lost for rank in replica.ranks):
            continue
        model = models[replica.model]
        wanted = [
            each
            for each in acted(world, Plan(adopt=decision.adopt)).replicas
            if each.model == model.id and each.wanted == "run"
        ]
        is_idle = model.spec.on_demand and model.demand.is_known and not model.demand.waiting
        assert len(wanted) > model.spec.scaling.max or (is_idle and not model.demand.in_flight)


@given(worlds())
def test_only_what_is_idle_and_on_demand_is_evicted(world: Snapshot) -> None:
    replicas = {replica.id: replica for replica in world.replicas}
    models = {model.id: model for model in world.models}
    for end in plan(world).evict:
        replica = replicas[end.replica]
        model = models[replica.model or 0]
        assert model.spec.on_demand
        assert replica.is_ready
        assert not any(rank.requests for rank in replica.ranks)
        assert model.demand.is_known
        assert not (model.demand.waiting)
        assert not (model.demand.in_flight)


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
def test_silence_alone_ends_and_starts_nothing(world: Snapshot) -> None:
    """No model has fewer for it than its maximum allows."""
    world = without_words(world)
    quiet = replace(
        world,
        nodes=tuple(
            replace(node, freshness=Freshness.SUSPECT) if node.freshness is Freshness.FRESH else node
            for node in world.nodes
        ),
    )
    decision = plan(quiet)
    after = acted(quiet, decision)
    assert not decision.start
    assert not decision.evict
    for model in world.models:
        before = sum(each.wanted == "run" for each in alive(acted(quiet, Plan(adopt=decision.adopt)), model))
        kept = sum(each.wanted == "run" for each in alive(after, model))
        if not model.spec.on_demand:
            assert kept >= min(before, model.spec.scaling.max)


@given(worlds())
def test_what_waits_says_why(world: Snapshot) -> None:
    for each in plan(world).blocked:
        assert each.missing >= 0
        assert each.why
