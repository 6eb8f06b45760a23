"""HTTP as uvicorn speaks it, with bounds on what does not reach whoever answers a request.

uvicorn with httptools keeps headers and trailers without end for a client that goes on sending them, and
waits without end for one that does not. What a request does between the two is bounded by whoever answers it.
Whoever leaves ends the request that is being answered, too, where another was sent behind it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 52\r\nconnection: close\r\n\r\n"
    b"The request's headers are too large: send fewer ones"
)


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Its requests' first lines and headers come within `head_s`, and so does the rest of one that was answered
    before it was whole. `head_bytes` bound those, trailers, and whatever else is part of no body; and
    `behind_bytes` what is sent behind a request that is not answered yet.
    """

    head_s = 30.0
    head_bytes = 64 * 1024
    behind_bytes = 1024 * 1024

    _is_in_head = _is_in_message = _has_gone_on = False
    _taken_bytes = _sent_behind_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._has_gone_on = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        is_due = self._is_in_message and not self._has_gone_on
        self._taken_bytes = self._taken_bytes + len(data) if is_due else 0
        if self._taken_bytes > self.head_bytes:
            if self._is_in_head and not self._is_answering:
                self.transport.write(_TOO_LARGE)
            self._cut()
        elif self.pipeline:
            self._sent_behind_bytes += len(data)
            if self._sent_behind_bytes > self.behind_bytes:
                self._cut()
            else:
                self.flow.resume_reading()  # or nobody would notice that the client leaves
        if self._is_in_message and not self._is_answering:
            self._wait()
        else:
            self._stop_waiting()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = self._is_in_message = True
        self._taken_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # a trailer is nobody's business
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._has_gone_on = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_gone_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._sent_behind_bytes = 0
        super().on_response_complete()
        if self._is_in_message and not self._is_answering:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        if not self._is_answering:  # in the middle of an answer it would be taken for a part of it
            super().send_400_response(msg)
        self._cut()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _cut(self) -> None:
        self.transport.close()
        self._leave()

    def _leave(self) -> None:
        """Nobody is there for an answer. uvicorn tells the last request that came, which may only wait."""
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _wait(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._cut()
