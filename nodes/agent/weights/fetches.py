"""The fetches of a node: one for all who want the same, so many at a time, each with room made for it first.

What is fetched ahead of time is on record, and goes on after a restart. What nobody wants any more is
stopped, and leaves nothing behind; what failed, or was cut off with the agent, leaves what it has for the
next try.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catalog.source import HubSource, SourceError, parse_source
from nodes.agent.clock import now_s
from nodes.agent.configuration import Configuration
from nodes.agent.state import StateFolder
from nodes.agent.weights.child import Job
from nodes.agent.weights.sources import FetchError, Order, folder_of, local_path, order_of
from nodes.agent.weights.store import Holding, Store, StoreError, total_bytes
from nodes.progress import progress_words, size_words
from nodes.protocol import (
    FETCHING,
    HELD,
    PARTIAL,
    TRANSIENT,
    Launch,
    Peer,
    SharedWeights,
    WeightsOrder,
    WeightsReport,
    to_json,
)
from nodes.tickets import is_commit, weights_key

log = logging.getLogger("llmgw.agent")

ROOT = Path(__file__).resolve().parents[3]  # from where the child is found by its name
MARGIN = 0.05  # of what is to come, that stays free beside it
RENEW_S = 240.0  # after which a fetch asks who has it now: their tickets are good for ten minutes
RATE_OVER_S = 10.0
LAST_KEPT = 100  # failures ahead of time that are remembered


@dataclass(slots=True, eq=False)
class Fetch:
    """One fetch, for all who wait for it. key: empty until its commit is known. granted: bytes that room was
    made for."""

    order: Order
    key: str = ""
    done: int = 0
    total: int | None = None
    granted: int = 0
    note: str = ""
    peers: Sequence[Peer] = ()
    told_peers_s: float = field(default_factory=now_s)
    users: int = 0
    is_ahead: bool = False
    task: asyncio.Task[str] | None = None
    child: asyncio.subprocess.Process | None = None
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def bytes_per_s(self) -> int | None:
        """Over the last seconds; None until bytes have come."""
        if len(self.samples) < 2:
            return None
        (since_s, before), (_, last) = self.samples[0], self.samples[-1]
        lasted_s = now_s() - since_s
        return max(0, round((last - before) / lasted_s)) if lasted_s > 0 else None

    @property
    def wants_peers(self) -> bool:
        return self.child is not None and now_s() - self.told_peers_s > RENEW_S

    @property
    def to_come(self) -> int:
        """Of what room was made for."""
        return max(0, min(self.granted, (self.total or 0) - self.done)) if self.granted else 0

    def count(self, done: int, total: int) -> None:
        moment_s = now_s()
        self.done, self.total = done, total
        self.samples.append((moment_s, done))
        while len(self.samples) > 2 and moment_s - self.samples[0][0] > RATE_OVER_S:
            self.samples.popleft()

    def tell(self, **said: Any) -> None:
        """To its child, where it has one."""
        if self.child is not None and self.child.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self.child.stdin.write(json.dumps(said).encode() + b"\n")

    @property
    def says(self) -> str:
        if self.note:
            return f"{self.note[0].upper()}{self.note[1:]}."
        if self.total is None:
            return ""
        told = progress_words(self.done, self.total, self.bytes_per_s)
        size, _, speed = told.partition(", ")
        return f"{size} of {self.order.repo} are on the node" + (f"; {speed}" if speed else "")


class Fetches:
    def __init__(self, configuration: Configuration, state: StateFolder) -> None:
        self.store = Store(configuration.store)
        self._told, self._state = configuration, state
        self._running: dict[Order, Fetch] = {}
        self._ahead: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[WeightsOrder, str]] = {}  # what was asked for ahead of time
        self._slots = asyncio.Semaphore(configuration.fetches)
        self._making_room = asyncio.Lock()
        self._is_used: Callable[[Holding], bool] = lambda holding: True  # until it is known what runs
        self._is_closing = False

    # --- the agent's beginning and end

    def begin(self, is_used: Callable[[Holding], bool]) -> None:
        """is_used: whether something that runs here reads it. What was to be fetched ahead goes on."""
        self._is_used = is_used
        self.store.tidy()
        for order in self._state.ledger.ahead.values():
            self.fetch_ahead(order)

    def part(self) -> None:
        """From here on, whatever is cut off is to go on with the next agent."""
        self._is_closing = True

    async def close(self) -> None:
        self.part()
        for task in self._ahead.values():
            task.cancel()
        if self._ahead:
            await asyncio.wait([*self._ahead.values()])

    # --- for a rank

    async def obtain(
        self, launch: Launch, peers: Sequence[Peer], watch: Callable[[Fetch], None] | None = None
    ) -> str:
        """The path to give to the engine. watch: is shown the fetch, if there has to be one. Raises
        FetchError."""
        order = order_of(launch)
        if order is None:
            return await asyncio.to_thread(local_path, launch, self._told.roots)
        fetch = self._running.get(order)
        if fetch is None or fetch.task is None or fetch.task.done():
            fetch = self._running[order] = Fetch(order, is_ahead=watch is None)
            if is_commit(order.revision):
                fetch.key = weights_key(order.repo, order.revision)
            fetch.task = asyncio.create_task(self._run(fetch), name=f"fetch of {order.at}")
        self.meet(fetch, peers)
        if watch is not None:
            fetch.is_ahead = False
            watch(fetch)
        assert fetch.task is not None
        fetch.users += 1
        try:
            return await asyncio.shield(fetch.task)
        except FetchError as error:
            cause = error.cause
            raise FetchError(cause.cause, f'model "{launch.model}": {cause.sentence}', cause.kind) from None
        finally:
            fetch.users -= 1
            if not fetch.users:
                await self._leave(fetch)

    def meet(self, fetch: Fetch, peers: Sequence[Peer]) -> None:
        """Who else has it, as the control plane has told just now."""
        fetch.peers, fetch.told_peers_s = peers, now_s()
        fetch.tell(peers=[to_json(peer) for peer in peers])

    def heed(self, needed: Sequence[str] | None) -> None:
        """What the catalog's models need is not to make room for anything. Raises OSError."""
        if needed is not None:
            self._state.keep_needed(tuple(needed))

    async def _leave(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        if self._running.get(fetch.order) is fetch:
            del self._running[fetch.order]
        task = fetch.task
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
            if not self._is_closing:
                await asyncio.to_thread(self.store.sweep, fetch.order.repo)

    async def _run(self, fetch: Fetch) -> str:
        if path := await asyncio.to_thread(self._held, fetch.order):
            return path
        if self._slots.locked():
            fetch.note = f"it waits until fewer than {self._told.fetches} others are fetched on this node"
        async with self._slots:
            fetch.note = ""
            return await self._in_child(fetch)

    def _held(self, order: Order) -> str:
        """Where it is, if all of it is here and whole; no hub is asked for a commit that is known."""
        holding = self.store.holding(weights_key(order.repo, order.revision))
        if holding is None or not holding.listing:
            return ""
        names = order.choose({name: listed.size for name, listed in holding.listing.items()})
        try:
            with self.store.locked(order.repo, is_waiting=False):
                holding = self.store.verified(holding)
                if any(name not in holding.files for name in names):
                    return ""
                self.store.use(holding.key)
        except OSError:  # it is being changed just now, or the disk is
            return ""
        return folder_of(str(self.store.snapshot(holding, names[0])), names, is_gguf=order.is_gguf)

    async def _in_child(self, fetch: Fetch) -> str:
        told = self._told
        job = Job(str(told.store), fetch.order, tuple(fetch.peers), told.peer_patience_s)
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "nodes.agent.weights.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(job.line())  # and left open: its end tells of ours
            fetch.child = child
            self._share_rate()
            said = await self._hear(child.stdout, fetch)
            await child.wait()
        finally:
            fetch.child = None
            fetch.granted = 0
            self._share_rate()
            if child.returncode is None:
                child.kill()
                await child.wait()
        if "path" in said:
            await asyncio.to_thread(self.store.use, fetch.key)
            return str(said["path"])
        if "cause" in said:
            raise FetchError(said["cause"], said["sentence"], said["kind"])
        sentence = f"the download of {fetch.order.repo} ended with code {child.returncode}."
        raise FetchError("fetch_failed", sentence, TRANSIENT)

    async def _hear(self, lines: AsyncIterable[bytes], fetch: Fetch) -> dict[str, Any]:
        """How the child says it ended; how far it is may be told once more after that."""
        end: dict[str, Any] = {}
        async for line in lines:
            said = json.loads(line)
            if "done" in said:
                fetch.count(said["done"], said["total"])
            elif "note" in said:
                fetch.note = said["note"]
            elif "asks" in said:
                fetch.key = said["key"]
                fetch.tell(room=await self._make_room(fetch, said["asks"]))
            else:
                end = said
        return end

    def _share_rate(self) -> None:
        busy = [fetch for fetch in self._running.values() if fetch.child is not None]
        for fetch in busy:
            fetch.tell(bytes_per_s=self._told.fetch_bytes_per_s // len(busy))

    # --- room

    async def _make_room(self, fetch: Fetch, need: int) -> str:
        """Empty once there is room for so many bytes, else why there is none."""
        async with self._making_room:
            sentence = await asyncio.to_thread(self._make_room_now, fetch, need)
            fetch.granted = 0 if sentence else need
            return sentence

    def _make_room_now(self, fetch: Fetch, need: int) -> str:
        free = self._free_bytes(besides=fetch)
        missing = need + round(need * MARGIN) - free if need else 0
        if missing <= 0:
            return ""
        leaving: list[Holding] = []
        for holding in self._dispensable():
            if self._size(leaving) >= missing:
                break
            if holding.key != fetch.key:
                leaving.append(holding)
        short = missing - self._size(leaving)
        if short > 0:
            return (
                f"{fetch.order.at} needs {size_words(need)} and the store {self.store.path} has "
                f"{size_words(max(0, free))} free; {size_words(short)} are missing, with a margin of "
                f"{MARGIN:.0%}: make room, remove weights that no model needs, or give the agent another "
                f"--store or --store-limit."
            )
        for holding in leaving:
            try:
                given_back = self.store.remove(holding.key)
            except StoreError as error:
                return f"{fetch.order.at} finds no room: {error}"
            log.info("%s@%s made room of %s.", holding.repo, holding.revision[:8], size_words(given_back))
        return ""

    def _free_bytes(self, *, besides: Fetch | None = None) -> int:
        """On the disk, and of what the store may take, without what others have yet to bring."""
        to_come = sum(fetch.to_come for fetch in self._running.values() if fetch is not besides)
        path = self.store.path
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free
        if limit := self._told.store_limit_bytes:
            free = min(free, limit - self.store.held_bytes())
        return free - to_come

    def _dispensable(self) -> list[Holding]:
        """What no replica, no model and no other node needs, the least recently used first."""
        needed = self._state.ledger.needed
        if needed is None:
            return []
        sources = [source for source in map(_hub_source, needed) if source is not None]
        fetched = {fetch.key for fetch in self._running.values()}
        node = self._told.identity.node
        found = [
            holding
            for holding in self.store.holdings()
            if holding.key not in fetched
            and not self._is_used(holding)
            and not self.store.is_marked(holding.key, besides=node)
            and not any(holding.is_of(source.repo, source.revision) for source in sources)
        ]
        return sorted(found, key=lambda holding: (holding.used, holding.key))

    def _size(self, holdings: Sequence[Holding]) -> int:
        return sum(holding.size_bytes + self.store.parts_bytes(holding) for holding in holdings)

    # --- ahead of time, and removing

    def fetch_ahead(self, order: WeightsOrder) -> None:
        """On record until it is here or has failed. Raises FetchError where it can never be, or OSError."""
        launch = order.launch
        asked = order_of(launch)
        if asked is None:
            sentence = f'model "{launch.model}" is read from a path; put the weights there yourself.'
            raise FetchError("bad_source", sentence, TRANSIENT)
        self.heed(order.needed)
        self._failed.pop(asked.at, None)
        if asked.at not in self._ahead:
            self._state.keep_ahead({**self._state.ledger.ahead, asked.at: order})
            self._ahead[asked.at] = asyncio.create_task(self._bring_ahead(asked.at, order))

    async def _bring_ahead(self, at: str, order: WeightsOrder) -> None:
        try:
            path = await self.obtain(order.launch, order.peers)
            self._state.keep_weights(order.launch.source, path)
        except FetchError as error:
            log.warning("%s", error)
            self._failed[at] = (order, str(error))
            while len(self._failed) > LAST_KEPT:
                del self._failed[next(iter(self._failed))]
        except OSError as error:
            log.error("%s", self._state.no_room(error))
        finally:
            del self._ahead[at]
            if not self._is_closing:
                with contextlib.suppress(OSError):  # once more after a restart, which does no harm
                    ahead = self._state.ledger.ahead
                    self._state.keep_ahead({each: held for each, held in ahead.items() if each != at})

    async def remove(self, key: str) -> int:
        """The bytes that it gave back; a fetch of it ahead of time is ended first. Raises StoreError."""
        for at, task in list(self._ahead.items()):
            fetch = next((each for each in self._running.values() if each.order.at == at), None)
            if fetch is not None and fetch.key == key and fetch.is_ahead:
                task.cancel()
                await asyncio.wait([task])
                if self.store.holding(key) is None:
                    return 0
        holding = self.store.holding(key)
        if holding is None:
            raise StoreError("These weights are not on this node; look again.")
        at = f"{holding.repo}@{holding.revision[:8]}"
        if self._is_used(holding):
            raise StoreError(f"{at} is used on this node; stop the replicas that read it first.")
        if self.store.is_marked(key, besides=self._told.identity.node):
            raise StoreError(f"{at} is used by another node that shares this store; stop its replicas first.")
        return await asyncio.to_thread(self.store.remove, key)

    # --- what is told

    def reports(self) -> list[WeightsReport]:
        """Reads the disk. Marks what is in use, so that nodes which share the store leave it alone."""
        fetching = {fetch.key: fetch for fetch in list(self._running.values()) if fetch.child is not None}
        found, used = [], []
        for holding in self.store.holdings():
            is_used = self._is_used(holding)
            used += [holding.key] if is_used else []
            found.append(self._report(holding, fetching.get(holding.key), is_used))
        self.store.mark(self._told.identity.node, used)
        known = {each.key for each in found}
        for order, sentence in list(self._failed.values()):
            asked = order_of(order.launch)
            key = weights_key(asked.repo, asked.revision) if asked else ""
            if asked is not None and key not in known:
                found.append(WeightsReport(key, asked.repo, asked.revision, PARTIAL, reason=sentence))
        return found

    def _report(self, holding: Holding, fetch: Fetch | None, is_used: bool) -> WeightsReport:
        failed = [
            sentence
            for order, sentence in self._failed.values()
            if (asked := order_of(order.launch)) and holding.is_of(asked.repo, asked.revision)
        ]
        wanted = [name for name in holding.wanted if name in holding.listing]
        return WeightsReport(
            key=holding.key,
            repo=holding.repo,
            revision=holding.revision,
            state=FETCHING if fetch else HELD if holding.is_whole else PARTIAL,
            size_bytes=holding.size_bytes + self.store.parts_bytes(holding),
            total_bytes=total_bytes(holding, wanted),
            bytes_per_s=fetch.bytes_per_s if fetch else None,
            is_used=is_used,
            reason=failed[-1] if failed and not holding.is_whole else "",
        )

    def room_bytes(self) -> int | None:
        """What could be taken yet, and what would be given back for it; what ranks have yet to bring is not
        counted here, as the control plane knows of it."""
        try:
            free = self._free_bytes() + sum(
                fetch.to_come for fetch in list(self._running.values()) if not fetch.is_ahead
            )
            return max(0, round((free + self._size(self._dispensable())) / (1 + MARGIN)))
        except OSError:
            return None

    def shared(self, key: str) -> SharedWeights | None:
        """What another node may know of it."""
        holding = self.store.holding(key)
        fetch = next((each for each in self._running.values() if each.key == key), None)
        if holding is None and fetch is None:
            return None
        if holding is None:
            assert fetch is not None
            return SharedWeights(fetch.order.repo, fetch.order.revision, is_fetching=True)
        return SharedWeights(
            holding.repo,
            holding.revision,
            holding.listing,
            tuple(holding.files),
            is_fetching=fetch is not None,
            done_bytes=fetch.done if fetch else holding.size_bytes,
        )


def _hub_source(text: str) -> HubSource | None:
    with contextlib.suppress(SourceError):
        source = parse_source(text)
        return source if isinstance(source, HubSource) else None
    return None
