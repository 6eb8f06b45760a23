"""Files from other nodes that hold the same commit, or fetch it just now: what their agents say of it, and
the bytes of one file, from where they stop. Nothing of the hub's goes there: a ticket opens these weights
alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from nodes.agent.weights.parts import Part
from nodes.agent.weights.sources import is_checksum, is_plain
from nodes.agent.weights.store import READ_BYTES
from nodes.protocol import ListedFile, Peer, ProtocolError, SharedWeights, read

ASK_S = 10.0  # for what a peer says of itself
STILL_S = 20.0  # without a byte, after which it is asked no more
ANSWER_LIMIT_BYTES = 8 << 20
TOO_MANY = 429


class PeerError(Exception):
    """It does not give the file, or (is_busy) not now; the text is a phrase."""

    def __init__(self, says: str, *, is_busy: bool = False) -> None:
        super().__init__(says)
        self.is_busy = is_busy


@dataclass(slots=True)
class _Seen:
    """What a peer said last, and since when it has not got further."""

    peer: Peer
    told: SharedWeights | None = None
    asked_s: float = float("-inf")
    still_since_s: float = field(default_factory=time.monotonic)


class Peers:
    """Those of one commit. patience_s: how long one that fetches may stand still before others are asked."""

    def __init__(self, key: str, *, patience_s: float, every_s: float) -> None:
        self._key, self._patience_s, self._every_s = key, patience_s, every_s
        self._seen: list[_Seen] = []
        self._dropped: set[Peer] = set()

    def meet(self, peers: Sequence[Peer]) -> None:
        """These are they now; one that was dropped is tried again with another ticket only."""
        known = {seen.peer.url: seen for seen in self._seen}
        found = []
        for peer in peers:
            if peer not in self._dropped:
                seen = known.get(peer.url) or _Seen(peer)
                seen.peer = peer
                found.append(seen)
        self._seen = found

    def drop(self, peer: Peer) -> None:
        self._dropped.add(peer)
        self._seen = [seen for seen in self._seen if seen.peer != peer]

    def listing(self) -> Mapping[str, ListedFile] | None:
        """The files of this commit, as one of them has it."""
        self._look()
        for seen in self._seen:
            if seen.told is not None and seen.told.listing:
                return {name: each for name, each in seen.told.listing.items() if _is_sound(name, each)}
        return None

    def holder(self, name: str) -> Peer | None:
        """One that has the file whole; any of them, so that many readers spread over those that do."""
        self._look()
        holders = [seen.peer for seen in self._seen if seen.told and name in seen.told.files]
        return random.choice(holders) if holders else None  # noqa: S311 - nothing secret hangs on it

    def are_moving(self) -> bool:
        """Whether one of them fetches, and gets further."""
        now_s = time.monotonic()
        return any(
            now_s - seen.still_since_s < self._patience_s
            for seen in self._seen
            if (seen.told.is_fetching if seen.told else seen.peer.is_fetching)
        )

    def pull(self, peer: Peer, name: str, part: Part) -> None:
        """Add what the part lacks. Raises PeerError or, of our own disk, OSError."""
        asyncio.run(_pull(peer, self._key, name, part))

    def _look(self) -> None:
        """At those that were not looked at just now."""
        now_s = time.monotonic()
        due = [seen for seen in self._seen if now_s - seen.asked_s >= self._every_s]
        if not due:
            return
        for seen, told in zip(
            due, asyncio.run(_ask_all([seen.peer for seen in due], self._key)), strict=True
        ):
            seen.asked_s = now_s
            if isinstance(told, PeerError):
                if not seen.peer.is_fetching or now_s - seen.still_since_s >= self._patience_s:
                    self.drop(seen.peer)  # one that is only about to begin may not know of it yet
            elif told != seen.told:
                seen.told, seen.still_since_s = told, now_s


def _is_sound(name: str, file: ListedFile) -> bool:
    told = (file.sha256, file.blob_id)
    return is_plain(name) and file.size >= 0 and all(each == "" or is_checksum(each) for each in told)


async def _ask_all(peers: Sequence[Peer], key: str) -> list[SharedWeights | PeerError]:
    async with _session() as session:
        return await asyncio.gather(*(_ask(session, peer, key) for peer in peers))


async def _ask(session: aiohttp.ClientSession, peer: Peer, key: str) -> SharedWeights | PeerError:
    try:
        async with asyncio.timeout(ASK_S), await _get(session, peer, f"/v1/weights/{key}") as answer:
            if answer.status != 200:
                return PeerError(f"it answered with status {answer.status}")
            body = await answer.content.read(ANSWER_LIMIT_BYTES)
            while len(body) < ANSWER_LIMIT_BYTES and (more := await answer.content.read(ANSWER_LIMIT_BYTES)):
                body += more
            return read(SharedWeights, json.loads(body))
    except (aiohttp.ClientError, OSError, ValueError, RecursionError, ProtocolError) as error:
        return PeerError(str(error)[:200] or type(error).__name__)


async def _pull(peer: Peer, key: str, name: str, part: Part) -> None:
    try:
        async with _session() as session:
            headers = {"Range": f"bytes={part.size}-"} if part.size else {}
            async with await _get(session, peer, f"/v1/weights/{key}/{quote(name)}", headers) as answer:
                if answer.status not in (200, 206):
                    says = f"it answered with status {answer.status}"
                    raise PeerError(says, is_busy=answer.status == TOO_MANY)
                if answer.status == 200 and part.size:
                    part.restart()
                async for piece in answer.content.iter_chunked(READ_BYTES):
                    _write(part, piece)
    except _OwnDisk as error:
        raise error.cause from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise PeerError(str(error)[:200] or type(error).__name__) from None


class _OwnDisk(Exception):
    def __init__(self, cause: OSError) -> None:
        self.cause = cause


def _write(part: Part, piece: bytes) -> None:
    try:
        part.write(piece)
    except OSError as error:
        raise _OwnDisk(error) from None


async def _get(
    session: aiohttp.ClientSession, peer: Peer, path: str, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientResponse:
    trusted: Any = aiohttp.Fingerprint(bytes.fromhex(peer.certificate)) if peer.certificate else True
    return await session.get(
        URL(peer.url + path, encoded=True),
        headers={"Authorization": f"Bearer {peer.ticket}", "Accept-Encoding": "identity", **(headers or {})},
        allow_redirects=False,
        ssl=trusted,
    )


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=ASK_S, sock_read=STILL_S),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=READ_BYTES,
    )
