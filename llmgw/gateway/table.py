"""The routing table: what this process serves, held in memory and kept up with the database.

A thread with a connection of its own asks for rows newer than the revision it has seen and makes a new Table
of them; the event loop only ever swaps one immutable Table for the next. When the database is away the last
Table goes on serving. `now_s` counts from the database's clock, so that this machine's may jump as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from time import monotonic

from django.db import DatabaseError, InterfaceError
from django.db.models import Count, Subquery, Value
from django.db.models.functions import Coalesce, Now

from catalog.models import Fallback, Key, Model, Name, Profile, Revision, Tombstone
from catalog.parts import LIMIT_KEYS, Limits
from llmgw.gateway.admission import UNLIMITED, KeyEntry, ModelEntry, Timeouts
from llmgw.gateway.availability import Situation
from llmgw.gateway.database import DatabaseThread
from llmgw.gateway.needs import Reach
from llmgw.gateway.routing import Target
from llmgw.gateway.situations import read_situations
from nodes.models import Gateway, Rank, Replica
from nodes.origins import engine_url
from nodes.protocol import ClusterKey

log = logging.getLogger(__name__)

FRESH_S = 5.0
"""A table older than this is behind: what it does not hold may exist."""
RELOAD_S = 60.0
"""How often everything is read again, because not every hand that edits a database counts its changes up."""
REFRESH_S = 2.0
"""The longest that a request waits for the table to be read anew."""
GAP_S = 0.02
"""The least time between two reads, however many requests ask for one."""
GATEWAY_SILENCE = timedelta(seconds=6)
"""Three heartbeats: another process that has not written for so long shares no limits."""
SITUATION_S = 1.0
"""How old the reasons may be that waiting clients are told. They change without a new revision."""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """A replica that may be sent requests, with what its weight and owner are looked up by."""

    model: int
    profile: int | None
    target: Target


@dataclass(frozen=True, slots=True)
class Table:
    """Everything a request needs to know, at one revision. `read_at_s` and `full_at_s` are monotonic."""

    revision: int = -1
    clock_s: float = 0.0
    read_at_s: float = float("-inf")
    full_at_s: float = float("-inf")
    situated_at_s: float = float("-inf")
    models: Mapping[int, ModelEntry] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)
    replicas: Mapping[str, ReplicaEntry] = field(default_factory=dict)
    targets: Mapping[int, tuple[Target, ...]] = field(default_factory=dict)
    reaches: Mapping[int, Reach] = field(default_factory=dict)
    keys: Mapping[str, KeyEntry] = field(default_factory=dict)
    asleep: frozenset[str] = frozenset()
    """Keys whose owners are deactivated; they are not among `keys`."""
    situations: Mapping[int, Situation] = field(default_factory=dict)
    gateways: int = 1
    """How many processes serve, this one too."""

    def now_s(self, monotonic_s: float) -> float:
        return self.clock_s + (monotonic_s - self.read_at_s)

    def find(self, name: str) -> ModelEntry | None:
        model = self.names.get(name)
        return None if model is None else self.models.get(model)

    def targets_of(self, model: ModelEntry) -> tuple[Target, ...]:
        return self.targets.get(model.id, ())

    def reach_of(self, model: ModelEntry) -> Reach:
        """Of its replicas; worked out once, as every request asks."""
        return self.reaches.get(model.id) or Reach.of(model, ())

    def situation_of(self, model: ModelEntry) -> Situation:
        return self.situations.get(model.id, Situation())


def read_table(previous: Table, cluster_keys: Sequence[ClusterKey]) -> Table:
    """The table as the database has it now, from `previous` and what changed since. Runs in the table's
    thread."""
    now = monotonic()
    revision, clock, keys_there = _moment()
    is_full = revision < previous.revision or now - previous.full_at_s >= RELOAD_S
    since = -1 if is_full else previous.revision
    table = replace(previous, revision=revision, clock_s=clock.timestamp(), read_at_s=now)
    if is_full:
        table = replace(table, full_at_s=now, models={}, replicas={}, keys={})
    if revision > since:
        models = _models(table.models, since)
        replicas = _replicas(table.replicas, since, cluster_keys)
        targets = _targets(models, replicas.values())
        table = replace(
            table,
            models=models,
            names=_names(models.values()),
            replicas=replicas,
            targets=targets,
            reaches={model: Reach.of(models[model], some) for model, some in targets.items()},
            keys=_keys(table.keys, since),
        )
    # Owners are deactivated and removed without a revision, by whichever hand.
    asleep = frozenset(Key.objects.filter(user__is_active=False).values_list("pk", flat=True))
    if asleep != table.asleep or keys_there != len(table.keys) + len(asleep):
        table = replace(table, keys=_keys({}, -1), asleep=asleep)
    if revision > since or now - previous.situated_at_s >= SITUATION_S:
        table = replace(table, situated_at_s=now, situations=read_situations(), gateways=_gateways())
    return table


def _moment() -> tuple[int, datetime, int]:
    """The revision, the database's clock, and how many keys there are."""
    counted = Key.objects.order_by().values(every=Value(1)).annotate(count=Count("pk")).values("count")
    asked = Revision.objects.filter(pk=1).values_list("value", Now(), Coalesce(Subquery(counted), 0))
    there: tuple[int, datetime, int] | None = asked.first()
    if there is None:
        Revision.current()
        return _moment()
    return there


