"""What the sim engine sees: the colour that most of a PNG has, as its own kind of vision.

It reads pictures of 8 bits a channel without interlacing, small ones alone; of others it says that they are
none, as engines do.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE_LIMIT_BYTES = 4 * 1024 * 1024  # of the pixels
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "black": (0, 0, 0), "white": (255, 255, 255),
}  # fmt: skip


class NoPicture(ValueError):
    """The text says what is wrong."""


def colour_of(url: str) -> str:
    """Of a picture within a data: URL. Raises NoPicture."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/png") or not head.endswith(";base64"):
        raise NoPicture("only PNG within a data: URL is read")
    try:
        red, green, blue = _mean(base64.b64decode(data, validate=True))
    except (binascii.Error, zlib.error, struct.error, ValueError) as fault:
        raise NoPicture(f"cannot identify image file ({fault})") from None

    def distance(name: str) -> int:
        wanted = COLOURS[name]
        return sum((a - b) ** 2 for a, b in zip((red, green, blue), wanted, strict=True))

    return min(COLOURS, key=distance)


def _mean(png: bytes) -> tuple[int, int, int]:
    if not png.startswith(SIGNATURE):
        raise ValueError("no PNG")
    at, packed, head = len(SIGNATURE), b"", b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IHDR":
            head = png[at + 8 : at + 8 + size]
        elif kind == b"IDAT":
            packed += png[at + 8 : at + 8 + size]
        at += 12 + size
    width, height, bits, colours, *_, interlaced = struct.unpack(">IIBBBBB", head)
    if (bits, colours, interlaced) != (8, 2, 0) or not 0 < width * height * 3 <= SIZE_LIMIT_BYTES:
        raise ValueError("not 8 bits RGB, or too large")
    line = width * 3 + 1
    pixels = zlib.decompressobj().decompress(packed, line * height)
    if len(pixels) < line * height or any(pixels[::line]):
        raise ValueError("cut short, or filtered")
    sums = [0, 0, 0]
    for start in range(0, len(pixels), line):
        for channel in range(3):
            sums[channel] += sum(pixels[start + 1 + channel : start + line : 3])
    red, green, blue = (each // (width * height) for each in sums)
    return red, green, blue
