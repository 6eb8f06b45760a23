"""What keys and models may use, kept to by all processes together.

Over Redis where there is one. Without it, or while it is away, each process keeps to its share of every limit
by itself: never to none. A request does not wait for a Redis that is away, since one that did not answer in a
moment is not asked again until it has answered a probe. What a request took is given back when it ends; what
a killed process had taken falls back by itself. Nothing here fails a request but a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError

from catalog.parts import Limits
from catalog.reading import quote
from llmgw.gateway import rates
from llmgw.gateway.admission import UNLIMITED, KeyEntry, ModelEntry
from llmgw.gateway.rates import MINUTE_S, Windows

log = logging.getLogger(__name__)

PATIENCE_S = 0.25
"""The longest that a request waits for Redis, all its questions together."""
CONNECTIONS_LIMIT = 64

REQUESTS, TOKENS, RUNNING = "requests", "tokens", "running"
_WORDS = {REQUESTS: "requests a minute", TOKENS: "tokens a minute", RUNNING: "requests at once"}
_AWAY = (RedisError, StorageError, OSError, TimeoutError)

_TAKE = """
local now = redis.call('TIME')[1]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""
_RENEW = """
local now = redis.call('TIME')[1]
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose limits: `name` is what counters are called, `whose` begins a sentence."""

    name: str
    whose: str
    limits: Limits


class PerMinute(RateLimitItemPerMinute):
    """A counter keeps its name when its limit is edited, and what was used stays used."""

    def key_for(self, *identifiers: bytes | str | float) -> str:
        return "/".join(("llmgw", *map(str, identifiers)))


class Lease:
    """What one request took. `give_back` once, however it ended."""

    __slots__ = ("_limiter", "charged", "member", "scopes")

    def __init__(self, limiter: Limiter, scopes: Sequence[Scope], charged: int, member: str) -> None:
        self._limiter, self.scopes, self.charged, self.member = limiter, scopes, charged, member

    def give_back(self, tokens: int) -> None:
        """`tokens` were really used, of prompt and answer."""
        if self.scopes:
            self._limiter._give_back(self, tokens)


@dataclass(frozen=True, slots=True)
class Pace:
    """Of what a process does beside its requests. What it took of a concurrency it asks for again every
    `renew_s`; a killed one's falls back after `lease_s`. Redis that is away is tried every `probe_s`."""

    lease_s: int = 30
    renew_s: float = 10.0
    probe_s: float = 1.0


PACE = Pace()


class Limiter:
    """One process's, between `start` and `stop`. `processes` tells how many share a limit."""

    def __init__(self, redis_url: str, *, processes: Callable[[], int], pace: Pace = PACE) -> None:
        self._processes = processes
        self._windows = Windows()
        self._running: Counter[str] = Counter()
        self._shared = _Shared(redis_url, pace) if redis_url else None
        self._none = Lease(self, (), 0, "")

    async def start(self) -> None:
        if self._shared is not None:
            await self._shared.start()

    async def stop(self) -> None:
        if self._shared is not None:
            await self._shared.stop()

    @property
    def is_redis_away(self) -> bool:
        return self._shared is not None and self._shared.is_away

    async def take(self, key: KeyEntry | None, model: ModelEntry, tokens: int) -> Lease:
        """For a request whose prompt has at least so many tokens; without a key where that was taken from
        before. Raises Refused where a limit is reached; nothing is held then, though a request that was
        refused may count among its minute's."""
        if model.limits is UNLIMITED and (key is None or key.limits is UNLIMITED):
            return self._none  # nearly always
        scopes = []
        if key is not None and key.limits:
            scopes.append(Scope(f"key/{key.id}", f"The key llmgw_{key.id}_...", key.limits))
        if model.limits:
            scopes.append(Scope(f"model/{model.id}", f"The model {quote(model.name)}", model.limits))
        if not scopes:
            return self._none
        for scope in scopes:
            if 0 < scope.limits.tokens_per_minute < tokens:
                raise rates.larger_than_limit(scope.whose, scope.limits.tokens_per_minute, tokens)
        charged = max(1, tokens)
        member = "" if self._shared is None else await self._shared.take(scopes, charged)
        if not member:
            self._keep_to_share(scopes, charged)
            member = "" if self._shared is None else self._shared.hold(scopes)
        now_s = monotonic()
        for scope in scopes:
            self._running[scope.name] += 1
            self._windows.add(f"{REQUESTS}/{scope.name}", 1, now_s)
            self._windows.add(f"{TOKENS}/{scope.name}", charged, now_s)
        return Lease(self, scopes, charged, member)

    def _keep_to_share(self, scopes: Sequence[Scope], tokens: int) -> None:
        processes, now_s = self._processes(), monotonic()
        for scope in scopes:
            if limit := scope.limits.concurrency:
                own = rates.share(limit, processes)
                if self._running[scope.name] >= own:
                    raise rates.over_limit(scope.whose, _WORDS[RUNNING], limit, own, 0)
            for what, limit, amount in (
                (REQUESTS, scope.limits.requests_per_minute, 1),
                (TOKENS, scope.limits.tokens_per_minute, tokens),
            ):
                if limit:
                    own = rates.share(limit, processes)
                    wait_s = self._windows.wait_s(f"{what}/{scope.name}", min(amount, own), own, now_s)
                    if wait_s > 0:
                        raise rates.over_limit(scope.whose, _WORDS[what], limit, own, wait_s)

    def _give_back(self, lease: Lease, tokens: int) -> None:
        more, now_s = max(0, tokens - lease.charged), monotonic()
        for scope in lease.scopes:
            self._running[scope.name] -= 1
            if not self._running[scope.name]:
                del self._running[scope.name]
            self._windows.add(f"{TOKENS}/{scope.name}", more, now_s)
        if lease.member and self._shared is not None:
            self._shared.give_back(lease.scopes, lease.member, more)


