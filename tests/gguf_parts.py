"""A GGUF model in several files, as llama.cpp's own tool splits one: the first part has all that is said of
the model, each has its tensors, and none is larger than asked unless a single tensor is."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

_ALIGNMENT = 32
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT16, _INT32, _TEXT, _ARRAY = 2, 5, 8, 9


@dataclass(frozen=True)
class _Tensor:
    """`about`: its name and shape, as the head of a file tells them, without its place."""

    about: bytes
    data: bytes


def split(model: bytes, limit_bytes: int, name: str = "m") -> Mapping[str, bytes]:
    """The parts, by file name."""
    said, count, tensors = _read(model)
    parts: list[list[_Tensor]] = [[]]
    size = len(said)
    for tensor in tensors:
        if parts[-1] and size + len(tensor.data) > limit_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += len(tensor.data)
    return {
        f"{name}-{number:05}-of-{len(parts):05}.gguf": _write(
            said if number == 1 else b"",
            count if number == 1 else 0,
            part,
            place=(number - 1, len(parts), len(tensors)),
        )
        for number, part in enumerate(parts, 1)
    }


def _read(model: bytes) -> tuple[bytes, int, list[_Tensor]]:
    """What is said of the model, how many things that are, and its tensors in the order of their data."""
    magic, _, tensor_count, count = struct.unpack_from("<4sIQQ", model)
    assert magic == b"GGUF"
    begins = at = struct.calcsize("<4sIQQ")
    for _ in range(count):
        at = _after_text(model, at)
        at = _after_value(model, at + 4, struct.unpack_from("<I", model, at)[0])
    said = model[begins:at]
    found = []
    for _ in range(tensor_count):
        start, at = at, _after_text(model, at)
        at += 4 + 8 * struct.unpack_from("<I", model, at)[0] + 4
        found.append((struct.unpack_from("<Q", model, at)[0], model[start:at]))
        at += 8
    data = memoryview(model)[_aligned(at) :]
    found.sort()
    ends = [offset for offset, _ in found[1:]] + [len(data)]
    return (
        said,
        count,
        [_Tensor(about, bytes(data[offset:end])) for (offset, about), end in zip(found, ends, strict=True)],
    )


def _write(said: bytes, count: int, tensors: list[_Tensor], place: tuple[int, int, int]) -> bytes:
    kinds = (("split.no", _UINT16, "H"), ("split.count", _UINT16, "H"), ("split.tensors.count", _INT32, "i"))
    for (key, kind, form), value in zip(kinds, place, strict=True):
        said += struct.pack("<Q", len(key)) + key.encode() + struct.pack(f"<I{form}", kind, value)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), count + len(kinds)) + said
    offset = 0
    for tensor in tensors:
        head += tensor.about + struct.pack("<Q", offset)
        offset = _aligned(offset + len(tensor.data))
    pieces = [head, bytes(_aligned(len(head)) - len(head))]
    for tensor in tensors:
        pieces += [tensor.data, bytes(_aligned(len(tensor.data)) - len(tensor.data))]
    return b"".join(pieces)


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


def _after_text(model: bytes, at: int) -> int:
    return int(at + 8 + struct.unpack_from("<Q", model, at)[0])


def _after_value(model: bytes, at: int, kind: int) -> int:
    if kind == _TEXT:
        return _after_text(model, at)
    if kind != _ARRAY:
        return at + _SIZES[kind]
    of, count = struct.unpack_from("<IQ", model, at)
    at += 12
    if of != _TEXT:
        return int(at + _SIZES[of] * count)
    for _ in range(count):
        at = _after_text(model, at)
    return at
