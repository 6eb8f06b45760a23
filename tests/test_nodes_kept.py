"""What was read is kept while its JSON is the same, and no longer."""

from __future__ import annotations

from nodes.kept import Kept


def test_it_is_read_once_and_again_when_it_changes() -> None:
    read: list[object] = []

    def length(raw: list[int]) -> int:
        read.append(raw)
        return len(raw)

    kept = Kept(length)
    assert [kept.get("a", [1]), kept.get("a", [1]), kept.get("b", [1, 2]), kept.get("a", [3, 4])] == [
        1,
        1,
        2,
        2,
    ]
    assert read == [[1], [1, 2], [3, 4]]


def test_what_is_gone_is_forgotten() -> None:
    read: list[object] = []
    kept = Kept(read.append)
    for key in ("a", "b", "a"):
        kept.get(key, key)
    kept.keep_only({"b"})
    kept.get("a", "a")
    kept.get("b", "b")
    assert read == ["a", "b", "a"]