def _models(known: Mapping[int, ModelEntry], since: int) -> dict[int, ModelEntry]:
    changed = Model.objects.filter(revision__gt=since)
    names: dict[int, list[str]] = {}
    for model, name in Name.objects.filter(model__in=changed, is_canonical=False).values_list(
        "model_id", "name"
    ):
        names.setdefault(model, []).append(name)
    fallbacks: dict[int, list[str]] = {}
    for model, name in Fallback.objects.filter(model__in=changed).values_list("model_id", "name_id"):
        fallbacks.setdefault(model, []).append(name)
    profiles: dict[int, list[tuple[int, str, float]]] = {}
    rows = Profile.objects.filter(model__in=changed).values_list("model_id", "pk", "engine", "weight")
    for model, profile, engine, weight in rows:
        profiles.setdefault(model, []).append((profile, engine, weight))
    models = dict(known)
    for row in changed.defer("source_facts"):
        own = profiles.get(row.pk, [])
        models[row.pk] = ModelEntry(
            id=row.pk,
            name=row.name,
            revision=row.revision,
            aliases=tuple(names.get(row.pk, ())),
            description=row.description,
            context_length=row.context_length,
            max_output=row.max_output,
            capabilities={"tools": row.can_tools, "vision": row.can_vision, "embeddings": row.can_embeddings},
            weights={profile: weight for profile, _, weight in own},
            is_simulated=bool(own) and all(engine == "sim" for _, engine, _ in own),
            is_off=row.scaling_max == 0,
            is_on_demand=row.scaling_min == 0 < row.scaling_max,
            created_s=int(row.created_at.timestamp()),
            routing_profile=row.routing_profile,
            fallbacks=tuple(fallbacks.get(row.pk, ())),
            limits=Limits(row.requests_per_minute, row.tokens_per_minute, row.concurrency) or UNLIMITED,
            timeouts=Timeouts(
                hold_s=_seconds(row.timeout_hold_ns),
                connect_s=_seconds(row.timeout_connect_ns),
                first_byte_s=_seconds(row.timeout_first_byte_ns),
                idle_s=_seconds(row.timeout_idle_ns),
            ),
            over_max_output=row.over_max_output,
            engines=tuple(dict.fromkeys(engine for _, engine, _ in own)),
        )
    for name, revision in Tombstone.objects.filter(revision__gt=since).values_list("name", "revision"):
        for gone in [item for item in models.values() if item.name == name and item.revision < revision]:
            del models[gone.id]
    # A name that came back takes its tombstone away: of two models with one name, the older is gone.
    newest = {model.name: model.id for model in sorted(models.values(), key=lambda model: model.revision)}
    return {model: models[model] for model in newest.values()}


def _seconds(nanoseconds: int) -> float | None:
    """None where nothing was set."""
    return nanoseconds / 1_000_000_000 if nanoseconds else None


def _names(models: Iterable[ModelEntry]) -> dict[str, int]:
    """Where two claim a name, one of them is about to be read again: the newer edit has it."""
    ordered = sorted(models, key=lambda model: model.revision)
    return {name: model.id for model in ordered for name in (*model.aliases, model.name)}


def _replicas(
    known: Mapping[str, ReplicaEntry], since: int, cluster_keys: Sequence[ClusterKey]
) -> dict[str, ReplicaEntry]:
    replicas = dict(known)
    if since >= 0:
        for changed in Replica.objects.filter(revision__gt=since).values_list("pk", flat=True):
            replicas.pop(str(changed), None)
    first_ranks = Rank.objects.filter(
        rank=0,
        replica__revision__gt=since,
        replica__state=Replica.State.READY,
        replica__wanted=Replica.Wanted.RUN,
        replica__model__isnull=False,
    ).values_list(
        "replica_id",
        "replica__generation",
        "replica__key_id",
        "replica__model_id",
        "replica__profile_id",
        "replica__launch__model",
        "replica__launch__profile__engine",
        "replica__launch__context_length",
        "node__address",
        "port",
        "certificate",
        "context_length",
    )
    for row in first_ranks:
        replica, generation, key_id, model, profile = row[:5]
        served_name, engine, launched_length, address, port, certificate, length = row[5:]
        if port is None:
            continue
        uuid = str(replica)
        target = Target(
            replica=uuid,
            served_name=served_name or "",
            origin=engine_url(address, port, certificate),
            certificate=certificate,
            key=ClusterKey.chosen(cluster_keys, key_id).replica_key(uuid, generation),
            engine=engine or "",
            context_length=launched_length or 0 if length is None else length,
        )
        replicas[uuid] = ReplicaEntry(model, profile, target)
    return replicas


