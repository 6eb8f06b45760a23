"""What the sim engine is asked and what it says: pure, in vllm's words, the same for the same prompt.

A token is four characters, so that an answer counts the same when it comes back within a prompt.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKEN_CHARACTERS = 4
TOKENS_A_MESSAGE = 4  # what a chat template puts around each
CHOICES_LIMIT = 128
EMBEDDING_DIMENSIONS = 64
WORDS = (
    "the ", "sim ", "one ", "two ", "red ", "sky ", "sea ", "old ", "new ", "day ", "far ", "joy ", "oak ",
    "owl ", "ink ", "map ", "and ", "his ", "her ", "own ", "way ", "sun ", "ice ", "few ", "hum ", "low ",
    "key ", "air ", "bay ", "cup ", "fox ",
)  # fmt: skip


class Refused(Exception):
    """A request's own fault, answered in vllm's words."""

    def __init__(
        self, status: int, message: str, param: str | None = None, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.kind = status, message, param, kind


def _refused_value(name: str, value: object, rule: str) -> Refused:
    return Refused(400, f"{name} {rule}, got {value}. (parameter={name}, value={value})", name)


def invalid(where: str, kind: str, rule: str, value: object, *, hint: str = "") -> Refused:
    shown = f"<dict of {len(value)} items>" if isinstance(value, Mapping) else str(value)[:40]
    context = f", 'ctx': {{'error': '{hint}'}}" if hint else ""
    fault = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{rule}', 'input': '{shown}'{context}}}"
    return Refused(400, f"1 validation error:\n  {fault}", where, "Bad Request")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, judged: how many prompt tokens, and what is to be said."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    ends_itself: bool
    stops: tuple[str, ...]
    choices: int
    is_stream: bool
    wants_usage: bool


def count_tokens(text: str) -> int:
    return -(-len(text) // TOKEN_CHARACTERS)


def judge_model(body: Mapping[str, Any], model: str) -> None:
    if body.get("model", model) != model:
        sentence = f"The model `{body['model']}` does not exist. Valid aliases: {model}."
        raise Refused(404, sentence, "model", "NotFoundError")


def judge(
    body: Mapping[str, Any], model: str, *, context_length: int, default_tokens: int, is_chat: bool
) -> Ask:
    """Raises Refused as vllm would."""
    field_name = "messages" if is_chat else "prompt"
    if field_name not in body:
        raise invalid(f"body.{field_name}", "missing", "Field required", body)
    judge_model(body, model)
    prompt, prompt_tokens = _chat_prompt(body["messages"], model) if is_chat else _text_prompt(body["prompt"])
    temperature = body.get("temperature")
    if temperature is not None and not (_is_number(temperature) and 0 <= temperature <= 2):
        raise _refused_value(
            "temperature", float(temperature) if _is_number(temperature) else temperature, "must be in [0, 2]"
        )
    max_tokens = body.get("max_completion_tokens") if is_chat else None
    max_tokens = body.get("max_tokens") if max_tokens is None else max_tokens
    if max_tokens is not None:
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise _refused_value("max_tokens", max_tokens, "must be at least 1")
        if max_tokens > context_length:
            raise Refused(
                400,
                f"max_tokens={max_tokens} cannot be greater than max_model_len={context_length}. "
                f"Please request fewer output tokens. (parameter=max_tokens, value={max_tokens})",
                "max_tokens",
            )
    judge_length(prompt_tokens, max_tokens, context_length)
    choices = body.get("n") or 1
    if not isinstance(choices, int) or not 1 <= choices <= CHOICES_LIMIT:
        raise _refused_value("n", choices, f"must be between 1 and {CHOICES_LIMIT}")
    stops = body.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refused_value("stop", stops, "cannot contain an empty string")
    room = context_length - prompt_tokens
    stream_options = body.get("stream_options") or {}
    return Ask(
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens or min(default_tokens, room),
        ends_itself=max_tokens is None and default_tokens <= room,
        stops=tuple(stops),
        choices=choices,
        is_stream=bool(body.get("stream")),
        wants_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
    )


def judge_length(prompt_tokens: int, max_tokens: int | None, context_length: int) -> None:
    """vllm stops counting one token past the limit, so the real length is not in the sentence."""
    head = f"This model's maximum context length is {context_length} tokens. However, "
    if prompt_tokens > context_length:
        found = context_length + 1
        head += (
            f"your prompt contains at least {found} input tokens, which exceeds this limit even without "
            f"any output tokens"
        )
    elif prompt_tokens + (max_tokens or 1) > context_length:
        found = prompt_tokens
        head += (
            f"you requested {max_tokens or 1} output tokens and your prompt contains at least {found} input "
            f"tokens, for a total of at least {found + (max_tokens or 1)} tokens"
        )
    else:
        return
    tail = f"Please reduce the length of the input prompt. (parameter=input_tokens, value={found})"
    raise Refused(400, f"{head}. {tail}", "input_tokens")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _text_prompt(prompt: object) -> tuple[str, int]:
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return str(prompt), len(prompt)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise invalid("body.prompt", "string_type", "Input should be a valid string", prompt)
    return prompt, count_tokens(prompt)


def _chat_prompt(messages: object, model: str) -> tuple[str, int]:
    if not isinstance(messages, list):
        raise invalid("body.messages", "list_type", "Input should be a valid list", messages)
    texts: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, Mapping) and part.get("type") not in ("text", "refusal"):
                raise Refused(400, f"{model} is not a multimodal model")
            text = part.get("text") if isinstance(part, Mapping) else part
            texts.append(text if isinstance(text, str) else "")
    return "\n".join(texts), count_tokens("".join(texts)) + TOKENS_A_MESSAGE * len(messages)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, whole: its pieces are the tokens, the last one cut where a stop text begins."""

    pieces: tuple[str, ...]
    tokens: int
    finish_reason: str
    stop_reason: str | None


def compose(ask: Ask, choice: int) -> Answer:
    """The same for the same prompt and choice."""
    start = zlib.crc32(ask.prompt.encode("utf-8", "replace")) + choice
    pieces = tuple(WORDS[(start + index) % len(WORDS)] for index in range(ask.max_tokens))
    finish_reason = "stop" if ask.ends_itself else "length"
    if ask.stops:
        text = "".join(pieces)
        found = [(at, stop) for stop in ask.stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            tokens = count_tokens(text[: at + len(stop)])
            said = tuple(
                text[index : min(index + TOKEN_CHARACTERS, at)] for index in range(0, at, TOKEN_CHARACTERS)
            )
            return Answer(said, tokens, "stop", stop)
    return Answer(pieces, len(pieces), finish_reason, None)


def embed(text: str) -> list[float]:
    """A unit vector that belongs to the text."""
    seed = text.encode("utf-8", "replace")
    parts = range(EMBEDDING_DIMENSIONS // hashlib.sha256().digest_size)
    digest = b"".join(hashlib.sha256(bytes([part]) + seed).digest() for part in parts)
    values = [byte - 127.5 for byte in digest]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]
