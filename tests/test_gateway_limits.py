"""Limits over Redis and without it: kept by several processes together, and by each when Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import pytest
from redis.asyncio import Redis

from catalog.parts import Limits
from llmgw.gateway import limits
from llmgw.gateway.admission import KeyEntry, ModelEntry, Refused
from llmgw.gateway.limits import PACE, Lease, Limiter, Pace
from tests.services import Service, start_redis

pytestmark = pytest.mark.one_database

MODEL, OPEN = ModelEntry(1, "m"), KeyEntry("open", "d")


def _key(**limits_: int) -> KeyEntry:
    return KeyEntry("abc", "d", limits=Limits(**limits_))


def _model(**limits_: int) -> ModelEntry:
    return ModelEntry(1, "m", limits=Limits(**limits_))


@pytest.fixture(scope="module")
def redis() -> Iterator[tuple[str, Service]]:
    url, service = start_redis()
    try:
        yield url, service
    finally:
        service.stop()


@asynccontextmanager
async def _running(url: str = "", processes: int = 1, pace: Pace = PACE) -> AsyncIterator[Limiter]:
    limiter = Limiter(url, processes=lambda: processes, pace=pace)
    await limiter.start()
    try:
        yield limiter
    finally:
        await limiter.stop()


@pytest.fixture(params=["redis", ""], ids=["over Redis", "by itself"])
async def limiter(request: pytest.FixtureRequest) -> AsyncIterator[Limiter]:
    """One process's, with nothing used yet."""
    url = ""
    if request.param:
        url, _ = request.getfixturevalue("redis")
        async with Redis.from_url(url) as client:
            await client.flushdb()
    async with _running(url) as one:
        yield one


async def _refusal(limiter: Limiter, key: KeyEntry, model: ModelEntry = MODEL, tokens: int = 1) -> Refused:
    with pytest.raises(Refused) as caught:
        await limiter.take(key, model, tokens)
    return caught.value


async def _until(what: Callable[[], Awaitable[object]]) -> None:
    """Asks again and again, as what is given back reaches Redis a moment later."""
    async with asyncio.timeout(5):
        for _ in range(500):
            if await what():
                return
            await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


# --- what a limit is ----------------------------------------------------------------------------------------


async def test_who_has_no_limits_takes_nothing(limiter: Limiter) -> None:
    leases = {await limiter.take(OPEN, MODEL, 10**9) for _ in range(3)}
    assert len(leases) == 1
    for lease in leases:
        lease.give_back(5)


@pytest.mark.parametrize(
    ("key", "model", "whose"),
    [
        pytest.param(_key(requests_per_minute=3), MODEL, "The key llmgw_abc_...", id="a key's"),
        pytest.param(OPEN, _model(requests_per_minute=3), 'The model "m"', id="a model's"),
        pytest.param(
            _key(requests_per_minute=3),
            _model(requests_per_minute=4),
            "The key llmgw_abc_...",
            id="the lower",
        ),
    ],
)
async def test_requests_of_a_minute_are_limited(
    limiter: Limiter, key: KeyEntry, model: ModelEntry, whose: str
) -> None:
    for _ in range(3):
        (await limiter.take(key, model, 1)).give_back(2)
    refused = await _refusal(limiter, key, model)
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert refused.message.startswith(f"{whose} may have 3 requests a minute")
    assert 1 <= (refused.retry_after_s or 0) <= 120


async def test_tokens_of_a_minute_are_limited_by_what_was_really_used(limiter: Limiter) -> None:
    key = _key(tokens_per_minute=100)
    (await limiter.take(key, MODEL, 10)).give_back(60)
    lease = await limiter.take(key, MODEL, 10)  # 70 now
    lease.give_back(500)  # what was begun is finished
    await _until(partial(_is_refused, limiter, key))
    refused = await _refusal(limiter, key)
    assert "may have 100 tokens a minute" in refused.message
    assert 48 < (refused.retry_after_s or 0) < 120, "five minutes' worth, of which one counts in the next"


async def test_a_prompt_larger_than_its_limit_is_not_told_to_try_again(limiter: Limiter) -> None:
    refused = await _refusal(limiter, _key(tokens_per_minute=100), tokens=101)
    assert (refused.status, refused.code, refused.retry_after_s) == (400, "larger_than_limit", None)
    assert "at least 101" in refused.message


async def test_requests_at_once_are_limited_until_one_ends(limiter: Limiter) -> None:
    key = _key(concurrency=2)
    first, second = [await limiter.take(key, MODEL, 1) for _ in range(2)]
    refused = await _refusal(limiter, key)
    assert "may have 2 requests at once" in refused.message
    first.give_back(3)
    third = await _soon(limiter, key)
    await _refusal(limiter, key)
    second.give_back(3)
    third.give_back(3)
    assert not limiter._running


async def _soon(limiter: Limiter, key: KeyEntry) -> Lease:
    leases: list[Lease] = []

    async def is_let_in() -> bool:
        with contextlib.suppress(Refused):
            leases.append(await limiter.take(key, MODEL, 1))
        return bool(leases)

    await _until(is_let_in)
    return leases[0]


async def _is_refused(limiter: Limiter, key: KeyEntry) -> bool:
    try:
        (await limiter.take(key, MODEL, 1)).give_back(1)
    except Refused:
        return True
    return False


