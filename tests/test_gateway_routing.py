"""Which replica a request goes to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway import prefixes
from llmgw.gateway.admission import ModelEntry
from llmgw.gateway.prefixes import Beginnings, Prefixes, chain
from llmgw.gateway.routing import BUSY_FACTOR, BUSY_SLACK, Choice, Chooser, Prompt, Target


def _target(name: str, weight: float = 1) -> Target:
    return Target(name, "m", f"http://{name}", "secret", weight)


def _targets(count: int, weights: Sequence[float] = ()) -> list[Target]:
    return [_target(f"replica-{at}", weights[at] if weights else 1) for at in range(count)]


def _model(routing_profile: str = "") -> ModelEntry:
    return ModelEntry(1, "m", routing_profile=routing_profile)


def _prompt(text: str, *, salt: bytes = b"1", session: str = "") -> Prompt:
    return Prompt(chain(salt, [text.encode()]), session)


def _choose(
    chooser: Chooser,
    targets: Sequence[Target],
    prompt: Prompt | str,
    in_flight: Mapping[str, int] | None = None,
    *,
    by: str = "",
    without: Sequence[str] = (),
) -> Choice:
    prompt = _prompt(prompt) if isinstance(prompt, str) else prompt
    choice = chooser.choose(_model(by), targets, in_flight or {}, prompt, without=without)
    assert choice is not None
    return choice


A, B, C = _target("a"), _target("b"), _target("c")
PROFILES = ["", "prefix", "least-loaded", "round-robin", "session"]
PAGE = "It was the best of times, it was the worst of times. " * 40
"""About 2 kB."""

texts = st.text("ab", max_size=700)
prompts = st.builds(
    lambda text, session: _prompt(text, session=session), texts, st.sampled_from(["", "s", "t"])
)
weighted = st.lists(st.floats(0.01, 100), min_size=2, max_size=8)
loads = st.lists(st.integers(0, 50), min_size=8, max_size=8)


# --- a prompt's chain ---------------------------------------------------------------------------------------


def test_prompts_share_as_many_links_as_they_share_blocks() -> None:
    one, other = (chain(b"1", [f"{PAGE}{end}".encode()]).links for end in ("and so on", "and no more"))
    shared = (len(PAGE) + 2) // prefixes.BLOCK_BYTES
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


def test_blocks_in_another_order_are_another_prompt() -> None:
    chance = Random(5)
    for _ in range(100):
        blocks = [chance.randbytes(prefixes.BLOCK_BYTES) for _ in range(4)]
        orders = [[b"-" * (prefixes.BLOCK_BYTES - 1), *order] for order in permutations(blocks)]
        ends = [chain(b"", [b"".join(order)]).links for order in orders]
        assert len({links[0] for links in ends}) == 1
        assert len({links[-1] for links in ends}) == len(orders)


def test_nothing_is_shared_under_two_salts() -> None:
    one, other = (chain(salt, [PAGE.encode()]).links for salt in (b"1", b"2"))
    assert not set(one) & set(other)


def test_where_one_part_ends_is_part_of_a_prompt() -> None:
    assert chain(b"", [b"ab", b"c"]).links != chain(b"", [b"a", b"bc"]).links


@pytest.mark.parametrize("size", [16_380, 16_384, 300_000])
def test_no_more_than_the_first_16_kb_are_looked_at(size: int) -> None:
    text = b"x" * size
    long = chain(b"1", [text, b"y", text])
    assert len(long.links) == prefixes.BLOCKS_LIMIT
    assert len(long.text) == prefixes.BLOCKS_LIMIT * prefixes.BLOCK_BYTES


@given(st.binary(max_size=40), st.lists(st.binary(max_size=300), max_size=4))
def test_a_chain_has_a_link_for_each_block_of_its_text(salt: bytes, parts: list[bytes]) -> None:
    made = chain(salt, parts)
    assert len(made.text) == len(made.links) * prefixes.BLOCK_BYTES
    assert made.text.rstrip(b"\0") == b"\0".join([salt, *parts]).rstrip(b"\0")


# --- what a replica was sent --------------------------------------------------------------------------------


@given(st.lists(texts, max_size=6), texts)
def test_the_depth_found_is_that_of_the_longest_beginning_sent(sent: list[str], text: str) -> None:
    known, links = Prefixes(), _prompt(text).chain.links
    chains = [_prompt(other).chain.links for other in sent]
    for other in chains:
        known.add(other)
    shared = [sum(mine == its for mine, its in zip(links, other, strict=False)) for other in chains]
    assert known.depth_of(links) == max(shared, default=0)


def test_what_is_remembered_has_a_bound_and_the_least_recently_sent_goes_first() -> None:
    known = Prefixes()
    kept = range(100)
    for number in range(3 * prefixes.GENERATION_LINKS // 100):
        known.add(kept)
        known.add(range(1_000 * (number + 1), 1_000 * (number + 1) + 200))
        assert len(known) <= 2 * prefixes.GENERATION_LINKS
    assert known.depth_of(kept) == 100
    assert known.depth_of(range(1_000, 1_200)) == 0


def test_of_beginnings_the_least_recently_asked_for_are_given_up() -> None:
    begun = Beginnings[str](2)
    for link in (1, 2, 3):
        begun.keep(link, ("a",))
    assert begun.homes_of(1) == ("a",)
    begun.keep(4, ("b",))
    assert [begun.homes_of(link) for link in (1, 2, 3, 4)] == [("a",), (), ("a",), ("b",)]


def test_a_replica_is_remembered_in_no_more_memory_than_is_said() -> None:
    known, number = Prefixes(), 0
    while len(known) < 2 * prefixes.GENERATION_LINKS - prefixes.BLOCKS_LIMIT:
        known.add(chain(b"1", [str(number).encode() * prefixes.BLOCK_BYTES * 64]).links)
        number += 1
    sets = sys.getsizeof(known.young) + sys.getsizeof(known.old)
    assert sets + sum(sys.getsizeof(link) for link in known.young | known.old) < 4 * 2**20


# --- what holds for every way of choosing -------------------------------------------------------------------


def test_nobody_is_chosen_from_nothing() -> None:
    for by in PROFILES:
        assert Chooser().choose(_model(by), [], {}, Prompt()) is None
        assert Chooser().choose(_model(by), [A, B], {}, Prompt(), without={"a", "b"}) is None


def test_where_there_is_one_it_is_the_only_one() -> None:
    for by in PROFILES:
        assert _choose(Chooser(), [A], "hello", {"a": 99}, by=by) == Choice(A, "only")
        assert _choose(Chooser(), [A, B], "hello", by=by, without=["a"]) == Choice(B, "only")


def test_a_secret_is_not_in_what_a_log_would_show() -> None:
    assert "secret" not in repr(_choose(Chooser(), [A], "hello"))


asked = st.tuples(prompts, loads, st.sets(st.integers(0, 7)), st.sampled_from(PROFILES))


@given(weighted, st.lists(asked, max_size=12))
def test_none_is_chosen_that_was_tried(weights: list[float], requests: list) -> None:
    chooser, targets = Chooser(), _targets(len(weights), weights)
    for prompt, busy, tried, by in requests:
        in_flight = {f"replica-{at}": busy[at] for at in range(8)}
        without = {f"replica-{at}" for at in tried}
        choice = chooser.choose(_model(by), targets, in_flight, prompt, without=without)
        left = {target.replica for target in targets} - without
        assert choice.target.replica in left if left else choice is None


@given(weighted, st.lists(asked, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_targets_changes_nothing(weights: list[float], requests: list, random: Random) -> None:
    one, other = Chooser(), Chooser()
    targets = _targets(len(weights), weights)
    for prompt, busy, _, by in requests:
        in_flight = {f"replica-{at}": busy[at] for at in range(8)}
        shuffled = random.sample(targets, len(targets))
        assert _choose(one, targets, prompt, in_flight, by=by) == _choose(
            other, shuffled, prompt, in_flight, by=by
        )


@given(weighted, st.lists(asked, max_size=12))
def test_of_a_model_whose_weights_are_all_sixteen_times_another_s_the_same_are_chosen(
    weights: list[float], requests: list
) -> None:
    one, other = Chooser(), Chooser()
    few, many = _targets(len(weights), weights), _targets(len(weights), [weight * 16 for weight in weights])
    for prompt, busy, _, by in requests:
        in_flight = {f"replica-{at}": busy[at] for at in range(8)}
        first, second = (_choose(c, t, prompt, in_flight, by=by) for c, t in ((one, few), (other, many)))
        assert (first.target.replica, first.route) == (second.target.replica, second.route)


@given(weighted, loads, st.lists(prompts, min_size=1, max_size=8), st.sampled_from(["", "session"]))
def test_none_is_chosen_that_is_much_busier_than_the_mean(
    weights: list[float], busy: list[int], requests: list[Prompt], by: str
) -> None:
    targets, chooser = _targets(len(weights), weights), Chooser()
    in_flight = {target.replica: busy[at] for at, target in enumerate(targets)}
    mean, mean_weight = sum(in_flight.values()) / sum(weights), sum(weights) / len(weights)
    for prompt in requests:
        target = _choose(chooser, targets, prompt, in_flight, by=by).target
        bound = (1 + BUSY_FACTOR) * mean + BUSY_SLACK / mean_weight
        if prompt.chain.links and (by == "" or prompt.session):
            assert in_flight[target.replica] / target.weight <= bound * (1 + 1e-6)


@given(weighted, loads)
def test_least_loaded_is_the_one_that_would_have_least_for_its_weight(
    weights: list[float], busy: list[int]
) -> None:
    targets = _targets(len(weights), weights)
    in_flight = {target.replica: busy[at] for at, target in enumerate(targets)}
    choice = _choose(Chooser(), targets, "hello", in_flight, by="least-loaded")
    after = {target: (in_flight[target.replica] + 1) / target.weight for target in targets}
    assert after[choice.target] == min(after.values())
    assert choice.route == "least-loaded"


# --- least-loaded, round-robin, session ---------------------------------------------------------------------


def test_equals_take_turns() -> None:
    chooser = Chooser()
    chosen = Counter(_choose(chooser, [A, B, C], Prompt(), by="least-loaded").target for _ in range(9))
    assert chosen == {A: 3, B: 3, C: 3}


def test_without_anything_of_a_prompt_the_least_loaded_is_chosen() -> None:
    for by in PROFILES[:3] + PROFILES[4:]:
        choice = _choose(Chooser(), [A, B, C], Prompt(), {"a": 2, "b": 1, "c": 2}, by=by)
        assert choice == Choice(B, "least-loaded")


def test_three_of_four_go_to_one_with_three_times_the_weight() -> None:
    chooser, in_flight = Chooser(), Counter[str]()
    for _ in range(40):
        choice = _choose(
            chooser, [_target("light"), _target("heavy", 3)], Prompt(), in_flight, by="least-loaded"
        )
        in_flight[choice.target.replica] += 1
    assert in_flight == {"light": 10, "heavy": 30}


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_in_turns_each_has_as_many_as_its_weight_says_whatever_the_loads(weights: list[int]) -> None:
    chooser, targets = Chooser(), _targets(len(weights), weights)
    rounds = [
        _choose(chooser, targets, "hello", {"replica-0": 99}, by="round-robin")
        for _ in range(3 * sum(weights))
    ]
    for start in range(0, len(rounds), sum(weights)):
        had = Counter(choice.target for choice in rounds[start : start + sum(weights)])
        assert had == {target: target.weight for target in targets}


def test_turns_of_a_heavy_one_are_far_apart() -> None:
    chooser, targets = Chooser(), [_target("heavy", 2), B, C]
    names = [_choose(chooser, targets, "", by="round-robin").target.replica for _ in range(12)]
    assert ("heavy", "heavy", "heavy") not in zip(names, names[1:], names[2:], strict=False)
    assert all(one != other or one == "heavy" for one, other in pairwise(names))


def test_a_session_stays_with_its_replica_whatever_it_says() -> None:
    chooser, targets = Chooser(), _targets(8)
    for session in ("mine", "yours"):
        chosen = {
            _choose(chooser, targets, _prompt(f"{turn} {PAGE}", session=session), by="session")
            for turn in range(5)
        }
        assert {choice.route for choice in chosen} == {"session"}
        assert len(chosen) == 1


def test_sessions_are_spread_over_replicas() -> None:
    chooser, targets = Chooser(), _targets(8)
    had = Counter(
        _choose(chooser, targets, Prompt(session=f"s{n}"), by="session").target.replica for n in range(800)
    )
    assert len(had) == 8
    assert max(had.values()) < 150


# --- by prefix ----------------------------------------------------------------------------------------------


def test_a_talk_goes_on_where_it_began() -> None:
    chooser, targets = Chooser(), _targets(8)
    talks: dict[str, list[Choice]] = {f"{number}: {PAGE[:300]}": [] for number in range(40)}
    for turn in range(4):
        for text, chosen in talks.items():
            chosen.append(_choose(chooser, targets, text + PAGE[: 300 * turn]))
    for first, *others in talks.values():
        assert first.route == "prefix-miss"
        assert {(choice.target, choice.route) for choice in others} == {(first.target, "prefix")}
    assert len({first.target for first, *_ in talks.values()}) == 8


def test_one_that_is_too_busy_is_left_and_remembered() -> None:
    chooser, targets = Chooser(), _targets(4)
    home = _choose(chooser, targets, PAGE).target
    busy = {home.replica: int(BUSY_SLACK) + 2}
    other = _choose(chooser, targets, PAGE, busy).target
    assert other != home
    assert _choose(chooser, targets, PAGE, busy) == Choice(other, "prefix")
    assert _choose(chooser, [home, *set(targets) - {home, other}], PAGE) == Choice(home, "prefix")


def test_two_processes_with_loads_of_their_own_mostly_agree_on_a_new_prompt() -> None:
    targets, random, agreed = _targets(8), Random(1), 0
    for number in range(200):
        loads = [{target.replica: random.randint(2, 4) for target in targets} for _ in range(2)]
        one, other = (_choose(Chooser(), targets, f"{number} {PAGE}", busy).target for busy in loads)
        agreed += one == other
    assert agreed > 80  # of least-loaded's choices, a third as many


def test_a_small_difference_in_load_is_no_reason_to_leave() -> None:
    chooser, targets = Chooser(), _targets(4)
    home = _choose(chooser, targets, PAGE).target
    assert _choose(chooser, targets, PAGE, {home.replica: int(BUSY_SLACK)}) == Choice(home, "prefix")


def test_a_new_prompt_is_not_sent_to_one_that_is_busier_than_the_others() -> None:
    targets = _targets(4)
    busy = {target.replica: 1 for target in targets} | {"replica-2": 4}
    had = {_choose(Chooser(), targets, f"{number}{PAGE}", busy).target.replica for number in range(50)}
    assert had == {"replica-0", "replica-1", "replica-3"}


def test_who_is_busier_is_told_by_weight() -> None:
    targets, busy = [_target("light"), _target("heavy", 4)], {"light": 1, "heavy": 2}
    had = {_choose(Chooser(), targets, f"{number}{PAGE}", busy).target.replica for number in range(50)}
    assert had == {"heavy"}


def test_processes_with_loads_of_their_own_agree_on_new_prompts_more_often_than_by_load() -> None:
    targets, random, agreed = _targets(8), Random(1), Counter[str]()
    for number in range(200):
        loads = [{target.replica: random.randint(2, 4) for target in targets} for _ in range(2)]
        for by in ("prefix", "least-loaded"):
            one, other = (_choose(Chooser(), targets, f"{number} {PAGE}", busy, by=by) for busy in loads)
            agreed[by] += one == other
    assert agreed["prefix"] > 1.5 * agreed["least-loaded"]


def test_what_every_prompt_begins_with_does_not_gather_them_on_one_replica() -> None:
    chooser, targets = Chooser(), _targets(8)
    opening = '[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"'
    had = Counter(
        _choose(chooser, targets, f"{opening}{number} {PAGE}").target.replica for number in range(400)
    )
    assert len(had) == 8
    assert max(had.values()) < 100


def test_a_long_common_beginning_is_followed() -> None:
    chooser, targets = Chooser(), _targets(8)
    chosen = [_choose(chooser, targets, f"{PAGE}{number}") for number in range(20)]
    assert len({choice.target for choice in chosen}) == 1
    assert [choice.route for choice in chosen] == ["prefix-miss"] + ["prefix"] * 19


def test_of_several_that_have_as_much_of_it_each_has_its_own_talks() -> None:
    """As in two processes: both know a common beginning on all replicas, and one has not seen the talk."""
    one, other, targets = Chooser(), Chooser(), _targets(8)
    for chooser in (one, other):
        for target in targets:
            _choose(chooser, targets, PAGE, without=[each.replica for each in targets if each != target])
    talks = [f"{PAGE}{number} {PAGE[:200]}" for number in range(60)]
    begun = [_choose(one, targets, talk).target for talk in talks]
    assert [_choose(other, targets, talk + " And then?").target for talk in talks] == begun
    assert len(set(begun)) == 8


def test_what_the_only_replica_was_sent_is_known_when_another_joins() -> None:
    chooser = Chooser()
    _choose(chooser, [A], PAGE)
    assert _choose(chooser, [A, B], PAGE) == Choice(A, "prefix")


def test_two_cache_scopes_share_nothing() -> None:
    chooser, targets = Chooser(), _targets(8)
    _choose(chooser, targets, _prompt(PAGE, salt=b"1 mine"))
    assert _choose(chooser, targets, _prompt(PAGE, salt=b"1 yours")).route == "prefix-miss"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    chooser, targets = Chooser(), _targets(4)
    home = _choose(chooser, targets, PAGE).target
    chooser.forget([home.replica, "never known"])
    assert _choose(chooser, targets, PAGE).route == "prefix-miss"


def test_processes_that_know_nothing_of_each_other_agree_on_a_new_prompt() -> None:
    """Each of them draws hashes of its own."""
    program = (
        "from tests import test_gateway_routing as told; "
        "print([told._choose(told.Chooser(), told._targets(8), f'{n} {told.PAGE}') for n in range(40)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_a_replica_more_takes_its_part_of_new_prompts_and_moves_no_other(count: int) -> None:
    before, after = _targets(count), _targets(count + 1)
    moved, asked = 0, 1_000
    for number in range(asked):
        was, now = (
            _choose(Chooser(), targets, f"{number} {PAGE[:100]}").target for targets in (before, after)
        )
        moved += was != now
        assert now in (was, after[-1])
    share = 1 / (count + 1)
    assert abs(moved / asked - share) < 4 * (share * (1 - share) / asked) ** 0.5


def test_of_new_prompts_each_replica_has_its_weight_s_part() -> None:
    targets = _targets(3, [1, 2, 5])
    had = Counter(_choose(Chooser(), targets, f"{number} {PAGE[:100]}").target for number in range(1_600))
    for target in targets:
        assert abs(had[target] - 200 * target.weight) < 4 * (200 * target.weight) ** 0.5
