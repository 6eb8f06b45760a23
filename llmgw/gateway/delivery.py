"""What one engine's answer becomes for the client: passed on as a stream, passed on whole, or put together.

A stream is passed on as it comes. A plain answer is passed on when it is whole and is one, so that what
breaks off, or is something else, is never taken for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from time import monotonic
from typing import Annotated, Any, NoReturn

import msgspec

from llmgw.gateway import answers
from llmgw.gateway.admission import Refused
from llmgw.gateway.answers import Tokens
from llmgw.gateway.assembly import NotAnswered, assembly_of
from llmgw.gateway.breaker import Outcome
from llmgw.gateway.call import Call
from llmgw.gateway.client import Client
from llmgw.gateway.routing import Target
from llmgw.gateway.streams import (
    CONTENT_TYPE,
    EVENT_LIMIT_BYTES,
    EventStream,
    NotAStream,
    dialect_of,
    model_named_in,
    payload,
)
from llmgw.gateway.upstream import Answer, EngineAway

log = logging.getLogger(__name__)

ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
ERROR_LIMIT_BYTES = 64 * 1024
LOGGED_BYTES = 500
LINGER_S = 1.0
"""For an engine to end its body after its last word, so that its connection may be used again."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING = msgspec.Raw(b"[]")
_NULL = msgspec.Raw(b"null")
_EMPTY = (_NOTHING, _NULL)
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: None = None
    cache_read_input_tokens: None = None


class _Usual(msgspec.Struct):
    """A plain answer as nearly all are: what is to be known of it, read at once. One that does not fit in
    here, be it right or wrong, is looked at field by field."""

    model: str
    usage: _Usage
    choices: msgspec.Raw = _NOTHING
    data: msgspec.Raw = _NOTHING
    error: None = None


_usual = msgspec.json.Decoder(_Usual)
_CONTENT = {"chat": "choices", "completion": "choices", "embedding": "data"}
"""Without which an answer of this kind says nothing."""


class Elsewhere(Exception):
    """This replica did not answer and nothing was passed on: another may.

    The text finishes "the replica ..." in our own words, for the log; `refused` is for the client, when there
    is no other. `outcome` is what it says of the replica. `is_misrouted`: the table led to one that knows
    neither key nor model. `is_repeatable`: a new connection to the same one is worth a try. `is_final`: no
    other replica of the model would do better, but another model may.
    """

    def __init__(
        self,
        cause: str,
        refused: Refused,
        *,
        outcome: Outcome = Outcome.FAILED,
        is_misrouted: bool = False,
        is_repeatable: bool = False,
        is_final: bool = False,
    ) -> None:
        super().__init__(cause)
        self.refused, self.outcome = refused, outcome
        self.is_misrouted, self.is_repeatable, self.is_final = is_misrouted, is_repeatable, is_final

    @classmethod
    def misrouted(cls, model: str, cause: str) -> Elsewhere:
        return cls(cause, answers.misrouted(model), outcome=Outcome.STRANGE, is_misrouted=True)


def away(model: str, error: EngineAway) -> Elsewhere:
    return Elsewhere(
        str(error),
        answers.unreachable(model, str(error)),
        outcome=Outcome.ABSENT if error.is_absent else Outcome.FAILED,
        is_repeatable=error.was_dropped,
    )


def _unreadable(model: str, cause: str) -> Elsewhere:
    return Elsewhere(cause, answers.unreadable(model))


