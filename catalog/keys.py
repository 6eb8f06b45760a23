"""API keys as texts: how one is written, read back and kept. No randomness is made here.

A key looks like `llmgw_<id>_<secret><checksum>`. The id finds its row, the secret is compared as an HMAC at
rest, and the checksum lets a typo (and a secret scanner) be recognised without asking anybody.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import zlib
from dataclasses import dataclass

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHAPE = re.compile(r"llmgw_([0-9A-Za-z]{8})_([0-9A-Za-z]{32})([0-9A-Za-z]{6})", re.ASCII)
ID_BYTES, SECRET_BYTES = 6, 24


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key as its holder has it. Its repr hides the secret, so that no log or traceback tells it."""

    id: str
    secret: str

    @classmethod
    def from_bytes(cls, id_bytes: bytes, secret_bytes: bytes) -> KeyText:
        """From ID_BYTES and SECRET_BYTES of good randomness."""
        return cls(_base62(id_bytes, 8)[-8:], _base62(secret_bytes, 32)[-32:])

    @classmethod
    def parse(cls, text: str) -> KeyText | None:
        match = _SHAPE.fullmatch(text)
        if match is None:
            return None
        key = cls(match[1], match[2])
        return key if match[3] == key._checksum() else None

    def reveal(self) -> str:
        return f"llmgw_{self.id}_{self.secret}{self._checksum()}"

    def digest(self, pepper: bytes) -> str:
        """What is kept at rest: 64 hex digits."""
        return hmac.new(pepper, f"{self.id}:{self.secret}".encode(), hashlib.sha256).hexdigest()

    def matches(self, digest: str, pepper: bytes) -> bool:
        return hmac.compare_digest(self.digest(pepper), digest)

    def _checksum(self) -> str:
        return _base62(zlib.crc32(f"{self.id}_{self.secret}".encode()).to_bytes(4, "big"), 6)

    def __repr__(self) -> str:
        return f"KeyText({self.id!r}, ...)"


def _base62(data: bytes, width: int) -> str:
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 62)
        digits = _ALPHABET[digit] + digits
    return digits.rjust(width, "0")
