"""How far something is, in words: of a fetch what is there, how fast it comes, and when that would be all of
it; of a start or an end how long it may take yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from catalog.typed import span_words

_UNITS = ((10**9, "GB"), (10**6, "MB"))


def size_words(size_bytes: int) -> str:
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes / 1000:.1f} kB"


def left_s(done: int | None, total: int | None, bytes_per_s: int | None) -> int | None:
    """Seconds until the rest is there at this rate; None where that cannot be told."""
    if done is None or total is None or not bytes_per_s:
        return None
    return -(-max(0, total - done) // bytes_per_s)


def progress_words(done: int, total: int, bytes_per_s: int | None) -> str:
    """Such as "1.2 of 4.5 GB, 110.0 MB/s, 30 s left"."""
    unit, name = next((each for each in _UNITS if total >= each[0]), (1000, "kB"))
    words = f"{done / unit:.1f} of {total / unit:.1f} {name}"
    left = left_s(done, total, bytes_per_s)
    if bytes_per_s and left is not None and done < total:
        words += f", {size_words(bytes_per_s)}/s, {span_words(left)} left"
    return words


@dataclass(frozen=True, slots=True)
class Progress:
    """A bar, and the words beside it: done of total, in whatever is counted."""

    done: float
    total: float
    words: str


def fetch_progress(done: int, total: int, bytes_per_s: int | None) -> Progress:
    return Progress(min(done, total), total, progress_words(done, total, bytes_per_s))


def wait_progress(age_s: float, left_s: float, what: str) -> Progress:
    """Of what has a deadline and tells nothing of itself: how much of its time is over."""
    return Progress(round(age_s), max(round(age_s + left_s), 1), f"{what}, {span_words(left_s)} left at most")
