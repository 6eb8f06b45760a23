"""How a prompt begins, in hashes, and which beginnings a replica has been sent.

A prompt is cut into blocks; each link of its chain stands for one block and all before it, so that two
prompts share as many links as they share blocks. Links are this process's own, because Python's hash of bytes
is, and cheap for that; a key is the same in every process. Nothing here knows a replica's real cache: what it
was sent not long ago is what it is taken to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Generic, NamedTuple, TypeVar
from zlib import crc32

Home = TypeVar("Home")

BLOCK_BYTES = 64
BLOCKS_LIMIT = 256
"""Of a prompt that is longer only the beginning is looked at."""
KEY_BLOCKS = 2
GENERATION_LINKS = 16_384
"""A replica is remembered by at most two generations of links: 2 MiB of prompts, in 4 MiB of memory."""


class Chain(NamedTuple):
    """`links` as above, one a block; `text` is what they stand for, a whole number of blocks."""

    links: Sequence[int] = ()
    text: bytes = b""

    def key_after(self, depth: int) -> int:
        """A number for the first blocks beyond `depth`, or for the last one where there are none."""
        start = min(depth, len(self.links) - 1) * BLOCK_BYTES
        return crc32(self.text[start : start + KEY_BLOCKS * BLOCK_BYTES]) + 1  # 0 would be no number


NO_CHAIN = Chain()


def chain(salt: bytes, parts: Iterable[bytes | memoryview]) -> Chain:
    """Of what shapes a prompt, in an order that is always the same. Under two salts nothing is shared."""
    left = BLOCKS_LIMIT * BLOCK_BYTES - len(salt)
    pieces: list[bytes | memoryview] = [salt]
    for part in parts:
        if left <= 1:
            break
        pieces.append(part[: left - 1])  # which is the part itself, where it is short enough
        left -= len(pieces[-1]) + 1
    text = b"\0".join(pieces)
    count = -(-len(text) // BLOCK_BYTES)
    text = text.ljust(count * BLOCK_BYTES, b"\0")
    link, links = 0, []
    for block in _cutter(count).unpack(text):
        # Hashes of tuples may be nested, and not added: in a sum, two blocks can often change their places.
        link = hash((link, block))
        links.append(link)
    return tuple.__new__(Chain, (links, text))


@lru_cache(maxsize=BLOCKS_LIMIT + 1)
def _cutter(count: int) -> Struct:
    return Struct(f"{BLOCK_BYTES}s" * count)


class Beginnings(Generic[Home]):
    """Who was sent a prompt that begins with a link, the least recently asked for given up first: in two
    generations of so many links, as `Prefixes` has them."""

    __slots__ = ("generation", "old", "young")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.young: dict[int, tuple[Home, ...]] = {}
        self.old: dict[int, tuple[Home, ...]] = {}

    def homes_of(self, link: int) -> tuple[Home, ...]:
        homes = self.young.get(link)
        if homes is None:
            homes = self.old.get(link, ())
            if homes:
                self.keep(link, homes)
        return homes

    def keep(self, link: int, homes: tuple[Home, ...]) -> None:
        if len(self.young) >= self.generation:
            self.young, self.old = {}, self.young
        self.young[link] = homes


class Prefixes:
    """Beginnings that one replica was sent, the least recently sent given up first.

    In two generations: what is sent goes into the young one, and when that is full the old one is given up.
    A chain is in one of them from its beginning on, which is what finding by halves relies on.
    """

    __slots__ = ("old", "young")

    def __init__(self) -> None:
        self.young: set[int] = set()
        self.old: set[int] = set()

    def __len__(self) -> int:
        return len(self.young | self.old)

    def add(self, links: Sequence[int]) -> None:
        if len(self.young) + len(links) > GENERATION_LINKS:
            self.young, self.old = set(), self.young
        self.young.update(links)

    def depth_of(self, links: Sequence[int]) -> int:
        """How many of the first links are held; there is one at least."""
        young, old = self.young, self.old
        if links[0] not in young and links[0] not in old:
            return 0
        known, missing = 1, len(links) + 1
        while missing - known > 1:
            middle = (known + missing) // 2
            link = links[middle - 1]
            if link in young or link in old:
                known = middle
            else:
                missing = middle
        return known
