"""Who comes in: looked at once, and after that let in by a look-up, as long as a look would say the same."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

import pytest

from catalog.keys import KeyText
from llmgw.gateway.admission import KeyEntry, Refused
from llmgw.gateway.entrance import Entrance
from llmgw.gateway.table import LiveTable, Table

pytestmark = pytest.mark.one_database

PEPPER = b"a pepper for tests"
KEY = KeyText.from_bytes(b"\x01" * 6, b"\x02" * 24)
ENTRY = KeyEntry(KEY.id, KEY.digest(PEPPER))
CLOCK_S = 1_000.0
USUAL = {
    b"host": b"llmgw.example",
    b"authorization": f"Bearer {KEY.reveal()}".encode(),
    b"content-length": b"2",
    b"accept": b"*/*",
}


def _entrance(
    entry: KeyEntry = ENTRY, *, is_plain_http_allowed: bool = True, **bounds: int
) -> tuple[LiveTable, Entrance]:
    table = LiveTable((), poll_s=1)
    table.current = Table(revision=1, clock_s=CLOCK_S, read_at_s=monotonic(), keys={entry.id: entry})
    return table, Entrance(
        table,
        PEPPER,
        is_plain_http_allowed=is_plain_http_allowed,
        is_host_allowed=lambda host: host == "llmgw.example",
        **bounds,
    )


async def test_who_was_let_in_comes_in_again() -> None:
    _, entrance = _entrance()
    assert entrance.known("http", USUAL) is None
    assert await entrance.let_in("http", [*USUAL.items()]) is ENTRY
    assert entrance.known("http", USUAL) is ENTRY
    assert entrance.known("http", USUAL | {b"content-length": b"3", b"accept": b"text/html"}) is ENTRY


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        pytest.param("http", {}, id="over plain HTTP"),
        pytest.param("https", {b"host": b"evil.example"}, id="to another host"),
        pytest.param("https", {b"authorization": USUAL[b"authorization"] + b"x"}, id="with another key"),
        pytest.param("https", {b"x-api-key": b"a second one"}, id="with a second key"),
        pytest.param("https", {b"content-encoding": b"gzip"}, id="with a compressed body"),
        pytest.param("https", {b"transfer-encoding": b"chunked"}, id="with two lengths"),
    ],
)
async def test_who_comes_another_way_is_looked_at_and_refused(
    scheme: str, changed: dict[bytes, bytes]
) -> None:
    _, entrance = _entrance(is_plain_http_allowed=False)
    await entrance.let_in("https", [*USUAL.items()])
    headers = USUAL | changed
    assert entrance.known("https", USUAL) is ENTRY
    assert entrance.known(scheme, headers) is None
    with pytest.raises(Refused):
        await entrance.let_in(scheme, [*headers.items()])
    assert entrance.known(scheme, headers) is None


async def test_a_key_that_was_revoked_is_looked_at() -> None:
    table, entrance = _entrance()
    await entrance.let_in("http", [*USUAL.items()])
    table.current = replace(table.current, revision=2, keys={ENTRY.id: replace(ENTRY, is_revoked=True)})
    assert entrance.known("http", USUAL) is None
    with pytest.raises(Refused, match="was revoked"):
        await entrance.let_in("http", [*USUAL.items()])


async def test_a_key_that_has_expired_is_looked_at() -> None:
    table, entrance = _entrance(replace(ENTRY, expires_at_s=CLOCK_S + 60))
    await entrance.let_in("http", [*USUAL.items()])
    assert entrance.known("http", USUAL) is not None
    table.current = replace(table.current, clock_s=CLOCK_S + 61)
    assert entrance.known("http", USUAL) is None
    with pytest.raises(Refused, match="has expired"):
        await entrance.let_in("http", [*USUAL.items()])


async def test_a_key_that_reads_metrics_opens_nothing_else_afterwards() -> None:
    _, entrance = _entrance(replace(ENTRY, opens_metrics=True))
    await entrance.let_in("http", [*USUAL.items()], for_metrics=True)
    assert entrance.known("http", USUAL) is None
    with pytest.raises(Refused, match="reads /metrics alone"):
        await entrance.let_in("http", [*USUAL.items()])


async def test_a_header_that_comes_twice_is_looked_at_each_time() -> None:
    _, entrance = _entrance()
    await entrance.let_in("http", [*USUAL.items(), (b"accept", b"text/html")])
    assert entrance.known("http", USUAL) is None


async def test_ways_in_do_not_fill_the_memory() -> None:
    _, entrance = _entrance(ways_kept=10)
    for number in range(25):
        headers = USUAL | {b"authorization": b"Bearer" + b" " * (number + 1) + KEY.reveal().encode()}
        await entrance.let_in("http", [*headers.items()])
        assert entrance.known("http", headers) is ENTRY
    assert len(entrance._let_in) <= 10
