"""A stage for the gateway: the real application under a real uvicorn, and engines whose every move is
scripted.

Both run on threads of this process with loops of their own, so that tests stay plain functions and use the
clients that people use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import uvicorn
from aiohttp import web
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings
from openai import APIStatusError, OpenAI
from pytest_django import DjangoDbBlocker

from catalog.keys import KeyText
from catalog.models import Key, Model, Name, Profile, Revision
from llmgw.wire import BoundedProtocol
from nodes.models import Node, Rank, Replica
from tests.waiting import wait_until

T = TypeVar("T")


class LoopThread:
    """An event loop that runs on a thread of its own, between `with` and its end."""

    def __enter__(self) -> LoopThread:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)


# --- the gateway --------------------------------------------------------------------------


class Web:
    """`llmgw.asgi:application` under uvicorn, as it runs in production but for the process."""

    def __enter__(self) -> Web:
        from llmgw.asgi import application  # once the test has set its settings

        config = uvicorn.Config(
            application,
            host="127.0.0.1",
            port=0,
            loop="uvloop",
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="on",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), "uvicorn to start")
        assert self._server.started, "uvicorn did not start"
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "uvicorn did not stop"

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def targets(self) -> set[str]:
        """The replicas that requests may go to just now."""
        from llmgw import asgi

        assert asgi._gateway is not None
        return set(asgi._gateway.table.current.replicas)

    def tasks(self) -> set[asyncio.Task[None]]:
        """Those that answer requests just now."""
        return self._server.server_state.tasks

    def connection(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)


# --- an engine ----------------------------------------------------------------------------

Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Heard:
    """One request as the engine had it. `is_gone` once its client left before the answer's end."""

    path: str
    headers: dict[str, str]
    body: bytes
    is_gone: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