async def test_a_request_that_one_limit_refuses_holds_nothing_of_another(limiter: Limiter) -> None:
    key, model = _key(concurrency=1), _model(requests_per_minute=1)
    (await limiter.take(OPEN, model, 1)).give_back(1)
    await _refusal(limiter, key, model)
    (await _soon(limiter, key)).give_back(1)


async def test_a_limit_that_is_edited_counts_what_was_used_before(limiter: Limiter) -> None:
    for _ in range(3):
        (await limiter.take(_key(requests_per_minute=3), MODEL, 1)).give_back(1)
    (await limiter.take(_key(requests_per_minute=4), MODEL, 1)).give_back(1)
    await _refusal(limiter, _key(requests_per_minute=4))


# --- several processes --------------------------------------------------------------------------------------


async def test_processes_keep_to_a_limit_together(redis: tuple[str, Service]) -> None:
    url, _ = redis
    key = KeyEntry("together", "d", limits=Limits(requests_per_minute=6, concurrency=5))
    async with _running(url, 2) as one, _running(url, 2) as other:
        leases = [await each.take(key, MODEL, 1) for each in (one, other, one, other, one)]
        for each in (one, other):
            assert "5 requests at once" in (await _refusal(each, key)).message
        leases.pop().give_back(1)
        leases.append(await _soon(other, key))
        leases.pop().give_back(1)

        async def is_told_of_the_minute() -> bool:
            return "requests a minute" in (await _refusal(other, key)).message

        await _until(is_told_of_the_minute)


async def test_processes_without_redis_take_their_shares() -> None:
    key = _key(concurrency=4, requests_per_minute=100)
    async with _running(processes=2) as one:
        for _ in range(2):
            await one.take(key, MODEL, 1)
        assert "4 requests at once, 2 of them through this process" in (await _refusal(one, key)).message


async def test_what_a_killed_process_had_taken_falls_back(redis: tuple[str, Service]) -> None:
    pace = Pace(lease_s=1, renew_s=0.2, probe_s=0.2)
    url, _ = redis
    key = KeyEntry("killed", "d", limits=Limits(concurrency=1))
    killed = Limiter(url, processes=lambda: 2, pace=pace)  # never started: nobody asks for its leases again
    await killed.take(key, MODEL, 1)
    async with _running(url, 2, pace) as other:
        lease = await _soon(other, key)
        await asyncio.sleep(1.5)
        async with _running(url, 2, pace) as third:
            await _refusal(third, key)  # a living one keeps its own for as long as it takes
        lease.give_back(1)
    await killed.stop()


# --- Redis away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["killed", "stopped", "full"])
async def test_redis_away_means_shares_and_no_waiting_until_it_is_back(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, limits.__name__)
    url, service = await asyncio.to_thread(start_redis)
    key = _key(concurrency=4, requests_per_minute=100)
    try:
        async with _running(url, 2) as one:
            held = await one.take(key, MODEL, 1)
            if fault == "killed":
                await asyncio.to_thread(service.stop)
            elif fault == "full":
                await _give_memory(url, 1)
            else:
                pid = await _pid(url)
                os.kill(pid, signal.SIGSTOP)
            begun_s = monotonic()
            held_too = await one.take(key, MODEL, 1)
            assert monotonic() - begun_s < limits.PATIENCE_S + 1
            begun_s = monotonic()
            assert "2 of them through this process" in (await _refusal(one, key)).message
            assert monotonic() - begun_s < 0.1, "it is remembered"
            held.give_back(1)
            (await one.take(key, MODEL, 1)).give_back(1)
            assert re.search("Redis is away, .* share of every limit: .", caplog.text)
            if fault != "killed":
                if fault == "full":
                    await _give_memory(url, 0)
                else:
                    os.kill(pid, signal.SIGCONT)

                async def is_back() -> bool:
                    return "Redis is back" in caplog.text

                await _until(is_back)
                leases = [await _soon(one, key) for _ in range(3)]
                await _refusal(one, key)  # the one that was let in meanwhile counts
                for lease in leases:
                    lease.give_back(1)
            held_too.give_back(1)
    finally:
        await asyncio.to_thread(service.stop)


async def test_nothing_piles_up_while_redis_is_away_and_what_was_used_meanwhile_is_told_to_it_later() -> None:
    url, service = await asyncio.to_thread(start_redis)
    key = _key(concurrency=4, tokens_per_minute=100_000)
    try:
        async with _running(url) as one:
            pid = await _pid(url)
            os.kill(pid, signal.SIGSTOP)
            for _ in range(200):
                (await one.take(key, MODEL, 1)).give_back(300)
            assert one.is_redis_away
            assert one._shared is not None
            assert len(one._shared._ended) + len(one._shared._owed) <= 3
            os.kill(pid, signal.SIGCONT)

            async def is_told() -> bool:
                with contextlib.suppress(Refused):
                    (await one.take(key, MODEL, 50_000)).give_back(1)
                    return False
                return not one.is_redis_away

            await _until(is_told)
    finally:
        await asyncio.to_thread(service.stop)


async def _give_memory(url: str, size: int) -> None:
    """0 is as much as there is."""
    async with Redis.from_url(url) as client:
        await client.config_set("maxmemory", size)


async def _pid(url: str) -> int:
    async with Redis.from_url(url) as client:
        info = await client.info("server")
    return int(info["process_id"])