class Delivery(msgspec.Struct):
    """Of one answer to one client. `deliver` gives what the whole of it says of the replica, or raises
    Elsewhere or Refused while nothing of the answer has been passed on."""

    call: Call
    target: Target
    client: Client
    first_byte_s: float
    idle_s: float

    @property
    def model(self) -> str:
        return self.call.model.name

    def deliver(self, answer: Answer) -> Awaitable[Outcome]:
        if answer.status != 200:
            return self._refuse_as_engine_did(answer)
        if answer.content_type != CONTENT_TYPE:
            return self._pass_on(answer)
        if self.call.is_gathered_from(self.target):
            return self._gather(answer)
        if self.call.wants_stream:
            return self._pass_stream_on(answer)
        raise _unreadable(self.model, "answered in another way than it was asked to")

    # --- plain ----------------------------------------------------------------------------------------------

    async def _pass_on(self, answer: Answer) -> Outcome:
        try:
            # Nearly always it has come together with its head.
            body = answer.take() if answer.is_whole else await answer.read(ANSWER_LIMIT_BYTES, self.idle_s)
        except EngineAway as error:
            raise away(self.model, error) from error
        if body is None or len(body) > ANSWER_LIMIT_BYTES:
            raise answers.too_large(self.model, ANSWER_LIMIT_BYTES)
        self.call.passage.first_byte_at_s = monotonic()
        needed = _CONTENT.get(self.call.needs.endpoint.kind)
        tokens = self._tokens_of_usual(body, needed) if needed else None
        if tokens is None:
            tokens = self._tokens_of_any(body, needed)
        if not self.client.is_silent:  # a comment was due meanwhile
            raise _unreadable(self.model, "answered in another way than it was asked to")
        self._count(tokens)
        echo = self.call.echo_for(self.target)
        body = body if echo is None else echo(body)
        if not self.client.answer_at_once(body):
            await self.client.answer(body)
        return Outcome.FINE

    def _tokens_of_usual(self, body: bytes, needed: str) -> Tokens | None:
        """None where it takes a closer look to say whether this is an answer."""
        try:
            seen = _usual.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if (seen.choices if needed == "choices" else seen.data) in _EMPTY:
            return None
        if seen.model != self.target.served_name:
            self._check_name(seen.model)
        details = seen.usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        return Tokens(seen.usage.prompt_tokens, cached, seen.usage.completion_tokens)

    def _tokens_of_any(self, body: bytes, needed: str | None) -> Tokens:
        try:
            fields = _fields.decode(body)
            usage = msgspec.json.decode(fields.get("usage", b"null"))
            named = msgspec.json.decode(fields.get("model", b"null"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _unreadable(self.model, "answered with what is no JSON object") from None
        self._check_name(named)
        if fields.get("error", _NULL) != _NULL:
            self._raise_error(body, 500)
        if not fields or (needed is not None and fields.get(needed, _NOTHING) in _EMPTY):
            raise _unreadable(self.model, "answered with nothing")
        return answers.tokens_of({"usage": usage})

    async def _gather(self, answer: Answer) -> Outcome:
        endpoint = self.call.endpoint
        stream, assembly, size = EventStream(dialect_of(endpoint)), assembly_of(endpoint), 0
        try:
            while piece := await answer.piece(self._patience_with(stream)):
                size += len(piece)
                if size > ANSWER_LIMIT_BYTES:
                    raise answers.too_large(self.model, ANSWER_LIMIT_BYTES)
                if events := stream.feed(piece):
                    assembly.feed(events)
                if stream.error is not None:
                    self._raise_error_event(stream.error)
            assembly.feed(stream.finish())
            whole = assembly.whole()
        except EngineAway as error:
            raise away(self.model, error) from error
        except (NotAStream, NotAnswered) as error:
            raise _unreadable(self.model, str(error)) from error
        if not stream.is_done:
            raise Elsewhere("ended its answer unfinished", answers.unreachable(self.model, "broke off"))
        self._has_begun()  # for its client only now
        self._check_name(whole.get("model"))
        self._count(answers.tokens_of(whole))
        whole["model"] = self.call.name
        await self.client.answer(msgspec.json.encode(whole))
        return Outcome.FINE

    # --- streams --------------------------------------------------------------------------------------------

    async def _pass_stream_on(self, answer: Answer) -> Outcome:
        client, dialect = self.client, dialect_of(self.call.endpoint)
        stream = EventStream(dialect, hides_usage=self.call.hides_usage_of(self.target))
        echo = self.call.echo_for(self.target)
        kept, last, is_passed_on, cause = b"", b"", False, "closed the connection"

        def pass_at_once(piece: bytes) -> bool:
            """Nearly all there is: it needs neither thought nor waiting."""
            return stream.lets_pass(piece) and client.write_at_once(piece if echo is None else echo(piece))

        try:
            while piece := await answer.piece(self._patience_with(stream), pass_at_once):
                events = stream.feed(piece)
                if events:
                    if not is_passed_on:
                        kept += events
                        if len(kept) > EVENT_LIMIT_BYTES:
                            raise NotAStream("comments alone")
                        if not stream.has_content:
                            continue
                        self._check_name(model_named_in(kept))
                        self._has_begun()
                        events = kept
                    if echo is not None:
                        events = echo(events)
                    if stream.is_done:
                        await client.be_quiet()
                    if not is_passed_on:
                        await client.begin_stream(events)
                        is_passed_on = True
                    elif stream.is_done and answer.is_over and stream.error is None:
                        last = events  # together with the end
                        break
                    else:
                        await client.write(events)
                if stream.error is not None:
                    break
        except EngineAway as error:
            if not is_passed_on:
                raise away(self.model, error) from error
            cause = str(error)
        except NotAStream:
            cause = "sent something that is not a stream of events"
        self._count(stream.tokens())
        if not is_passed_on:
            if stream.error is not None:
                self._raise_error_event(stream.error)
            raise Elsewhere(cause, answers.unreachable(self.model, cause))
        rest = stream.finish()
        if stream.error is not None:
            error_body = payload(stream.error)
            return await self._break_off(
                answers.engine_error(
                    answers.status_in(error_body), msgspec.json.encode(error_body), self.model
                ),
                "broke off with an error of its own",
                is_its_fault=not answers.is_clients_fault(500, msgspec.json.encode(error_body)),
            )
        if not stream.is_done:
            return await self._break_off(answers.cut_short(self.model, cause), cause)
        await client.write(last + rest, is_last=True)
        return Outcome.FINE

    def _patience_with(self, stream: EventStream) -> float:
        if stream.is_done:
            return LINGER_S
        return self.idle_s if stream.has_content else self.first_byte_s

    async def _break_off(self, refused: Refused, cause: str, *, is_its_fault: bool = True) -> Outcome:
        log.warning("Replica %s of %s %s in the middle of a stream", self.target.replica, self.model, cause)
        await self.client.refuse(refused)
        return Outcome.FAILED if is_its_fault else Outcome.NEUTRAL

    # --- what is no answer ----------------------------------------------------------------------------------

    async def _refuse_as_engine_did(self, answer: Answer) -> NoReturn:
        try:
            body = await answer.read(ERROR_LIMIT_BYTES, self.idle_s) or b""
        except EngineAway as error:
            raise away(self.model, error) from error
        self._raise_error(body, answer.status)

    def _raise_error_event(self, event: bytes) -> NoReturn:
        error = payload(event)
        self._raise_error(msgspec.json.encode(error), answers.status_in(error))

    def _raise_error(self, body: bytes, status: int) -> NoReturn:
        if answers.lacks_path(status, body):
            raise answers.path_not_served(self.model, self.call.endpoint.path)
        if answers.is_leaving(status, body):
            raise Elsewhere.misrouted(self.model, "takes nothing new, because it ends")
        if answers.is_another_model(status, body):
            cause = f"does not know its key or its model (status {status})"
            raise Elsewhere.misrouted(self.model, cause)
        refused = answers.engine_error(status, body, self.model)
        if status < 500 and refused.status == status:
            raise refused
        if refused.status != status:
            _log_text(self.target, body)
        outcome = Outcome.FAILED
        if status in (429, 503) or answers.is_clients_fault(status, body):
            outcome = Outcome.NEUTRAL
        raise Elsewhere(
            f"answered {status}",
            refused,
            outcome=outcome,
            is_final=status not in (502, 503, 504),
        )

    def _check_name(self, named: Any) -> None:
        """An engine that answers as another model is not the one that the table means."""
        if isinstance(named, str) and named != self.target.served_name:
            raise Elsewhere.misrouted(self.model, "answered as another model")

    def _has_begun(self) -> None:
        if self.call.passage.first_byte_at_s is None:
            self.call.passage.first_byte_at_s = monotonic()

    def _count(self, tokens: Tokens) -> None:
        passage = self.call.passage
        passage.prompt_tokens = tokens.prompt or 0
        passage.cached_tokens = tokens.cached or 0
        passage.completion_tokens = tokens.completion or 0


def _log_text(target: Target, body: bytes) -> None:
    """An operator may need it; a client has no use for it."""
    log.warning("Replica %s said what cannot be read: %r", target.replica, body[:LOGGED_BYTES])