def _targets(
    models: Mapping[int, ModelEntry], replicas: Iterable[ReplicaEntry]
) -> dict[int, tuple[Target, ...]]:
    targets: dict[int, list[Target]] = {}
    for entry in replicas:
        if entry.model in models:
            weights = models[entry.model].weights
            weight = 1.0 if entry.profile is None else weights.get(entry.profile, 1.0)
            targets.setdefault(entry.model, []).append(replace(entry.target, weight=weight))
    return {model: tuple(sorted(some, key=lambda target: target.replica)) for model, some in targets.items()}


def _keys(known: Mapping[str, KeyEntry], since: int) -> dict[str, KeyEntry]:
    keys = dict(known)
    changed = Key.objects.filter(revision__gt=since)
    opened: dict[str, set[int]] = {}
    among = Key.opened.through.objects.filter(key__in=changed.filter(opens_all=False))
    for key, model in among.values_list("key_id", "model_id"):
        opened.setdefault(key, set()).add(model)
    columns = ("pk", "digest", "expires_at", "revoked_at", "user__is_active", "scope")
    for row in changed.values(*columns, "opens_all", *LIMIT_KEYS, "cache_scope"):
        keys.pop(row["pk"], None)
        if row["user__is_active"]:
            keys[row["pk"]] = KeyEntry(
                row["pk"],
                row["digest"],
                None if row["expires_at"] is None else row["expires_at"].timestamp(),
                is_revoked=row["revoked_at"] is not None,
                opens_metrics=row["scope"] == Key.Scope.METRICS,
                models=None if row["opens_all"] else frozenset(opened.get(row["pk"], ())),
                limits=Limits(*(row[key] for key in LIMIT_KEYS)) or UNLIMITED,
                cache_scope=row["cache_scope"],
            )
    return keys


def _gateways() -> int:
    """Those that have written a moment ago and have not said that they stop."""
    lately = Gateway.objects.filter(stopped_at=None, heartbeat_at__gte=Now() - GATEWAY_SILENCE)
    return max(1, lately.count())


class LiveTable:
    """The current Table, and the loop that keeps it so."""

    def __init__(self, cluster_keys: Sequence[ClusterKey], *, poll_s: float) -> None:
        self._cluster_keys, self._poll_s = cluster_keys, poll_s
        self._thread = DatabaseThread("table")
        self._task: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._changed = asyncio.Event()
        self._polled: asyncio.Future[None] | None = None
        self._is_behind = False
        self.current = Table()

    async def start(self) -> None:
        """Reads once, so that the first request finds a table; a database that is away is waited for
        behind it."""
        await self._poll()
        self._task = asyncio.create_task(self._keep_up())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._thread.stop()

    def clock_s(self) -> float | None:
        """What the database's clock says now, in seconds; None before it was ever asked."""
        table = self.current
        return None if table.revision < 0 else table.now_s(monotonic())

    def is_fresh(self) -> bool:
        """Whether the table can be trusted in what it does not hold."""
        return not self._is_behind and monotonic() - self.current.read_at_s < FRESH_S

    def changed(self) -> asyncio.Event:
        """Set once the table differs from the current one."""
        return self._changed

    async def refresh(self) -> None:
        """Until a read that began after this call has ended: what was committed before it is in the table
        then. A database that hangs is not waited for."""
        if self._polled is None:
            self._polled = asyncio.get_running_loop().create_future()
        self._nudge.set()
        await asyncio.wait((self._polled,), timeout=REFRESH_S)

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(GAP_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), self._poll_s)
            self._nudge.clear()
            waiting, self._polled = self._polled, None
            await self._poll()
            if waiting is not None:
                waiting.set_result(None)

    async def _poll(self) -> None:
        previous = self.current
        try:
            self.current = await self._thread.run(lambda: read_table(previous, self._cluster_keys))
        except (
            Exception
        ) as error:  # whatever it is, the table that there is serves on, and the next poll tries again
            if not self._is_behind:
                is_away = isinstance(error, (DatabaseError, InterfaceError))
                log.error(
                    "The routing table stays at revision %d: %s",
                    previous.revision,
                    error,
                    exc_info=not is_away,
                )
            self._is_behind = True
            return
        if self._is_behind:
            log.warning("The routing table is kept up again.")
            self._is_behind = False
        if self.current.revision != previous.revision or self.current.situations != previous.situations:
            self._changed.set()
            self._changed = asyncio.Event()
