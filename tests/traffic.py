"""Requests to an engine, one after the other, for as long as a fault lasts."""

from __future__ import annotations

import http.client
import json
import threading
from types import TracebackType

from tests.agent_process import KEY
from tests.waiting import wait_until

LEAST = 50  # with fewer, nothing was tried


class Traffic:
    """Leaving the `with` ends it, and asserts that there was enough of it and each request ended whole."""

    def __init__(self, port: int, *, model: str = "m") -> None:
        self.whole, self.broken = 0, list[str]()
        self._port, self._model = port, model
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self) -> Traffic:
        self._thread.start()
        wait_until(lambda: self.whole, "the traffic to flow", tell=lambda: str(self.broken[:3]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            wait_until(lambda: self.whole + len(self.broken) >= LEAST, f"{LEAST} requests")
        self._is_over.set()
        self._thread.join(30)
        if error is None:
            assert not self.broken, self.broken[:5]

    def _go_on(self) -> None:
        while not self._is_over.is_set():
            try:
                self._ask()
                self.whole += 1
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.broken.append(repr(error))
                self._is_over.wait(0.05)

    def _ask(self) -> None:
        """A stream, since a cut one tells of itself by what it lacks."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "stream": True,
        }
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"}
            )
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200, said
            assert said.endswith(b"data: [DONE]\n\n"), said[-200:]
        finally:
            connection.close()
