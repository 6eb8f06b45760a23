"""The routing table against a real database: what changed is seen, what did not is not read again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from catalog.actions import remove_model
from catalog.durations import SECOND
from catalog.keys import KeyText
from catalog.models import Fallback, Key, Model, Name, Profile, Revision, Tombstone
from catalog.parts import Limits
from llmgw.gateway.admission import Timeouts
from llmgw.gateway.availability import Situation
from llmgw.gateway.table import SITUATION_S, Table, read_table
from nodes.models import Node, Rank, Replica, Unplaced
from nodes.protocol import ClusterKey
from tests.stage import Play, change, make_key, make_model, make_replica, playing
from tests.waiting import wait_until

KEY, OLDER = ClusterKey("k2", b"a secret of the cluster for tests"), ClusterKey("k1", b"the one before")
KEYS = (KEY, OLDER)


class _Engine:
    port = 30_001


ENGINE: Any = _Engine()


def _read(previous: Table | None = None) -> Table:
    return read_table(previous or Table(), KEYS)


def _served(table: Table, name: str) -> list[str]:
    """Which replicas a request for the name may go to."""
    model = table.find(name)
    return [] if model is None else [target.replica for target in table.targets_of(model)]


def _shape(table: Table) -> tuple[object, ...]:
    """What requests see of a table."""
    return (table.models, table.names, table.targets, table.keys, table.situations)


def _remove(model: Model) -> None:
    """As the verb does."""
    with transaction.atomic():
        revision = Revision.advance()
        Tombstone.objects.create(name=model.name, revision=revision)
        model.delete()


# --- models and names ---------------------------------------------------------------------


@pytest.mark.django_db
def test_a_table_of_nothing_is_read_from_an_empty_database() -> None:
    table = _read()
    assert (table.revision, table.models, table.keys) == (0, {}, {})


@pytest.mark.django_db
def test_an_unchanged_database_is_asked_for_its_revision_and_whose_owners_are_away_and_nothing_else() -> None:
    make_replica(make_model(), ENGINE)
    make_key()
    table = _read()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert _shape(_read(table)) == _shape(table)
    assert len(queries) == 2


@pytest.mark.django_db
def test_a_change_is_read_with_a_fixed_number_of_queries() -> None:
    models = [make_model(f"model-{number}", f"alias-{number}") for number in range(30)]
    table = _read()
    counts = []
    for some in (models[:1], models):
        for model in some:
            change(model, description="edited")
            make_replica(model, ENGINE)
        with CaptureQueriesContext(connection) as queries:
            table = _read(table)
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 14


@pytest.mark.django_db
def test_an_edit_replaces_all_of_a_models_names() -> None:
    model = make_model("a", "old-alias")
    table = _read()
    Name.objects.filter(name="old-alias").update(name="new-alias")
    Name.objects.filter(name="a").update(name="b")
    change(model, name="b")
    assert dict(_read(table).names) == {"b": model.pk, "new-alias": model.pk}


@pytest.mark.django_db
def test_an_alias_that_moved_belongs_to_its_new_model() -> None:
    first, second = make_model("first", "shared"), make_model("second")
    table = _read()
    Name.objects.filter(name="shared").update(model=second)
    change(first)
    change(second)
    found = _read(table).find("shared")
    assert found is not None
    assert found.name == "second"


@pytest.mark.django_db
def test_a_removed_model_is_forgotten_with_its_aliases_and_replicas() -> None:
    model = make_model("a", "alias")
    make_replica(model, ENGINE)
    table = _read()
    assert len(_served(table, "alias")) == 1
    _remove(model)
    table = _read(table)
    assert (table.models, table.names, table.targets) == ({}, {}, {})


@pytest.mark.django_db
def test_a_model_that_was_removed_and_added_again_between_two_reads_is_the_new_one() -> None:
    make_replica(make_model("a", "alias"), ENGINE)
    table = _read()
    _remove(Model.objects.get())
    Tombstone.objects.all().delete()  # the verb does so when the name comes back
    again = make_model("a")
    assert dict(_read(table).names) == {"a": again.pk}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("engines", "is_simulated"),
    [
        pytest.param(["sim", "sim"], True, id="all sim"),
        pytest.param(["sim", "vllm"], False, id="one of two"),
        pytest.param([], False, id="no profile"),
    ],
)
def test_simulated_is_what_every_profile_simulates(engines: list[str], is_simulated: bool) -> None:
    model = make_model()
    model.profiles.all().delete()
    for number, engine in enumerate(engines):
        Profile.objects.create(model=model, name=str(number), engine=engine, gpu_class="x")
    found = _read().find("tiny")
    assert found is not None
    assert found.is_simulated is is_simulated


@pytest.mark.django_db
def test_what_an_operator_set_is_in_the_entry() -> None:
    columns: dict[str, Any] = {
        "routing_profile": "session",
        "requests_per_minute": 60,
        "tokens_per_minute": 9_000,
        "concurrency": 4,
        "over_max_output": "clamp",
        "timeout_hold_ns": 300 * SECOND,
        "timeout_first_byte_ns": 1_500_000_000,
    }
    model = make_model(**columns)
    Profile.objects.create(model=model, name="second", engine="sim", gpu_class="x", position=1)
    Profile.objects.create(model=model, name="third", engine="vllm", gpu_class="x", position=2)
    make_model("a")
    make_model("b", "bee")
    for position, name in enumerate(("bee", "a")):
        Fallback.objects.create(model=model, name_id=name, position=1 - position)
    found = _read().find("tiny")
    assert found is not None
    assert (found.routing_profile, found.fallbacks) == ("session", ("a", "bee"))
    assert (found.limits, found.over_max_output) == (Limits(60, 9_000, 4), "clamp")
    assert found.timeouts == Timeouts(hold_s=300.0, connect_s=None, first_byte_s=1.5, idle_s=None)
    assert found.engines == ("sim", "vllm")


@pytest.mark.django_db
def test_what_nobody_set_is_left_to_the_gateway() -> None:
    make_model()
    found = _read().find("tiny")
    assert found is not None
    assert (found.routing_profile, found.fallbacks, found.over_max_output) == ("", (), "")
    assert (found.limits, found.timeouts) == (Limits(), Timeouts())


@pytest.mark.django_db
def test_a_change_of_limits_or_fallbacks_is_seen() -> None:
    model, _ = make_model(), make_model("b")
    table = _read()
    Fallback.objects.create(model=model, name_id="b", position=0)
    change(model, concurrency=2)
    found = _read(table).find("tiny")
    assert found is not None
    assert (found.limits, found.fallbacks) == (Limits(concurrency=2), ("b",))


# --- replicas -----------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_target_is_the_first_rank_under_the_replicas_own_key() -> None:
    replica = make_replica(make_model(), ENGINE, served_name="launched-as")
    second = Node.objects.create(name="there", address="http://10.0.0.8:8378")
    Rank.objects.create(replica=replica, node=second, rank=1, port=30_002)
    (target,) = _read().targets[replica.model_id or 0]
    assert target.replica == str(replica.pk)
    assert target.served_name == "launched-as"
    assert target.origin == "http://127.0.0.1:30001"
    assert target.key == KEY.replica_key(str(replica.pk), 1)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("key_id", "key"),
    [
        pytest.param("k1", OLDER, id="started before the cluster's key was rotated"),
        pytest.param("k2", KEY, id="started since"),
        pytest.param("", KEY, id="adopted from an agent that does not say"),
    ],
)
def test_an_engine_is_asked_with_the_key_it_was_started_with(key_id: str, key: ClusterKey) -> None:
    replica = make_replica(make_model(), ENGINE)
    Replica.objects.filter(pk=replica.pk).update(key_id=key_id)
    (target,) = _read().targets[replica.model_id or 0]
    assert target.key == key.replica_key(str(replica.pk), 1)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("address", "origin"),
    [
        pytest.param("http://10.0.0.7:8378", "http://10.0.0.7:30001", id="IPv4"),
        pytest.param("http://[fd00::7]:8378", "http://[fd00::7]:30001", id="IPv6"),
        pytest.param("https://gpu-7.example:8378/", "http://gpu-7.example:30001", id="an agent behind TLS"),
    ],
)
def test_an_engine_listens_where_its_agent_does(address: str, origin: str) -> None:
    replica = make_replica(make_model(), ENGINE)
    Node.objects.update(address=address)
    change(replica)
    table = _read()
    assert [entry.target.origin for entry in table.replicas.values()] == [origin]
    for certificate in ("a" * 64, "b" * 64):  # and when it was started anew with another
        Rank.objects.update(certificate=certificate)
        change(replica)
        table = _read(table)
        (target,) = (entry.target for entry in table.replicas.values())
        assert (target.origin, target.certificate) == (origin.replace("http:", "https:"), certificate)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"state": "draining"}, id="drains"),
        pytest.param({"state": "failed"}, id="failed"),
        pytest.param({"state": "lost"}, id="is lost"),
        pytest.param({"wanted": "drain"}, id="is wanted gone, and does not know yet"),
        pytest.param({"wanted": "stop"}, id="is wanted stopped"),
        pytest.param({"model": None}, id="lost its model"),
    ],
)
def test_no_request_goes_to_a_replica_that(columns: dict[str, Any]) -> None:
    replica = make_replica(make_model(), ENGINE)
    table = _read()
    assert _served(table, "tiny") == [str(replica.pk)]
    change(replica, **columns)
    assert _served(_read(table), "tiny") == []
    assert _served(_read(), "tiny") == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("launch", "said", "length"),
    [
        pytest.param({"context_length": 4_096}, None, 4_096, id="as launched, while the engine says nothing"),
        pytest.param({"context_length": 4_096}, 2_048, 2_048, id="less, on the engine's word"),
        pytest.param({}, 32_768, 32_768, id="the engine's own"),
        pytest.param({}, None, 0, id="unknown"),
    ],
)
def test_a_target_knows_its_engine_and_how_long_a_request_may_be(
    launch: dict[str, Any], said: int | None, length: int
) -> None:
    replica = make_replica(make_model(), ENGINE)
    Rank.objects.update(context_length=said)
    change(replica, launch=replica.launch | {"profile": {"engine": "llamacpp"}} | launch)
    (target,) = _read().targets[replica.model_id or 0]
    assert (target.engine, target.context_length) == ("llamacpp", length)


@pytest.mark.django_db
def test_no_request_goes_to_a_replica_whose_port_is_not_known() -> None:
    make_replica(make_model(), None)
    assert _served(_read(), "tiny") == []


@pytest.mark.django_db
def test_a_new_generation_has_a_new_key() -> None:
    replica = make_replica(make_model(), ENGINE)
    table = _read()
    change(replica, generation=2)
    (target,) = _read(table).targets[replica.model_id or 0]
    assert target.key == KEY.replica_key(str(replica.pk), 2)


@pytest.mark.django_db
def test_a_weight_is_the_profiles_as_it_is_now_and_one_when_the_profile_is_gone() -> None:
    model = make_model()
    replica = make_replica(model, ENGINE)
    table = _read()
    model.profiles.update(weight=3)
    change(model)
    table = _read(table)
    assert [target.weight for target in table.targets[model.pk]] == [3]
    model.profiles.all().delete()
    change(model)
    change(replica)
    assert [target.weight for target in _read(table).targets[model.pk]] == [1]


@pytest.mark.django_db
def test_what_a_model_waits_for_is_read_without_a_revision_but_not_every_time() -> None:
    model = make_model()
    table = _read()
    make = Replica.objects.create
    make(model=model, launch={"model": "tiny"}, state="starting", reason="loading weights")
    Unplaced.objects.create(model=model, missing=1, why="no room for a second")
    assert _read(table).situations == {}
    table = _read(replace(table, situated_at_s=table.situated_at_s - SITUATION_S))
    assert table.situations == {
        model.pk: Situation(on_the_way=(("starting", "loading weights"),), unplaced="no room for a second")
    }


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("kinds", "needs_edit"),
    [
        pytest.param([], False, id="none"),
        pytest.param(["configuration"], True, id="a wrong flag"),
        pytest.param(["configuration", "transient"], False, id="a wrong flag, and since then something else"),
        pytest.param(["transient", "configuration"], True, id="a wrong flag at last"),
    ],
)
def test_the_last_failure_says_whether_waiting_helps(kinds: list[str], needs_edit: bool) -> None:
    model = make_model()
    for kind in kinds:
        failed = make_replica(model, None, state="failed")
        change(failed, failure_kind=kind, state_since=Now())
    Unplaced.objects.create(model=model, missing=1, why="it failed")
    assert _read().situations[model.pk].needs_edit is needs_edit


# --- keys ---------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_revoked_key_stays_known_as_revoked() -> None:
    row, _ = make_key()
    table = _read()
    assert not table.keys[row.pk].is_revoked
    change(row, revoked_at=Now())
    assert _read(table).keys[row.pk].is_revoked


def _deactivate(name: str) -> None:
    User.objects.filter(username=name).update(is_active=False)


def _activate(name: str) -> None:
    User.objects.filter(username=name).update(is_active=True)


def _delete(name: str) -> None:
    User.objects.filter(username=name).delete()


@pytest.mark.django_db
@pytest.mark.parametrize("leave", [_deactivate, _delete])
def test_keys_go_with_their_owner_and_without_a_revision(leave: Callable[[str], None]) -> None:
    row, _ = make_key("grace")
    other, _ = make_key("ada")
    table = _read()
    assert set(table.keys) == {row.pk, other.pk}
    leave("grace")
    assert set(_read(table).keys) == {other.pk}


@pytest.mark.django_db
def test_keys_come_back_with_their_owner() -> None:
    row, _ = make_key("grace")
    _deactivate("grace")
    table = _read()
    assert set(table.keys) == set()
    _activate("grace")
    assert set(_read(table).keys) == {row.pk}


@pytest.mark.django_db
@pytest.mark.parametrize(
    "meanwhile",
    [
        pytest.param([(_deactivate, "grace"), (_activate, "eve")], id="one owner is off and another on"),
        pytest.param([(_delete, "grace"), (_activate, "eve")], id="one is deleted and another on"),
        pytest.param([(_delete, "grace"), (make_key, "ada")], id="one is deleted and a key is made"),
        pytest.param([(_deactivate, "grace"), (make_key, "ada")], id="one is off and a key is made"),
        pytest.param([(_delete, "eve"), (_deactivate, "grace")], id="one that was off is deleted"),
    ],
)
def test_what_cancels_out_in_numbers_is_seen_all_the_same(
    meanwhile: list[tuple[Callable[[str], Any], str]],
) -> None:
    for name in ("grace", "eve", "ada"):
        make_key(name)
    _deactivate("eve")
    table = _read()
    for act, name in meanwhile:
        act(name)
    good = Key.objects.filter(user__is_active=True)
    assert set(_read(table).keys) == set(good.values_list("pk", flat=True))


@pytest.mark.django_db
def test_what_a_key_opens_is_in_the_entry() -> None:
    opens_all, _ = make_key()
    limited, _ = make_key(
        opens_all=False, requests_per_minute=60, tokens_per_minute=9_000, concurrency=4, cache_scope="team a"
    )
    tiny, big = make_model("tiny"), make_model("big")
    limited.opened.set([tiny, big])
    table = _read()
    assert table.keys[opens_all.pk].models is None
    assert (table.keys[opens_all.pk].limits, table.keys[opens_all.pk].cache_scope) == (Limits(), "")
    entry = table.keys[limited.pk]
    assert entry.models == frozenset({tiny.pk, big.pk})
    assert (entry.limits, entry.cache_scope) == (Limits(60, 9_000, 4), "team a")


@pytest.mark.django_db
def test_a_change_of_what_a_key_opens_is_seen_and_none_is_not_all() -> None:
    row, _ = make_key()
    tiny = make_model("tiny")
    table = _read()
    row.opened.set([tiny])
    change(row, opens_all=False, concurrency=1)
    table = _read(table)
    assert (table.keys[row.pk].models, table.keys[row.pk].limits.concurrency) == (frozenset({tiny.pk}), 1)
    remove_model("tiny", by="a", door="command", after_change=int)
    table = _read(table)
    assert table.keys[row.pk].models == frozenset()
    assert _shape(table) == _shape(_read())


@pytest.mark.django_db
def test_a_key_expires_by_the_databases_clock() -> None:
    row, _ = make_key(expires_at=Now())
    table = _read()
    expires_at_s = table.keys[row.pk].expires_at_s
    assert expires_at_s is not None
    assert expires_at_s <= table.now_s(table.read_at_s) < expires_at_s + 10
    assert table.now_s(table.read_at_s + 60) == table.now_s(table.read_at_s) + 60


# --- from anywhere to the same ------------------------------------------------------------


@pytest.mark.django_db
def test_a_database_that_was_restored_is_read_from_the_start() -> None:
    make_model("gone")
    table = _read()
    Model.objects.all().delete()
    Revision.objects.update(value=0)
    assert _read(table).models == {}


ONE_DATABASE = pytest.mark.one_database  # a history is enough to see that both answer alike


@pytest.mark.django_db
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=ONE_DATABASE) for seed in range(1, 5))])
def test_reading_what_changed_gives_the_same_table_as_reading_everything(seed: int) -> None:
    chance = random.Random(seed)
    table = _read()
    for _ in range(40):
        for _ in range(chance.randint(1, 4)):
            _edit_something(chance)
        table = _read(replace(table, situated_at_s=float("-inf")))
        assert _shape(table) == _shape(_read())


def _edit_something(chance: random.Random) -> None:
    models, replicas = list(Model.objects.all()), list(Replica.objects.all())
    keys = list(Key.objects.all())
    free = [name for name in "abcdef" if not Name.objects.filter(name=name).exists()]
    edits = ["add"] * bool(free) + ["key"] + ["revoke"] * bool(keys)
    edits += ["remove", "rename", "alias", "scale", "limit", "start"] * bool(models) + ["move"] * (
        2 * bool(replicas)
    )
    match chance.choice(edits):
        case "add":
            name = chance.choice(free)
            Tombstone.objects.filter(name=name).delete()
            make_model(name, low=0)
        case "remove":
            _remove(chance.choice(models))
        case "rename" if free:
            model, name = chance.choice(models), chance.choice(free)
            Tombstone.objects.filter(name=name).delete()
            model.names.filter(is_canonical=True).update(name=name)
            was = model.name
            change(model, name=name)
            Tombstone.objects.create(name=was, revision=Revision.objects.get().value)
        case "alias" if free:
            model = chance.choice(models)
            model.names.filter(is_canonical=False).delete()
            Name.objects.create(name=chance.choice(free), model=model, position=1)
            change(model)
        case "scale":
            change(chance.choice(models), scaling_max=chance.randint(0, 2))
        case "limit":
            change(chance.choice(models), concurrency=chance.randint(0, 2), over_max_output="clamp")
        case "start":
            make_replica(chance.choice(models), ENGINE, state=chance.choice(["starting", "ready"]))
        case "move":
            state = chance.choice(["ready", "draining", "stopped", "lost", "pending"])
            change(chance.choice(replicas), state=state, wanted=chance.choice(["run", "run", "drain"]))
        case "key":
            make_key(chance.choice(["ada", "grace"]))
        case "revoke":
            change(chance.choice(keys), revoked_at=Now())


# --- when the database is away ------------------------------------------------------------


@pytest.fixture
def play() -> Iterator[Play]:
    with playing() as play:
        yield play


@pytest.mark.django_db(transaction=True)
def test_the_last_table_serves_on_while_the_database_is_away(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    assert play.chat().choices
    _, later = make_key()
    with _database_away():
        wait_until(lambda: "stays at revision" in caplog.text, "the gateway to notice")
        assert play.chat().choices
        assert play.shown("tiny")["status"] == "ready"
        refusal = play.send("GET", "/v1/models", Authorization=f"Bearer {_nobodys_key()}")
        assert (refusal.status, refusal.body["code"]) == (503, "database_away")
        assert "retry-after" in refusal.headers
    wait_until(lambda: "is kept up again" in caplog.text, "the gateway to notice")
    assert play.send("GET", "/v1/models", Authorization=f"Bearer {later}").status == 200
    assert play.send("GET", "/v1/models", Authorization=f"Bearer {_nobodys_key()}").status == 401
    told = [record for record in caplog.records if "stays at revision" in record.message]
    assert len(told) == 1, "an outage is one line, not four a second"


def _nobodys_key() -> str:
    return KeyText.from_bytes(b"\x05" * 6, b"\x06" * 24).reveal()


@contextlib.contextmanager
def _database_away() -> Iterator[None]:
    """What every read of the table needs is not there."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE catalog_revision RENAME TO catalog_elsewhere")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE catalog_elsewhere RENAME TO catalog_revision")