class _Shared:
    """The counters in Redis, and a task that gives back to them what nobody waits for."""

    def __init__(self, url: str, pace: Pace) -> None:
        self._pace = pace
        self._pool = ConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS_LIMIT,
            socket_connect_timeout=PATIENCE_S,
            socket_timeout=PATIENCE_S,
            retry=None,
        )
        self._redis = Redis(connection_pool=self._pool)
        shared: Any = self._pool  # which it takes, other than its types say
        self._storage = RedisStorage(f"async+{url}", implementation="redispy", connection_pool=shared)
        self._minutes = SlidingWindowCounterRateLimiter(self._storage)
        self._take, self._renew = self._redis.register_script(_TAKE), self._redis.register_script(_RENEW)
        self._process, self._number = uuid.uuid4().hex, 0
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        self._told: set[str] = set()
        """Of those held, or ended, what Redis may know of: the rest needs no word to it."""
        self._ended: deque[tuple[str, str]] = deque()
        self._owed: Counter[str] = Counter()
        """Tokens that were used beyond what was charged."""
        self._has_ended = asyncio.Event()
        self._renewed_at_s = monotonic()
        self.is_away = self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_up())

    async def stop(self) -> None:
        """Gives back what has ended first. Nothing is cancelled: Redis' client may forget that it was."""
        self._is_stopping = True
        self._has_ended.set()
        if self._task is not None:
            await self._task
        await self._pool.aclose()

    async def take(self, scopes: Sequence[Scope], tokens: int) -> str:
        """The name under which the concurrency was taken; empty while Redis is away. Raises Refused."""
        if self.is_away:
            return ""
        member = self._new_member()
        taken: list[str] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                for scope in scopes:
                    if limit := scope.limits.concurrency:
                        taken.append(scope.name)
                        self._told.add(member)
                        if not await self._take(_running(scope.name), [member, limit, self._pace.lease_s]):
                            raise rates.over_limit(scope.whose, _WORDS[RUNNING], limit, limit, 0)
                for scope in scopes:
                    await self._hit(scope, REQUESTS, scope.limits.requests_per_minute, 1)
                    await self._hit(scope, TOKENS, scope.limits.tokens_per_minute, tokens)
        except _AWAY as error:
            self._miss(error)
            self._let_go(taken, member)
            return ""
        except BaseException:
            self._let_go(taken, member)
            raise
        for name in taken:
            self._held[name].add(member)
        return member

    def hold(self, scopes: Sequence[Scope]) -> str:
        """For one that was let in without being asked for: told to Redis once it is back."""
        member = self._new_member()
        for scope in scopes:
            if scope.limits.concurrency:
                self._held[scope.name].add(member)
        return member

    def _new_member(self) -> str:
        self._number += 1
        return f"{self._process}:{self._number}"

    async def _hit(self, scope: Scope, what: str, limit: int, amount: int) -> None:
        if not limit or await self._minutes.hit(PerMinute(limit), what, scope.name, cost=amount):
            return
        counter = PerMinute(limit).key_for(what, scope.name)
        before, _, current, left_s = await self._storage.get_sliding_window(counter, int(MINUTE_S))
        passed_s = min(max(2 * MINUTE_S - left_s, 0.0), MINUTE_S)
        wait_s = rates.wait_s(before, current, passed_s, amount, limit)
        raise rates.over_limit(scope.whose, _WORDS[what], limit, limit, wait_s)

    def give_back(self, scopes: Sequence[Scope], member: str, tokens: int) -> None:
        self._let_go([scope.name for scope in scopes if scope.limits.concurrency], member)
        for scope in scopes:
            if scope.limits.tokens_per_minute and tokens:
                self._owed[scope.name] += tokens

    def _let_go(self, names: Sequence[str], member: str) -> None:
        for name in names:
            self._held[name].discard(member)
            if not self._held[name]:
                del self._held[name]
            if member in self._told:
                self._ended.append((name, member))
        if not self.is_away:
            self._has_ended.set()

    # --- beside the requests --------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while not self._is_stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.probe_s):
                    await self._has_ended.wait()
            self._has_ended.clear()
            try:
                async with asyncio.timeout(self._pace.probe_s):
                    await self._settle()
            except _AWAY as error:
                self._miss(error)
            else:
                if self.is_away:
                    log.warning("Redis is back: limits are kept to by all processes together again.")
                self.is_away = False

    async def _settle(self) -> None:
        """Gives back what has ended, and holds on to what has not."""
        if self.is_away:  # one that is full answers, and takes nothing
            await self._redis.set("llmgw/probe", self._process, ex=self._pace.lease_s)
        while self._ended:
            name, member = self._ended[0]
            await self._redis.zrem(_running(name)[0], member)
            self._ended.popleft()
            self._told.discard(member)
        for name, tokens in [*self._owed.items()]:
            await self._minutes.hit(PerMinute(2**53), TOKENS, name, cost=tokens)
            self._owed[name] -= tokens
            if not self._owed[name]:
                del self._owed[name]
        if self.is_away or monotonic() - self._renewed_at_s >= self._pace.renew_s:
            for name, members in [*self._held.items()]:
                self._told |= members
                await self._renew(_running(name), [self._pace.lease_s, *members])
            self._renewed_at_s = monotonic()

    def _miss(self, error: BaseException) -> None:
        if not self.is_away:
            log.warning(
                "Redis is away, and each process keeps to its share of every limit: %s",
                str(error) or "no answer",
            )
        self.is_away = True


def _running(name: str) -> list[str]:
    return [f"llmgw/{RUNNING}/{name}"]
