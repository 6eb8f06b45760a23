"""The sim engine's routes: what is asked is judged, waits for its slot, and is said at the set pace."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from nodes.agent.sim.answers import compose, embed, transcript
from nodes.agent.sim.asks import (
    TOKEN_CHARACTERS,
    Ask,
    Served,
    count_tokens,
    judge,
    judge_length,
    judge_model,
    text_prompt,
)
from nodes.agent.sim.cache import PrefixCache
from nodes.agent.sim.ends import End
from nodes.agent.sim.faults import CORE_DIED, CoreDied, Troubles
from nodes.agent.sim.lies import asked_with, served_with
from nodes.agent.sim.meters import Counts, Pace, QueueFull, Slots
from nodes.agent.sim.options import Options
from nodes.agent.sim.refusals import Refused, invalid
from nodes.agent.sim.replies import Reply

BODY_LIMIT_BYTES = 64 * 1024 * 1024
REQUEST_ID_LIMIT = 100
INPUTS_LIMIT = 2048

BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
    "instance."
)
CORE_DIED_ERROR = {"message": CORE_DIED, "type": "InternalServerError", "param": None, "code": 500}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """The server. One per process. `end` ends it in good order."""

    def __init__(self, options: Options, *, end: Callable[[End], None]) -> None:
        self.options = options
        self.slots = Slots(options.max_num_seqs, options.max_num_queued_reqs)
        self.cache = PrefixCache(options.kv_blocks, options.block_size * TOKEN_CHARACTERS)
        self.troubles = Troubles(options, end)
        self.counts = Counts()
        served = Served(
            options.model,
            options.context_length,
            options.default_tokens,
            has_tool_parser=bool(options.tool_parser),
            is_choosing_tools=options.is_choosing_tools,
            is_seeing=options.is_seeing,
        )
        self.served = served_with(served, options.lies)
        self._replies = 0
        self._embedded = 0
        self._abandoned: set[asyncio.Task[web.StreamResponse]] = set()
        self._bearer = f"Bearer {options.key}".encode() if options.key else b""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self._guarded(self.models)),
                web.post("/v1/chat/completions", self._guarded(self.chat)),
                web.post("/v1/completions", self._guarded(self.completions)),
                web.post("/v1/embeddings", self._guarded(self.embeddings)),
            ]
        )
        return app

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode("utf-8", "replace")
            if self._bearer and not hmac.compare_digest(given, self._bearer):
                return _json({"error": "Unauthorized"}, 401)
            try:
                with self.troubles.befalling():
                    return await handler(request)
            except Refused as refused:
                error = {"message": refused.message, "type": refused.kind, "param": refused.param}
                return _json({"error": {**error, "code": refused.status}}, refused.status)
            except QueueFull:
                self.counts.turned_away += 1
                error = {"message": BUSY, "type": "Service Unavailable", "param": None}
                return _json({"error": {**error, "code": 503}}, 503)
            except CoreDied:
                return _json({"error": CORE_DIED_ERROR}, 500)

        return guarded

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.troubles.is_core_dead else 200)

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": "sim"})

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": f"not-{self.options.model}" if "name" in self.options.lies else self.options.model,
            "object": "model",
            "created": 0,
            "owned_by": "sim",
            "root": self.options.model,
            "parent": None,
            "max_model_len": self.options.context_length,
        }
        return _json({"object": "list", "data": [entry]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.counts.exposition(self.options, self.slots))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=False)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        judge_model(body, self.options.model)
        prompts = _inputs(body.get("input"))
        tokens = [count_tokens(prompt) for prompt in prompts]
        judge_length(max(tokens), 0, self.served.context_length)
        async with self.slots.one():
            await self.troubles.before_token()
            await asyncio.sleep(self.options.ttft_s)
        self.counts.prompt_tokens += sum(tokens)
        self.counts.finished["stop"] += 1
        is_base64 = body.get("encoding_format") == "base64"
        self._embedded += "embeddings" in self.options.lies
        vectors = [embed(prompt + "." * self._embedded) for prompt in prompts]
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if is_base64 else vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
        return _json({"object": "list", "model": self.options.model, "data": data, "usage": usage})

    async def _generate(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        ask = judge(await _body(request), self.served, is_chat=is_chat)
        ask = asked_with(ask, self.options.lies)
        answers = [compose(ask, choice) for choice in range(ask.choices)]
        reply = Reply(self._reply_id(request, is_chat), self.options.model, ask, answers)
        if "cancel" in self.options.lies:
            going_on = asyncio.create_task(self._said(request, reply))
            self._abandoned.add(going_on)
            going_on.add_done_callback(self._abandoned.discard)
            return await asyncio.shield(going_on)
        return await self._said(request, reply)

    async def _said(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        ask, answers = reply.ask, reply.answers
        asked_s = time.monotonic()
        is_whole = False
        async with self.slots.one():
            try:
                with self._blocks(ask):
                    response = await self._answer(request, reply, asked_s)
                is_whole = not self.troubles.is_core_dead
            finally:
                broken = "error" if self.troubles.is_core_dead else "abort"
                for answer in answers:
                    self.counts.finish(answer.finish_reason if is_whole else broken)
        return response

    async def _answer(self, request: web.Request, reply: Reply, asked_s: float) -> web.StreamResponse:
        ask = reply.ask
        found = self._find_cached(ask)
        self.counts.prompt_tokens += ask.prompt_tokens
        if self.options.tells_cached_tokens:
            whole_blocks = ask.prompt_tokens // self.options.block_size * self.options.block_size
            reply.tell_cached(found, whole_blocks - found if self.options.is_caching else 0)
        ttft_s = self.options.ttft_s * (1 - found / max(1, ask.prompt_tokens))
        if ask.is_stream:
            return await self._stream(request, reply, asked_s, ttft_s)
        await self._pace(reply, asked_s, ttft_s, _nobody)
        return _json(reply.whole())

    async def _stream(
        self, request: web.Request, reply: Reply, asked_s: float, ttft_s: float
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            with self.troubles.befalling():
                await self._pace(
                    reply, asked_s, ttft_s, lambda told, due: self._write(response, reply.pieces(told, due))
                )
            await self._write(response, reply.closing())
        except CoreDied:  # vllm ends such a stream as if it were whole
            error = json.dumps({"error": CORE_DIED_ERROR})
            await response.write(f"data: {error}\n\ndata: [DONE]\n\n".encode())
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        with contextlib.suppress(*[ConnectionError] if "cancel" in self.options.lies else []):
            await response.write(piece)

    async def _pace(
        self, reply: Reply, asked_s: float, ttft_s: float, tell: Callable[[int, int], Awaitable[None]]
    ) -> None:
        tokens = max(len(answer.pieces) for answer in reply.answers)
        pace = Pace(tokens, ttft_s=ttft_s, tpot_s=self.options.tpot_s)
        told = 0
        while told < tokens or told == 0:
            await self.troubles.before_token()
            with contextlib.nullcontext() if told else self.counts.steps.of_prefill():
                due = self.troubles.bound(told, await pace.due_after(told))
            self.counts.steps.add()
            if told == 0:
                self.counts.ttft.add(time.monotonic() - asked_s)
                self._keep(reply.ask.prompt)
            self.counts.generation_tokens += sum(
                min(due, answer.tokens) - min(told, answer.tokens) for answer in reply.answers
            )
            await tell(told, due)
            if tokens == 0:  # a stop text at the very beginning: there is nothing to say
                break
            told = due
            await self.troubles.after_token(told)
        if tokens > 1:
            self.counts.tpot.add((time.monotonic() - pace.first_s) / (tokens - 1), tokens - 1)
        for answer in reply.answers:
            self._keep(transcript(reply.ask, answer))

    # --- the cache

    def _find_cached(self, ask: Ask) -> int:
        """How many of the prompt's tokens need not be computed; the last one always is."""
        if not self.options.is_caching:
            return 0
        found = self.cache.find(ask.prompt[:-TOKEN_CHARACTERS]) * self.options.block_size
        self.counts.queried_tokens += ask.prompt_tokens
        self.counts.cached_tokens += found
        return found

    def _keep(self, text: str) -> None:
        if self.options.is_caching:
            self.cache.keep(text)

    @contextlib.contextmanager
    def _blocks(self, ask: Ask) -> Iterator[None]:
        """Those that a running request holds."""
        held = -(-(ask.prompt_tokens + ask.max_tokens * ask.choices) // self.options.block_size)
        self.counts.blocks_in_use += held
        try:
            yield
        finally:
            self.counts.blocks_in_use -= held

    def _reply_id(self, request: web.Request, is_chat: bool) -> str:
        self._replies += 1
        given = request.headers.get("X-Request-Id", "")
        is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= REQUEST_ID_LIMIT
        return f"{'chatcmpl' if is_chat else 'cmpl'}-{given if is_fit else format(self._replies, '016x')}"


async def _nobody(told: int, due: int) -> None:
    """An answer that is not streamed is told at its end."""


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(array("f", vector).tobytes()).decode()


def _inputs(given: object) -> list[str]:
    """A text or tokens, or a list of either."""
    many = given if isinstance(given, list) and not all(isinstance(each, int) for each in given) else [given]
    is_text = all(isinstance(each, str) or _is_tokens(each) for each in many)
    if not many or given == [] or not is_text or len(many) > INPUTS_LIMIT:
        rule = f"input must be a text or tokens, or a list of up to {INPUTS_LIMIT} of them."
        raise Refused(400, f"{rule} (parameter=input)", "input")
    return [text_prompt(each) for each in many]


def _is_tokens(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(token, int) for token in given)


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        where = f"body.{error.pos}"
        raise invalid(where, "json_invalid", "JSON decode error", {}, hint=error.msg) from None
    except (ValueError, RecursionError):
        raise invalid("body", "json_invalid", "JSON decode error", {}) from None
    if not isinstance(body, dict):
        raise invalid("body", "dict_type", "Input should be a valid dictionary", body)
    return body