@dataclass
class Engine:
    """An HTTP server on loopback that does what its script says; the script may be changed at any time."""

    script: Script
    heard: list[Heard] = field(default_factory=list)
    port: int = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        heard = Heard(request.path, dict(request.headers), await request.read())
        self.heard.append(heard)
        try:
            return await self.script(request, heard.fields)
        except (asyncio.CancelledError, ConnectionResetError):
            heard.is_gone = True
            raise

    async def open(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()


def chat_answer(fields: dict[str, Any], text: str = "Hello from here.") -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": fields["model"],
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def chat_event(fields: dict[str, Any], text: str) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": fields["model"],
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def well_behaved(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    """Answers everything, streamed or plain."""
    if request.path == "/v1/embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.25, -0.5]}]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        return web.json_response({"object": "list", "data": data, "model": fields["model"], "usage": usage})
    if request.path == "/v1/completions":
        choices = [{"index": 0, "text": " there.", "finish_reason": "stop", "logprobs": None}]
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": fields["model"]}
        return web.json_response({**answer, "choices": choices})
    if not fields.get("stream"):
        return web.json_response(chat_answer(fields))
    response = await begin_stream(request)
    for text in ("Hello", " from", " here."):
        await response.write(chat_event(fields, text))
    await response.write(b"data: [DONE]\n\n")
    return response


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def never(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    """Takes the request and says nothing."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def drop(request: web.Request) -> None:
    """Ends the connection as a killed process does."""
    assert request.transport is not None
    request.transport.abort()


def saying(status: int, body: object) -> Script:
    """Answers everything with one status and body, JSON unless it is bytes."""

    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, content_type="text/html")
        return web.json_response(body, status=status)

    return script


# --- rows ---------------------------------------------------------------------------------


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def make_key(name: str = "ada", **columns: Any) -> tuple[Key, str]:
    user, _ = User.objects.get_or_create(username=name)
    text = KeyText.from_bytes(uuid.uuid4().bytes[:6], (uuid.uuid4().bytes * 2)[:24])
    with transaction.atomic():
        row = Key.objects.create(
            id=text.id,
            name=name,
            user=user,
            digest=text.digest(settings.LLMGW_KEY_PEPPER),
            revision=Revision.advance(),
            **columns,
        )
    return row, text.reveal()


def make_model(name: str = "tiny", *aliases: str, low: int = 1, high: int = 1, **columns: Any) -> Model:
    with transaction.atomic():
        model = Model.objects.create(
            name=name,
            source="/weights",
            scaling_min=low,
            scaling_max=high,
            revision=Revision.advance(),
            **columns,
        )
        for position, each in enumerate((name, *aliases)):
            Name.objects.create(name=each, model=model, is_canonical=not position, position=position)
        Profile.objects.create(model=model, name="default", engine="sim", gpu_class="sim")
    return model


def make_replica(
    model: Model, engine: Engine | None, *, state: str = "ready", served_name: str = "", reason: str = ""
) -> Replica:
    """A replica whose rank 0 listens where the engine does."""
    node, _ = Node.objects.get_or_create(name="here", address="http://127.0.0.1:8378")
    with transaction.atomic():
        replica = Replica.objects.create(
            model=model,
            profile=model.profiles.get(),
            launch={"model": served_name or model.name, "source": model.source, "profile": {}},
            state=state,
            reason=reason,
            revision=Revision.advance(),
        )
        Rank.objects.create(replica=replica, node=node, state=state, port=engine.port if engine else None)
    return replica


def change(row: Any, **columns: Any) -> None:
    """Write columns as the verbs do: with a new revision in the same transaction."""
    with transaction.atomic():
        type(row).objects.filter(pk=row.pk).update(revision=Revision.advance(), **columns)


# --- everything together ------------------------------------------------------------------

MESSAGES: Any = [{"role": "user", "content": "Hello?"}]


@dataclass
class Play:
    """A gateway with one key and one model, "tiny" (also "small" and "petit"), that one engine serves."""

    web: Web
    thread: LoopThread
    engine: Engine
    key: str
    model: Model
    replica: Replica

    def chat(self, **fields: Any) -> Any:
        with self.web.client(self.key) as client:
            return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})

    def chunks(self, **fields: Any) -> list[Any]:
        """A streamed chat, read to its end."""
        with self.web.client(self.key) as client:
            asked = {"model": "tiny", "messages": MESSAGES, "stream": True, **fields}
            return list(client.chat.completions.create(**asked))

    def refused(self, **fields: Any) -> Refusal:
        try:
            self.chat(**fields)
        except APIStatusError as error:
            body: Any = error.body
            return Refusal(error.status_code, body, {**error.response.headers})
        raise AssertionError("it was answered")

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Refusal:
        """What no client library would send. Header names are written with underscores."""
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        request = urllib.request.Request(
            self.web.url + path,
            data=body,
            headers={name.replace("_", "-"): value for name, value in headers.items() if value},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return Refusal(response.status, json.load(response), {**response.headers})
        except urllib.error.HTTPError as error:
            with error:
                body_sent = json.load(error)
                assert set(body_sent) == {"error"}
                return Refusal(error.code, body_sent["error"], {**error.headers})

    def request(self, body: bytes, *lines: bytes) -> bytes:
        """A chat as it goes over the wire. `lines` are headers instead of the body's length."""
        head = [
            b"POST /v1/chat/completions HTTP/1.1",
            b"Host: localhost",
            b"Authorization: Bearer " + self.key.encode(),
            *(lines or [b"Content-Length: %d" % len(body)]),
        ]
        return b"\r\n".join([*head, b"", body])

    @contextlib.contextmanager
    def another_engine(self, script: Script, **columns: Any) -> Iterator[Engine]:
        """A second replica of the model, on an engine with a script of its own."""
        with playing_engine(self.thread, script) as engine:
            replica = make_replica(self.model, engine, **columns)
            try:
                yield engine
            finally:
                change(replica, state="stopped")
                wait_until(lambda: str(replica.pk) not in self.web.targets(), "the replica to be forgotten")

    def begin_anew(self) -> Play:
        """For the next test of a module."""
        self.engine.script = well_behaved
        self.engine.heard.clear()
        return self

    def wait_until_known(self, name: str, status: str = "ready") -> None:
        """Until the gateway's table has the model in that status."""
        wait_until(lambda: self.shown(name).get("status") == status, f"{name} to be {status}")

    def shown(self, name: str) -> dict[str, Any]:
        answer = self.send("GET", f"/v1/models/{name}")
        return answer.body if answer.status == 200 else {}


@dataclass
class Refusal:
    """A status, the JSON under it (of an error: what is inside `error`), and headers."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


@contextlib.contextmanager
def playing_engine(thread: LoopThread, script: Script) -> Iterator[Engine]:
    engine = Engine(script)
    thread.run(engine.open())
    try:
        yield engine
    finally:
        thread.run(engine.close())


@contextlib.contextmanager
def playing_for_many(database: DjangoDbBlocker, **settings: Any) -> Iterator[Play]:
    """One play for all tests of a module, which put back what they change. Mark it `lasting_database`."""
    with database.unblock(), override_settings(**settings):
        try:
            with playing() as play:
                yield play
        finally:
            call_command("flush", verbosity=0, interactive=False)


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with LoopThread() as thread, playing_engine(thread, well_behaved) as engine:
        _, key = make_key()
        # Alike requests are shared among its replicas: where they go is nothing that most tests are about.
        model = make_model("tiny", "small", "petit", routing_profile="round-robin")
        replica = make_replica(model, engine)
        with Web() as web_server:
            yield Play(web_server, thread, engine, key, model, replica)
