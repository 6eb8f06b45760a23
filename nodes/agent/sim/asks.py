"""What the sim engine is asked: a request's body in, what is to be said out, or a refusal in vllm's words.

A token is four characters, so that an answer counts the same when it comes back within a prompt. A prompt is
one text, as a chat template would make it; what it begins with can be cached.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nodes.agent.sim.pictures import NoPicture, colour_of
from nodes.agent.sim.refusals import Refused, invalid, refused_value
from nodes.agent.sim.schemas import SchemaError, example
from nodes.agent.sim.tools import Call, choose_call

TOKEN_CHARACTERS = 4
HEADER_CHARACTERS = 4 * TOKEN_CHARACTERS  # what a chat template puts around each message
CHOICES_LIMIT = 128
WORDS = (
    "the ", "sim ", "one ", "two ", "red ", "sky ", "sea ", "old ", "new ", "day ", "far ", "joy ", "oak ",
    "owl ", "ink ", "map ", "and ", "his ", "her ", "own ", "way ", "sun ", "ice ", "few ", "hum ", "low ",
    "key ", "air ", "bay ", "cup ", "fox ",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine was started with, as far as it bears on a request."""

    model: str
    context_length: int
    default_tokens: int
    has_tool_parser: bool = False
    is_choosing_tools: bool = False
    is_seeing: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, judged.

    text: what is to be said, None for as many words as there may be. call: the tool that is called with it.
    is_seeing: it is asked about a picture, and the text is what it sees.
    """

    prompt: str
    max_tokens: int
    ends_itself: bool = False
    stops: tuple[str, ...] = ()
    choices: int = 1
    is_chat: bool = False
    is_stream: bool = False
    wants_usage: bool = False
    text: str | None = None
    call: Call | None = None
    is_seeing: bool = False

    @property
    def prompt_tokens(self) -> int:
        return count_tokens(self.prompt)

    @property
    def seed(self) -> int:
        return _seed(self.prompt)


def count_tokens(text: str) -> int:
    return -(-len(text) // TOKEN_CHARACTERS)


def judge(body: Mapping[str, Any], served: Served, *, is_chat: bool) -> Ask:
    """Raises Refused as vllm would."""
    field_name = "messages" if is_chat else "prompt"
    if field_name not in body:
        raise invalid(f"body.{field_name}", "missing", "Field required", body)
    judge_model(body, served.model)
    seen = ""
    if is_chat:
        prompt, seen = _chat_prompt(body["messages"], served)
    else:
        prompt = text_prompt(body["prompt"])
    _judge_temperature(body.get("temperature"))
    max_tokens = _max_tokens(body, served.context_length, is_chat=is_chat)
    judge_length(count_tokens(prompt), max_tokens, served.context_length)
    call = None
    if is_chat:
        call = choose_call(body, has_parser=served.has_tool_parser, is_choosing=served.is_choosing_tools)
    text = _text(call, body.get("response_format"), _seed(prompt))
    is_seeing = bool(seen) and text is None
    if is_seeing:
        text = seen
    room = served.context_length - count_tokens(prompt)
    free_end = room if text is not None else min(served.default_tokens, room)
    stream_options = body.get("stream_options") or {}
    return Ask(
        prompt=prompt,
        max_tokens=max_tokens or free_end,
        ends_itself=max_tokens is None and served.default_tokens <= room,
        stops=_stops(body.get("stop")),
        choices=_choices(body.get("n")),
        is_chat=is_chat,
        is_stream=bool(body.get("stream")),
        wants_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
        text=text,
        call=call,
        is_seeing=is_seeing,
    )


def judge_model(body: Mapping[str, Any], model: str) -> None:
    if body.get("model", model) != model:
        sentence = f"The model `{body['model']}` does not exist. Valid aliases: {model}."
        raise Refused(404, sentence, "model", "NotFoundError")


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


def _judge_temperature(temperature: object) -> None:
    if temperature is None or (_is_number(temperature) and 0 <= float(str(temperature)) <= 2):
        return
    shown = float(str(temperature)) if _is_number(temperature) else temperature
    raise refused_value("temperature", shown, "must be in [0, 2]")


def _max_tokens(body: Mapping[str, Any], context_length: int, *, is_chat: bool) -> int | None:
    max_tokens = body.get("max_completion_tokens") if is_chat else None
    max_tokens = body.get("max_tokens") if max_tokens is None else max_tokens
    if max_tokens is None:
        return None
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise refused_value("max_tokens", max_tokens, "must be at least 1")
    if max_tokens > context_length:
        raise Refused(
            400,
            f"max_tokens={max_tokens} cannot be greater than max_model_len={context_length}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={max_tokens})",
            "max_tokens",
        )
    return max_tokens


def _choices(given: object) -> int:
    choices = given or 1
    if not isinstance(choices, int) or not 1 <= choices <= CHOICES_LIMIT:
        raise refused_value("n", choices, f"must be between 1 and {CHOICES_LIMIT}")
    return choices


def _stops(given: object) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given or ()
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in stops):
        raise refused_value("stop", stops, "cannot contain an empty string")
    return tuple(stops)


def _text(call: Call | None, response_format: object, seed: int) -> str | None:
    """The JSON text that an answer is to be."""
    if call is not None:
        schema, where = call.tool.parameters, "tools"
    elif response_format is None:
        return None
    else:
        schema, where = _schema(response_format), "response_format"
        if schema is None:
            return None
    try:
        return json.dumps(example(schema, seed, WORDS), ensure_ascii=False)
    except SchemaError as error:
        raise Refused(400, f"{error} (parameter={where})", where) from None


def _schema(response_format: object) -> object:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object", "required": ["answer"]}
    if isinstance(response_format, Mapping) and kind == "json_schema":
        named = response_format.get("json_schema")
        if isinstance(named, Mapping) and named.get("schema") is not None:
            return named["schema"]
        raise invalid("body.response_format.json_schema", "missing", "Field required", named)
    raise invalid(
        "body.response_format", "literal_error", "Input should be text, json_object or json_schema", kind
    )


# --- prompts --------------------------------------------------------------------------------------------


def text_prompt(prompt: object) -> str:
    """Padded to whole tokens. Tokens come as numbers, too."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return "".join(f"{token & 0xFFFF:04x}" for token in prompt)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise invalid("body.prompt", "string_type", "Input should be a valid string", prompt)
    return _padded(prompt)


