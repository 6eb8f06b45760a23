"""A server that webhooks post to, as somebody else would run it: it knows what is told alone."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from nodes.models import Webhook
from nodes.webhooks import add_webhook

LOOPBACK = [ipaddress.ip_network("127.0.0.0/8")]


def let_in(settings: Any) -> None:
    """From now on webhooks may post to this machine, and do not wait for long."""
    settings.LLMGW_WEBHOOK_NETWORKS = LOOPBACK
    settings.LLMGW_WEBHOOK_TIMEOUT_S = 0.5


def hook(receiver: Receiver, name: str = "pager", **told: Any) -> tuple[Webhook, str]:
    return add_webhook(name, receiver.url, by="alice", door="command", **told)


@dataclass(frozen=True)
class Received:
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def is_signed_with(self, secret: str) -> bool:
        """As the README tells receivers to see to it."""
        parts = dict(part.split("=", 1) for part in self.headers["LLMGW-Signature"].split(","))
        text = parts["t"].encode() + b"." + self.body
        wanted = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
        return hmac.compare_digest(wanted, parts["v1"])


@dataclass
class Receiver:
    """Answers `status`, or hangs until it is closed."""

    status: int = 200
    answer: bytes = b"ok"
    location: str = ""
    hangs: bool = False
    received: list[Received] = field(default_factory=list)

    def __enter__(self) -> Receiver:
        receiver = self
        self._over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append(Received(self.path, dict(self.headers), body))
                if receiver.hangs:
                    receiver._over.wait(30)
                    return
                self.send_response(receiver.status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", str(len(receiver.answer)))
                self.end_headers()
                self.wfile.write(receiver.answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The other side went."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/hook/t0ken"

    @property
    def told(self) -> list[tuple[str, str, str]]:
        """Kind, state and subject, as they came."""
        return [(each.json["kind"], each.json["state"], each.json["subject"]) for each in self.received]
