"""A hub that gives out files as the Hugging Face hub does, with ranges and checksums, over a line that may be
slow, cut, or held."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
LFS_BYTES = 1000  # larger files are stored apart, under their SHA-256
PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Asked:
    """One request for a file."""

    method: str
    name: str
    range: str | None
    authorization: str | None


@dataclass
class FileHub:
    """A hub of repositories that are called by a letter, such as org/m, and are all the same at COMMIT.

    held: a file that is sent by half while `gate` is clear. cuts: of which file the connection is cut after
    so many bytes, once each. lies: files that are not what their checksums tell. elsewhere: where files lie
    instead. is_silent: the hub itself answers nothing of use.
    """

    files: dict[str, bytes]
    url: str = ""
    is_gated: bool = False
    is_silent: bool = False
    held: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    lies: dict[str, bytes] = field(default_factory=dict)
    bytes_per_s: int = 0
    elsewhere: str = ""
    asked: list[Asked] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def gets(self) -> list[str]:
        return [each.name for each in self.asked if each.method == "GET"]


@contextlib.contextmanager
def running(files: dict[str, bytes]) -> Iterator[FileHub]:
    sums = {name: (hashlib.sha256(data).hexdigest(), _git(data)) for name, data in files.items()}

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            if hub.is_silent:
                self.send(503, b"out of order")
            elif found := re.fullmatch(rf"/api/models/(org/[a-z])(?:/revision/{COMMIT})?", path):
                self.send(200, json.dumps(self.info(found[1])).encode())
            elif found := re.fullmatch(rf"/org/[a-z]/resolve/{COMMIT}/(.+)", path):
                if hub.is_gated:
                    self.send(403, b"", {"X-Error-Code": "GatedRepo"})
                else:
                    self.send_file(found[1])
            elif re.match("/api/models/org/[a-z]/revision/", path):
                self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                self.send(401, b"", {"X-Error-Code": "RepoNotFound"})

        def info(self, repo: str) -> dict[str, Any]:
            siblings = []
            for name, data in files.items():
                sha256, git = sums[name]
                lfs = {"lfs": {"size": len(data), "sha256": sha256, "pointerSize": 134}}
                is_lfs = len(data) >= LFS_BYTES
                siblings.append(
                    {"rfilename": name, "size": len(data), "blobId": git, **(lfs if is_lfs else {})}
                )
            return {"id": repo, "modelId": repo, "sha": COMMIT, "tags": [], "siblings": siblings}

        def send_file(self, name: str) -> None:
            wanted = self.headers.get("Range")
            hub.asked.append(Asked(self.command, name, wanted, self.headers.get("Authorization")))
            if name not in files:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            sha256, git = sums[name]
            data = hub.lies.get(name, files[name])
            etag = sha256 if len(files[name]) >= LFS_BYTES else git
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if hub.elsewhere:
                headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
                self.send(302, b"", {**headers, "Location": hub.elsewhere + self.path})
                return
            begin, status = 0, 200
            if wanted and (found := re.fullmatch(r"bytes=(\d+)-", wanted)):
                begin, status = int(found[1]), 206
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.send(status, data[begin:], headers, name=name)

        def send(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, *, name: str = ""
        ) -> None:
            self.send_response(status)
            for header, value in (headers or {}).items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):
                    self.send_body(body, name)

        def send_body(self, body: bytes, name: str) -> None:
            cuts = hub.cuts.get(name, [])
            end = cuts.pop(0) if cuts else len(body)
            sent = 0
            while sent < end:
                if name and name == hub.held and sent >= len(body) // 2:
                    hub.gate.wait(30)
                piece = body[sent : min(sent + PIECE_BYTES, end)]
                self.wfile.write(piece)
                sent += len(piece)
                hub.sent[name] = hub.sent.get(name, 0) + len(piece)
                if hub.bytes_per_s:
                    time.sleep(len(piece) / hub.bytes_per_s)
            if end < len(body):
                self.close_connection = True
                self.connection.close()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    hub = FileHub(files, f"http://127.0.0.1:{server.server_port}")
    hub.gate.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
