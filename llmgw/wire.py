"""HTTP as uvicorn speaks it, with bounds on what comes before a request's body.

uvicorn with httptools keeps headers without end for a client that goes on sending them, and waits without end
for one that does not. What a request does after that is bounded by whoever answers it.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 52\r\nconnection: close\r\n\r\n"
    b"The request's headers are too large: send fewer ones"
)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its requests' first lines and headers come within `head_s`, and in `head_bytes`."""

    head_s = 30.0
    head_bytes = 64 * 1024

    _is_in_head = False
    _taken_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_head:
            if self._timer is not None:
                self._stop_waiting()
        elif not self.transport.is_closing():
            self._taken_bytes += len(data)
            if self._taken_bytes > self.head_bytes:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif self._timer is None:
                self._timer = self.loop.call_later(self.head_s, self._give_up)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._taken_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
