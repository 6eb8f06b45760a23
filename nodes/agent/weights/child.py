"""The process that brings one repository's files into the store, from peers where one has them, else from
the hub. It says how far it is, a line of JSON each, and asks its agent for room before the first byte. What
it has of a file stays when it is ended, and the next one goes on from there. It ends with the agent.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nodes.agent.weights.parts import Pace, Part, WrongChecksum
from nodes.agent.weights.peers import PeerError, Peers
from nodes.agent.weights.sources import FetchError, Order, folder_of
from nodes.agent.weights.store import Holding, Kept, Store, sha256_of, size_of, total_bytes
from nodes.progress import size_words
from nodes.protocol import DISK, TRANSIENT, Peer, read, to_json
from nodes.tickets import is_commit, weights_key

REPORT_S = 0.5
HUB_TRIES = 2  # of a file that comes with another checksum than was told


@dataclass(frozen=True, slots=True)
class Job:
    """What the agent writes to this process first."""

    store: str
    order: Order
    peers: Sequence[Peer] = ()
    patience_s: float = 20.0
    every_s: float = 1.0

    def line(self) -> bytes:
        return json.dumps(to_json(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> Job:
        return read(cls, json.loads(line))


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")  # in one piece: two threads speak
    sys.stdout.flush()


class Work:
    def __init__(self, job: Job) -> None:
        self._order, self._store = job.order, Store(Path(job.store))
        self._peers: Peers | None = None
        self._met: Sequence[Peer] = job.peers
        self._job = job
        self._pace = Pace()
        self._room: queue.Queue[str] = queue.Queue()
        self._kept_bytes = self._part_bytes = 0
        self._total: int | None = None

    # --- what the agent says meanwhile

    def listen(self) -> None:
        for line in sys.stdin:
            told = json.loads(line)
            if "room" in told:
                self._room.put(told["room"])
            if "bytes_per_s" in told:
                self._pace.bytes_per_s = told["bytes_per_s"]
            if "peers" in told:
                self._met = [read(Peer, each) for each in told["peers"]]
                if self._peers is not None:
                    self._peers.meet(self._met)
        os._exit(0)  # the agent is gone

    def report(self) -> None:
        last: tuple[int, int | None] | None = None
        while True:
            now = (self._kept_bytes + self._part_bytes, self._total)
            if self._total is not None and now != last:
                say(done=now[0], total=now[1])
                last = now
            time.sleep(REPORT_S)

    # --- the work

    def run(self) -> str:
        """What to give to the engine. Raises FetchError."""
        order, store = self._order, self._store
        if is_commit(order.revision):
            self._meet(order.revision)
        holding = self._holding()
        self._meet(holding.revision)
        names = order.choose({name: listed.size for name, listed in holding.listing.items()})
        holding = replace(holding, wanted=tuple(sorted({*holding.wanted, *names})))
        store.save(holding)
        holding = store.verified(holding)
        lacking = [name for name in names if name not in holding.files]
        here = sum(size_of(store.part(holding, name)) for name in lacking)
        total = total_bytes(holding, names)
        self._kept_bytes = total - total_bytes(holding, lacking)
        self._part_bytes, self._total = here, total
        say(done=self._kept_bytes + here, total=total)
        if lacking:
            say(asks=max(0, total_bytes(holding, lacking) - here), key=holding.key)
            if sentence := self._room.get():
                raise FetchError("disk_full", sentence, DISK)
        try:
            for name in lacking:
                self._part_bytes = 0
                kept = self._bring(holding, name)
                holding = replace(holding, files={**holding.files, name: kept})
                store.link(holding, name, kept.blob)
                store.save(holding)
                self._kept_bytes += kept.size
        except OSError as error:
            raise self._own_disk(error, holding, names) from None
        self._part_bytes = 0
        say(done=total, total=total)
        return folder_of(str(store.snapshot(holding, names[0])), names, is_gguf=order.is_gguf)

    def _meet(self, revision: str) -> None:
        if self._peers is None:
            key = weights_key(self._order.repo, revision)
            self._peers = Peers(key, patience_s=self._job.patience_s, every_s=self._job.every_s)
            self._peers.meet(self._met)

    def _holding(self) -> Holding:
        """What is known of the commit. A hub is asked for the files of one only once, and where it does not
        answer, a peer is."""
        order = self._order
        key = weights_key(order.repo, order.revision)
        known = self._store.holding(key)
        if known is not None and known.listing:
            return known
        from nodes.agent.weights import hub  # takes a second, which what is known already does not need

        try:
            found = hub.listing(order)
        except FetchError as failure:
            listing = self._peers.listing() if self._peers and failure.cause.kind == TRANSIENT else None
            if listing is None:
                raise
            found = Holding(order.repo, order.revision, listing)
        known = self._store.holding(found.key)
        return replace(known, listing=found.listing) if known else found

    def _bring(self, holding: Holding, name: str) -> Kept:
        """The file, whole and checked, under the name of a blob. Raises FetchError or OSError."""
        listed, path = holding.listing[name], self._store.part(holding, name)
        blob = path.with_name(holding.blob_of(name))
        if (kept := self._there_already(blob, listed.size, holding, name)) is not None:
            return kept
        with Part(path, listed, pace=self._pace, tell=self._tell) as part:
            sha256 = self._pull(holding, name, part)
        os.replace(path, blob)
        return Kept(listed.size, sha256, blob.name, blob.lstat().st_mtime_ns)

    def _there_already(self, blob: Path, size: int, holding: Holding, name: str) -> Kept | None:
        """Of another commit, or of a child that died before it wrote down what it had."""
        try:
            found = blob.lstat()
        except OSError:
            return None
        told = holding.listing[name].sha256
        if stat.S_ISREG(found.st_mode) and found.st_size == size and told and sha256_of(blob) == told:
            return Kept(size, told, blob.name, found.st_mtime_ns)
        blob.unlink()
        return None

    def _pull(self, holding: Holding, name: str, part: Part) -> str:
        """Its SHA-256, once it is whole."""
        assert self._peers is not None
        tries = HUB_TRIES
        while True:
            peer = None if part.is_whole else self._peers.holder(name)
            try:
                if peer is not None:
                    self._peers.pull(peer, name, part)
                elif part.is_whole:
                    pass
                elif self._peers.are_moving():
                    say(note="another node fetches it, and gives it on file by file")
                    time.sleep(self._job.every_s)
                    continue
                else:
                    from nodes.agent.weights import hub

                    say(note="")
                    tries -= 1
                    hub.pull(holding, name, part)
                if part.is_whole:
                    return part.finish()
            except PeerError as error:
                if error.is_busy:
                    time.sleep(self._job.every_s)
                elif peer is not None:
                    self._peers.drop(peer)
            except WrongChecksum:
                if peer is not None:
                    self._peers.drop(peer)
                elif tries == 0:
                    raise FetchError(
                        "bad_checksum",
                        f"{name} of {self._order.at} came with another checksum than was told, twice; it is "
                        f"tried again, and if it stays so, see what stands between the node and the hub.",
                        TRANSIENT,
                    ) from None

    def _tell(self, size: int) -> None:
        self._part_bytes = size

    def _own_disk(self, error: OSError, holding: Holding, names: Sequence[str]) -> FetchError:
        at, store = self._order.at, self._store
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            sentence = f"{at} cannot be kept in {store.path} ({error.strerror}); look at that folder."
            return FetchError("store_broken", sentence, DISK)
        lacking = [name for name in names if name not in holding.files]
        missing = total_bytes(holding, lacking) - sum(size_of(store.part(holding, each)) for each in lacking)
        sentence = (
            f"The store {store.path} is full; make room, as {size_words(missing)} of {at} are missing, or "
            f"give the agent another --store."
        )
        return FetchError("disk_full", sentence, DISK)


def main() -> None:
    """Reads one job from stdin, and then what the agent has to say."""
    job = Job.read(sys.stdin.readline())
    work = Work(job)
    for each in (work.listen, work.report):
        threading.Thread(target=each, daemon=True).start()
    try:
        store = Store(Path(job.store))
        with store.locked(job.order.repo, is_waiting=True):  # a node that shares the store may be at it
            say(path=work.run())
    except FetchError as failure:
        cause: Mapping[str, Any] = {
            "cause": failure.cause.cause,
            "sentence": failure.cause.sentence,
            "kind": failure.cause.kind,
        }
        say(**cause)
    except OSError as error:
        sentence = f"The store {job.store} cannot be used ({error.strerror}); look at that folder."
        say(cause="store_broken", sentence=sentence, kind=DISK)


if __name__ == "__main__":
    main()
