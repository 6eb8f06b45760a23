"""Whether a request may come in: by the way it came, and by its key.

Who was let in comes in the same way again by one look-up, as long as the table holds the same keys. Whether a
key has expired is asked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hmac import compare_digest
from time import monotonic

from catalog.keys import KeyText
from llmgw.gateway import admission
from llmgw.gateway.admission import KeyEntry
from llmgw.gateway.table import LiveTable

Pairs = Sequence[tuple[bytes, bytes]]
Headers = Mapping[bytes, bytes]
Way = tuple[str, bytes | None, bytes | None, bytes | None]

WAYS_KEPT = 4096


class Entrance:
    """One process's."""

    def __init__(
        self,
        table: LiveTable,
        pepper: bytes,
        *,
        is_plain_http_allowed: bool,
        is_host_allowed: Callable[[str], bool],
        ways_kept: int = WAYS_KEPT,
    ) -> None:
        self._table, self._pepper, self._ways_kept = table, pepper, ways_kept
        self._is_plain_http_allowed = is_plain_http_allowed
        self._is_host_allowed = lru_cache(maxsize=256)(is_host_allowed)
        self._keys = table.current.keys
        self._let_in: dict[Way, KeyEntry] = {}

    def known(self, scheme: str, headers: Headers) -> KeyEntry | None:
        """Whose request this is, where one that came the same way was let in; None is to be looked at. Each
        of its headers has come once."""
        table = self._table.current
        if table.keys is not self._keys:
            self._keys, self._let_in = table.keys, {}
        key = self._let_in.get(_way_of(scheme, headers))
        if key is None or b"content-encoding" in headers or b"transfer-encoding" in headers:
            return None
        if key.expires_at_s is not None and key.expires_at_s <= table.now_s(monotonic()):
            return None
        return key

    async def let_in(self, scheme: str, headers: Pairs, *, for_metrics: bool = False) -> KeyEntry:
        """Raises Refused where it may not come in."""
        self._check_way(scheme, headers)
        key = await self._authenticate(headers)
        admission.check_scope(key, for_metrics=for_metrics)
        named = dict(headers)
        if not for_metrics and len(named) == len(headers) and self._table.current.keys is self._keys:
            if len(self._let_in) >= self._ways_kept:
                self._let_in.clear()
            self._let_in[_way_of(scheme, named)] = key
        return key

    def _check_way(self, scheme: str, headers: Pairs) -> None:
        """That the request came as one with a key in it may."""
        if scheme != "https" and not self._is_plain_http_allowed:
            raise admission.https_only()
        admission.check_headers(headers)
        admission.check_host(headers, self._is_host_allowed)

    async def _authenticate(self, headers: Pairs) -> KeyEntry:
        key, digest = _read_key(admission.credential(headers), self._pepper)
        known = self._table.current.keys.get(key.id)
        if known is None or not compare_digest(digest, known.digest):
            await self._table.refresh()  # made or renewed a moment ago, perhaps
        table = self._table.current
        return admission.check_key(
            key,
            digest,
            known := table.keys.get(key.id),
            now_s=table.now_s(monotonic()),
            is_table_fresh=known is not None or self._table.is_fresh(),
        )


def _way_of(scheme: str, headers: Headers) -> Way:
    return scheme, headers.get(b"host"), headers.get(b"authorization"), headers.get(b"x-api-key")


@lru_cache(maxsize=4096)
def _read_key(text: str, pepper: bytes) -> tuple[KeyText, str]:
    """The key and its digest. Kept for those who come again; whether it is good is asked each time."""
    key = admission.read_key(text)
    return key, key.digest(pepper)
