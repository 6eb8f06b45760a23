"""The sim engine: an OpenAI-compatible server without weights, for trials, tests and benchmarks.

    python -m nodes.agent.sim --model NAME --port P [--host H] [--ttft 50ms] [--tpot 10ms] [--load-time 0s]
        [--fail-load MESSAGE] [--context-length 8192] [--max-num-seqs 256] [--default-tokens 64]

It answers in vllm's shapes, word for word in its refusals, and under vllm's metric names. Its key is
VLLM_API_KEY; without one it is open. Like vllm it is not there until it has loaded, and a client that leaves
frees its slot.

The first token comes --ttft after a slot is free, each further one --tpot later. Without max_tokens an answer
ends by itself after --default-tokens; with it, it has exactly so many, unless a stop text comes first.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hmac
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from catalog.durations import SECOND, parse_duration
from nodes.agent.sim_asks import (
    Answer,
    Ask,
    Refused,
    compose,
    count_tokens,
    embed,
    invalid,
    judge,
    judge_length,
    judge_model,
)
from nodes.agent.sim_meters import Counts, Pace, Slots

BODY_LIMIT_BYTES = 64 * 1024 * 1024
REQUEST_ID_LIMIT = 100
CUT_S = 0.1  # for running requests when it is told to end; 0 would be without end


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    host: str
    port: int
    ttft_s: float
    tpot_s: float
    load_time_s: float
    fail_load: str
    context_length: int
    max_num_seqs: int
    default_tokens: int
    key: str


class Engine:
    """The server. One per process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.slots = Slots(options.max_num_seqs)
        self.counts = Counts()
        self._replies = 0
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

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode("utf-8", "replace")
            if self._bearer and not hmac.compare_digest(given, self._bearer):
                return _json({"error": "Unauthorized"}, 401)
            try:
                return await handler(request)
            except Refused as refused:
                error = {"message": refused.message, "type": refused.kind, "param": refused.param}
                return _json({"error": {**error, "code": refused.status}}, refused.status)

        return guarded

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": "sim"})

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": self.options.model,
            "object": "model",
            "created": 0,
            "owned_by": "sim",
            "root": self.options.model,
            "parent": None,
            "max_model_len": self.options.context_length,
        }
        return _json({"object": "list", "data": [entry]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.counts.exposition(self.options.model, self.slots))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=False)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        judge_model(body, self.options.model)
        texts = body.get("input")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise Refused(400, "input must be a text or a list of texts. (parameter=input)", "input")
        tokens = [count_tokens(text) for text in texts]
        judge_length(max(tokens), 0, self.options.context_length)
        async with self.slots.one():
            await asyncio.sleep(self.options.ttft_s)
        self.counts.prompt_tokens += sum(tokens)
        self.counts.finished["stop"] += 1
        is_base64 = body.get("encoding_format") == "base64"
        vectors = [embed(text) for text in texts]
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if is_base64 else vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
        return _json({"object": "list", "model": self.options.model, "data": data, "usage": usage})

    async def _generate(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        options = self.options
        ask = judge(
            await _body(request),
            options.model,
            context_length=options.context_length,
            default_tokens=options.default_tokens,
            is_chat=is_chat,
        )
        reply = _Reply(self._reply_id(request, is_chat), options.model, is_chat, ask)
        asked_s = time.monotonic()
        is_whole = False
        try:
            async with self.slots.one():
                self.counts.prompt_tokens += ask.prompt_tokens
                response = await self._stream(request, reply, asked_s) if ask.is_stream else None
                if response is None:
                    await self._pace(reply, asked_s, _nobody)
                    response = _json(reply.whole())
            is_whole = True
        finally:
            for answer in reply.answers:
                self.counts.finished[answer.finish_reason if is_whole else "abort"] += 1
        return response

    async def _stream(self, request: web.Request, reply: _Reply, asked_s: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self._pace(reply, asked_s, lambda told, due: response.write(reply.pieces(told, due)))
        await response.write(reply.closing())
        await response.write_eof()
        return response

    async def _pace(self, reply: _Reply, asked_s: float, tell: Callable[[int, int], Awaitable[None]]) -> None:
        tokens = max(len(answer.pieces) for answer in reply.answers)
        pace = Pace(tokens, ttft_s=self.options.ttft_s, tpot_s=self.options.tpot_s)
        told = 0
        while told < tokens or told == 0:
            due = await pace.due_after(told)
            if told == 0:
                self.counts.ttft.add(time.monotonic() - asked_s)
            self.counts.generation_tokens += sum(
                min(due, answer.tokens) - min(told, answer.tokens) for answer in reply.answers
            )
            await tell(told, due)
            if tokens == 0:  # a stop text at the very beginning: there is nothing to say
                break
            told = due
        if tokens > 1:
            self.counts.tpot.add((time.monotonic() - pace.first_s) / (tokens - 1), tokens - 1)

    def _reply_id(self, request: web.Request, is_chat: bool) -> str:
        self._replies += 1
        given = request.headers.get("X-Request-Id", "")
        is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= REQUEST_ID_LIMIT
        return f"{'chatcmpl' if is_chat else 'cmpl'}-{given if is_fit else format(self._replies, '016x')}"


async def _nobody(told: int, due: int) -> None:
    """An answer that is not streamed is told at its end."""


class _Reply:
    """One answer on the wire, whole or in pieces."""

    def __init__(self, reply_id: str, model: str, is_chat: bool, ask: Ask) -> None:
        self.is_chat, self.ask = is_chat, ask
        self.answers = [compose(ask, choice) for choice in range(ask.choices)]
        self._head = {"id": reply_id, "created": int(time.clock_gettime(time.CLOCK_REALTIME)), "model": model}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._chunk_head = json.dumps({**self._head, "object": kind})[:-1]
        said, end = ('"delta": {"content": ', "}") if is_chat else ('"text": ', "")
        self._before = [
            f'data: {self._chunk_head}, "choices": [{{"index": {index}, {said}'.encode()
            for index in range(ask.choices)
        ]
        self._after = f'{end}, "logprobs": null, "finish_reason": null}}]}}\n\n'.encode()

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            text = "".join(answer.pieces)
            said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            choices.append({"index": index, **said, "logprobs": None, **ending})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def pieces(self, told: int, due: int) -> bytes:
        opening = self._roles() if self.is_chat and told == 0 else b""
        # Put together from parts: this is what a benchmark of everything around the engine waits for.
        return opening + b"".join(
            before + json.dumps(piece).encode() + self._after
            for position in range(told, due)
            for before, answer in zip(self._before, self.answers, strict=True)
            for piece in answer.pieces[position : position + 1]
        )

    def _roles(self) -> bytes:
        """Who speaks: as with vllm it comes with the first token, not before."""
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._chunk({"index": index, **said}) for index in range(len(self.answers)))

    def closing(self) -> bytes:
        chunks = [self._chunk(self._ending(index, answer)) for index, answer in enumerate(self.answers)]
        if self.ask.wants_usage:
            usage = json.dumps(self._usage())
            chunks.append(f'data: {self._chunk_head}, "choices": [], "usage": {usage}}}\n\n'.encode())
        return b"".join(chunks) + b"data: [DONE]\n\n"

    def _ending(self, index: int, answer: Answer) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        return {"index": index, **said, "logprobs": None, **ending}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return f'data: {self._chunk_head}, "choices": [{json.dumps(choice)}]}}\n\n'.encode()

    def _usage(self) -> dict[str, Any]:
        said = sum(answer.tokens for answer in self.answers)
        prompt = self.ask.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(array("f", vector).tobytes()).decode()


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


# --- the process ----------------------------------------------------------------------------------------


async def serve(options: Options) -> None:
    """Until TERM or INT. Streams are cut then, as vllm cuts them: whoever stops it drains it first."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    print(f"sim: loading {options.model} takes {options.load_time_s:g} s", file=sys.stderr, flush=True)
    try:
        await asyncio.wait_for(stopping.wait(), options.load_time_s)
    except TimeoutError:
        pass
    else:
        return
    if options.fail_load:
        sys.exit(options.fail_load)
    app = Engine(options).app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port).start()
        print(f"sim: listening on http://{options.host}:{options.port}", file=sys.stderr, flush=True)
        await stopping.wait()
    except OSError as error:
        sys.exit(f"sim: cannot listen on {options.host}:{options.port}: {error.strerror}")
    finally:
        await runner.cleanup()


def read_options(argv: Sequence[str], *, key: str) -> Options:
    # No abbreviations: an option of llmgw's own must not be reachable under a shorter name.
    parser = argparse.ArgumentParser(prog="sim", description="A synthetic engine.", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_whole, required=True)
    parser.add_argument("--ttft", type=_seconds, default=0.05)
    parser.add_argument("--tpot", type=_seconds, default=0.01)
    parser.add_argument("--load-time", type=_seconds, default=0.0)
    parser.add_argument("--fail-load", default="", metavar="MESSAGE")
    parser.add_argument("--context-length", type=_whole, default=8192)
    parser.add_argument("--max-num-seqs", type=_whole, default=256)
    parser.add_argument("--default-tokens", type=_whole, default=64)
    given = parser.parse_args(argv)
    return Options(
        model=given.model,
        host=given.host,
        port=given.port,
        ttft_s=given.ttft,
        tpot_s=given.tpot,
        load_time_s=given.load_time,
        fail_load=given.fail_load,
        context_length=given.context_length,
        max_num_seqs=given.max_num_seqs,
        default_tokens=given.default_tokens,
        key=key,
    )


def _seconds(text: str) -> float:
    try:
        nanoseconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
    if nanoseconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is below zero")
    return nanoseconds / SECOND


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    asyncio.run(serve(read_options(sys.argv[1:], key=os.environ.get("VLLM_API_KEY", ""))))