def _chat_prompt(messages: object, served: Served) -> tuple[str, str]:
    """And the colour of the last picture in it."""
    if not isinstance(messages, list):
        raise invalid("body.messages", "list_type", "Input should be a valid list", messages)
    texts: list[str] = []
    seen = ""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        said = []
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, Mapping) and part.get("type") == "image_url" and served.is_seeing:
                seen = _seen(part)
                said.append(f"({seen})")
                continue
            if isinstance(part, Mapping) and part.get("type") not in ("text", "refusal"):
                raise Refused(400, f"{served.model} is not a multimodal model")
            text = part.get("text") if isinstance(part, Mapping) else part
            said.append(text if isinstance(text, str) else "")
        role = message.get("role") if isinstance(message, Mapping) else None
        texts.append(message_text(str(role), "".join(said)))
    return "".join(texts), seen


def _seen(part: Mapping[str, Any]) -> str:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else None
    try:
        return colour_of(str(url))
    except NoPicture as no:
        raise Refused(400, f"{no} (parameter=image_url)", "image_url") from None


def message_text(role: str, said: str) -> str:
    """A message within a prompt."""
    return f"<|{role}|>"[:HEADER_CHARACTERS].ljust(HEADER_CHARACTERS) + _padded(said)


def _padded(text: str) -> str:
    return text + " " * (-len(text) % TOKEN_CHARACTERS)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _seed(prompt: str) -> int:
    return zlib.crc32(prompt.encode("utf-8", "replace"))
