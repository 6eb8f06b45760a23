"""The sim engine's cache of prompt blocks: whole blocks only, found from the prompt's beginning on, the least
recently used given up first.

A block is known by its text and all before it, so that equal text in another place is another block.
"""

from __future__ import annotations

from collections.abc import Iterator


class PrefixCache:
    """`blocks`: how many it holds. `block_characters`: how long each is."""

    def __init__(self, blocks: int, block_characters: int) -> None:
        self.blocks, self.block_characters = blocks, block_characters
        self._held: dict[int, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def find(self, text: str) -> int:
        """How many of the text's first blocks are held. They count as used."""
        found = []
        for block in self._blocks_of(text):
            if block not in self._held:
                break
            found.append(block)
        self._touch(found)
        return len(found)

    def keep(self, text: str) -> None:
        self._touch(list(self._blocks_of(text)))
        while len(self._held) > self.blocks:
            del self._held[next(iter(self._held))]

    def _touch(self, blocks: list[int]) -> None:
        """From the last to the first: a beginning is worth more than what follows it."""
        for block in reversed(blocks):
            self._held.pop(block, None)
            self._held[block] = None

    def _blocks_of(self, text: str) -> Iterator[int]:
        block = 0
        for end in range(self.block_characters, len(text) + 1, self.block_characters):
            block = hash((block, text[end - self.block_characters : end]))
            yield block
