"""An engine check's conversation: the requests of `nodes/checks` to one running engine, and what it found.

It talks to the replica itself, with the replica's own key, past the gateway. Every answer is bounded in time
and size; an engine that is gone, or silent again and again, ends it with one sentence.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from nodes.checks import CHECKS, Claims, Finding, Reply, asking, judging, read_reply, read_stream
from nodes.conversation import Session, open_session, trust_in
from nodes.engines import Adapter
from nodes.exposition import read_samples

CONNECT_S = 5.0
METRICS_S = 5.0
BODY_LIMIT_BYTES = 8 << 20
SILENT_LIMIT = 2  # answers in a row that do not come: a third is not waited for
POLL_S = 0.1
PREFIXES = 2
LONG_PATIENCE = 3  # times: for prompts as long as the context


class EngineGone(Exception):
    """The engine cannot be asked any more. The text finishes "the replica ..."."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine that is asked. own_length: its context by its own word, 0 where it has not told.
    certificate: the checksum of the one it must show, empty where it has none."""

    origin: str
    key: str
    adapter: Adapter
    claims: Claims
    own_length: int = 0
    certificate: str = ""


class Interview:
    """`findings` grow while it goes on; `step` is the check that it is at, and `part` how far that is."""

    def __init__(self, subject: Subject, *, patience_s: float) -> None:
        self._subject, self._claims, self._patience_s = subject, subject.claims, patience_s
        self._silent = 0
        self._chat: Reply | None = None
        self.findings: list[Finding] = []
        self.step = ""
        self.part = 0.0

    async def hold(self) -> None:
        """Raises EngineGone."""
        steps = self._steps()
        async with open_session(connect_s=CONNECT_S, unpacks=True) as session:
            for number, (check, step) in enumerate(steps):
                self.step, self.part = CHECKS[check], number / len(steps)
                self.findings.append(await step(session))
        self.step, self.part = "", 1.0

    def _steps(self) -> Sequence[tuple[str, Callable[[Session], Awaitable[Finding]]]]:
        if self._claims.embeddings:
            return [("health", self._health), ("name", self._name), ("embeddings", self._embeddings)]
        steps: list[tuple[str, Callable[[Session], Awaitable[Finding]]]] = [
            ("health", self._health),
            ("chat", self._chatting),
            ("name", self._name),
            ("stream", self._streaming),
            ("stop", self._stop),
            ("max_tokens", self._max_tokens),
            ("context", self._context),
        ]
        choices = asking.CHOICES if self._claims.tools else ("required",)
        steps += [(f"tools_{choice}", self._tools(choice)) for choice in choices]
        return [
            *steps,
            ("json_schema", self._schema),
            ("vision", self._vision),
            ("embeddings", self._embeddings),
            ("cancel", self._cancel),
            ("prefix", self._prefix),
        ]

    # --- the checks

    async def _health(self, session: Session) -> Finding:
        path = self._subject.adapter.health_path
        return judging.judge_health(await self._ask(session, "GET", path))

    async def _chatting(self, session: Session) -> Finding:
        self._chat = await self._post(session, asking.hello(self._claims.name))
        return judging.judge_chat(self._chat)

    async def _name(self, session: Session) -> Finding:
        listed = await self._ask(session, "GET", "/v1/models")
        return judging.judge_name(listed, self._chat, self._claims.name)

    async def _streaming(self, session: Session) -> Finding:
        body = asking.streamed(asking.hello(self._claims.name))
        return judging.judge_stream(await self._post(session, body))

    async def _stop(self, session: Session) -> Finding:
        name = self._claims.name
        said = await self._post(session, asking.tale(name, asking.STOP_TOKENS))
        stop = asking.stop_text(said.words)
        reply = None
        if stop:
            reply = await self._post(session, asking.tale(name, asking.STOP_TOKENS, stop=[stop]))
        return judging.judge_stop(said, stop, reply)

    async def _max_tokens(self, session: Session) -> Finding:
        body = asking.tale(self._claims.name, asking.MAX_TOKENS)
        return judging.judge_max_tokens(await self._post(session, body))

    async def _context(self, session: Session) -> Finding:
        claimed, own = self._claims.context_length, self._subject.own_length
        limit = own or claimed
        taken = refused = None
        if limit and claimed <= limit:
            few, many = [await self._long(session, units, 1) for units in asking.UNITS]
            counts = (few.prompt_tokens, many.prompt_tokens)
            if counts[0] and counts[1]:
                over = asking.units_of(asking.above(limit), counts[0], counts[1])
                under = asking.units_of(asking.below(limit), counts[0], counts[1])
                if over and under and under > 0:
                    refused = await self._long(session, over, 1)
                    taken = await self._long(session, under, asking.BELOW_TOKENS)
        return judging.judge_context(claimed, own, taken, refused)

    async def _long(self, session: Session, units: int, max_tokens: int) -> Reply:
        body = asking.long_prompt(self._claims.name, units, max_tokens)
        return await self._post(session, body, patience_s=LONG_PATIENCE * self._patience_s)

    def _tools(self, choice: str) -> Callable[[Session], Awaitable[Finding]]:
        async def step(session: Session) -> Finding:
            body = asking.tool(self._claims.name, choice, self._room(self._claims.tools))
            replies = {"whole": await self._post(session, body)}
            if self._claims.tools:
                replies["streamed"] = await self._post(session, asking.streamed(body))
            return judging.judge_tools(f"tools_{choice}", replies)

        return step

    async def _schema(self, session: Session) -> Finding:
        return judging.judge_schema(
            await self._post(session, asking.schema(self._claims.name, self._room(True)))
        )

    async def _vision(self, session: Session) -> Finding:
        replies, room = dict[str, Reply](), self._room(self._claims.vision)
        for colour in asking.COLOURS:
            replies[colour] = await self._post(session, asking.picture(self._claims.name, colour, room))
            if not replies[colour].is_answered:
                break
        return judging.judge_vision(replies)

    async def _embeddings(self, session: Session) -> Finding:
        texts = ("A lighthouse stands by the sea.", "A lighthouse stands by the sea.", "Bread needs salt.")
        replies: list[Reply] = []
        for text in texts:
            body = asking.embedding(self._claims.name, text)
            if replies and not replies[-1].is_answered:
                replies.append(replies[-1])
            else:
                replies.append(await self._ask(session, "POST", "/v1/embeddings", body))
        return judging.judge_embeddings(*replies)

    async def _cancel(self, session: Session) -> Finding:
        """A stream that is left after its first piece; the engine's own count tells when it has noticed."""
        length = self._subject.own_length or self._claims.context_length
        body = asking.long_tale(self._claims.name, length)
        during: int | None = None
        freed_s: float | None = None
        running = self._subject.adapter.running
        try:
            async with (
                asyncio.timeout(self._patience_s),
                self._begun(session, "POST", "/v1/chat/completions", body) as response,
            ):
                if response.status != 200:
                    reply = read_reply(response.status, await _whole(response))
                else:
                    reply = Reply(status=200)
                    await response.content.readany()
                    during = await self._metric(session, (running,))
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as fault:
            return judging.judge_cancel(await self._broken(session, fault), None, None)
        left_s, limit_s = _now(), min(judging.FREED_S, self._patience_s)
        while during and freed_s is None and _now() - left_s < limit_s:
            await asyncio.sleep(POLL_S)
            after = await self._metric(session, (running,))
            if after is not None and after < during:
                freed_s = _now() - left_s
        return judging.judge_cancel(reply, during, freed_s, limit_s)

    async def _prefix(self, session: Session) -> Finding:
        length = self._subject.own_length or self._claims.context_length
        cached = self._subject.adapter.figures.get("cached_tokens_total", ())
        before = await self._metric(session, cached)
        pairs = []
        for _ in range(PREFIXES):
            body = asking.prefix(self._claims.name, secrets.token_hex(8), length)
            pairs.append((await self._post(session, body), await self._post(session, body)))
        after = await self._metric(session, cached)
        counted = None if before is None or after is None else after - before
        return judging.judge_prefix(pairs, counted)

    # --- asking

    def _room(self, is_claimed: bool) -> int:
        """Tokens of an answer: engines refuse more than their context has beside the prompt."""
        length = self._subject.own_length or self._claims.context_length
        wanted = asking.LONG_TOKENS if is_claimed else asking.SHORT_TOKENS
        return min(wanted, length // 2) if length else wanted

    def _begun(
        self, session: Session, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Of this engine and of nobody whom it names: it is not followed elsewhere."""
        headers = {"Authorization": f"Bearer {self._subject.key}", "Accept-Encoding": "identity"}
        url, trust = self._subject.origin + path, trust_in(self._subject.certificate)
        return session.request(method, url, json=body, headers=headers, allow_redirects=False, ssl=trust)

    async def _post(
        self, session: Session, body: Mapping[str, Any], *, patience_s: float | None = None
    ) -> Reply:
        return await self._ask(session, "POST", "/v1/chat/completions", body, patience_s=patience_s)

    async def _ask(
        self,
        session: Session,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        patience_s: float | None = None,
    ) -> Reply:
        """Raises EngineGone."""
        asked_s = _now()
        try:
            async with (
                asyncio.timeout(patience_s or self._patience_s),
                self._begun(session, method, path, body) as response,
            ):
                begun: list[float] = []
                content = await _whole(response, on_piece=lambda: begun.append(_now() - asked_s))
                self._silent = 0
                if response.status >= 500 and path != self._subject.adapter.health_path:
                    await self._check_alive(session)
                if response.content_type == "text/event-stream":
                    lines = content.decode("utf-8", "replace").splitlines()
                    reply = read_stream(response.status, lines)
                    if reply.error:  # of an engine that died in the middle, too
                        await self._check_alive(session)
                    return replace(reply, first_s=begun[0] if begun else None)
                return read_reply(response.status, content)
        except (aiohttp.ClientError, OSError, TimeoutError) as fault:
            return await self._broken(session, fault)

    async def _broken(self, session: Session, fault: Exception) -> Reply:
        """No answer came. Raises EngineGone where none will."""
        if isinstance(fault, TimeoutError) and not isinstance(fault, aiohttp.ConnectionTimeoutError):
            self._silent += 1
            if self._silent < SILENT_LIMIT:
                return Reply(trouble=f"gave no answer within {self._patience_s:g} s")
            raise EngineGone(f"answers no more: {SILENT_LIMIT} requests had no answer in time")
        await self._check_alive(session)
        return Reply(trouble="closed the connection without an answer")

    async def _check_alive(self, session: Session) -> None:
        """What an engine says that is about to end is no finding. Raises EngineGone."""
        try:
            async with (
                asyncio.timeout(CONNECT_S),
                self._begun(session, "GET", self._subject.adapter.health_path) as response,
            ):
                status = response.status
        except aiohttp.ServerFingerprintMismatch:
            raise EngineGone("shows another certificate than its engine was started with") from None
        except aiohttp.ClientSSLError:
            raise EngineGone("does not speak TLS as its node tells") from None
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise EngineGone("is gone: its engine takes no connection any more") from None
        if status != 200:
            raise EngineGone(f"is not healthy any more: its engine answers with status {status}")

    async def _metric(self, session: Session, names: Sequence[str]) -> int | None:
        """The sum of these by the engine's own metrics; None where it does not tell."""
        wanted = frozenset(filter(None, names))
        try:
            async with (
                asyncio.timeout(METRICS_S),
                self._begun(session, "GET", self._subject.adapter.metrics_path) as response,
            ):
                text = (await _whole(response)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        found = [sample.value for sample in read_samples(text, wanted)] if wanted else []
        return int(sum(found)) if found else None


async def _whole(response: aiohttp.ClientResponse, on_piece: Callable[[], None] = lambda: None) -> bytes:
    """What is longer than the limit is cut, and so no JSON any more. Raises as aiohttp does."""
    content = bytearray()
    async for piece in response.content.iter_any():
        if not piece.startswith(b":"):  # a comment, which keeps the line open
            on_piece()
        content += piece
        if len(content) > BODY_LIMIT_BYTES:
            break
    return bytes(content[:BODY_LIMIT_BYTES])


def _now() -> float:
    return asyncio.get_running_loop().time()
