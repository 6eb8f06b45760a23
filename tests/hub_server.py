"""A hub on this machine: a real HTTP server that answers as the Hugging Face hub does, or misbehaves."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Reply:
    """What one path answers. `body` is sent as it is when it is bytes, and as JSON otherwise."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    drip: Callable[[Any], object] | None = None


@dataclass
class Hub:
    """Replies by path, and the requests that came: path with query, and Authorization header."""

    url: str
    replies: dict[str, Reply] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    is_closing: threading.Event = field(default_factory=threading.Event)

    def has_repository(self, repo: str, *files: str, revision: str = "", **info: Any) -> None:
        path = f"/api/models/{repo}" + (f"/revision/{revision}" if revision else "")
        self.replies[path] = Reply(body=listing(repo, *files, **info))

    def has_file(self, repo: str, name: str, reply: Reply, revision: str = COMMIT) -> None:
        """Files of a few kilobytes lie behind a redirect on the hub itself."""
        kept = f"/api/resolve-cache/models/{repo}/{revision}/{name}"
        self.replies[f"/{repo}/resolve/{revision}/{name}"] = Reply(307, b"", {"Location": kept})
        self.replies[kept] = reply


def listing(repo: str, *files: str, **info: Any) -> dict[str, Any]:
    """The model info of a repository, as the hub writes it with blobs=true. Each file has 1000 bytes."""
    siblings = [{"rfilename": name, "size": 1000, "blobId": "b" * 40} for name in files]
    return {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "gated": False,
            "tags": [], "siblings": siblings, **info}  # fmt: skip


@contextmanager
def running_hub(tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("Authorization")))
            reply = hub.replies.get(urlsplit(self.path).path)
            if reply is None:  # what the hub says to nobody of a repository that it does not have
                reply = Reply(
                    401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"}
                )
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.drip:
                self.end_headers()
                reply.drip(self.wfile)
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    hub = Hub(f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.is_closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
