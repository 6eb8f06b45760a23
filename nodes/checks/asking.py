"""The requests of an engine check, for any model: short, at temperature 0, and each with an answer that can
be judged without knowing the model."""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

CHAT_TOKENS, STOP_TOKENS, MAX_TOKENS, PREFIX_OUTPUT_TOKENS = 32, 48, 8, 1
LONG_TOKENS, SHORT_TOKENS = 1024, 64  # a model may think ahead of a call; where none is claimed, less will do
UNIT = "word "
"""What long prompts are made of: as often as the wanted number of tokens takes."""
UNITS = (8, 136)
"""How many of them the two prompts have by which it is measured what one costs."""
BELOW_TOKENS = 4  # said after the longest prompt
PREFIX_TOKENS_LIMIT = 1024
COLOURS: Mapping[str, tuple[int, int, int]] = {"red": (255, 0, 0), "blue": (0, 0, 255)}
PICTURE_PIXELS = 64

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather_in",
        "description": "The weather in a city for the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "send_letter",
        "description": "Send somebody a letter.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string"}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
CHOICES: Mapping[str, Any] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "function": {"name": "weather_in"}},
}
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


def chat(model: str, said: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": said}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def hello(model: str) -> dict[str, Any]:
    return chat(model, "Say hello in one short sentence.", CHAT_TOKENS)


def tale(model: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """What has no end of its own for a while."""
    return chat(model, "Tell a long story about a lighthouse and the sea.", max_tokens, **more)


def long_tale(model: str, context_length: int) -> dict[str, Any]:
    """For a client that leaves in the middle."""
    room = min(4096, context_length - 64) if context_length > 128 else 256
    return streamed(tale(model, room, ignore_eos=True))


def stop_text(said: str) -> str:
    """The letter that this answer has most often; empty where it has none. Any answer comes to it soon."""
    letters = Counter(letter for letter in said if letter.isalnum())
    return letters.most_common(1)[0][0] if letters else ""


def long_prompt(model: str, units: int, max_tokens: int) -> dict[str, Any]:
    return chat(model, UNIT * units, max_tokens)


def units_of(tokens: int, few: int, many: int) -> int | None:
    """How many units make a prompt of about so many tokens, where the two measured ones had that many; None
    where units cost nothing."""
    each = (many - few) / (UNITS[1] - UNITS[0])
    return None if each <= 0 else int((tokens - (few - UNITS[0] * each)) / each)


def below(context_length: int) -> int:
    """Tokens of a prompt that must be taken."""
    return context_length - BELOW_TOKENS - max(12, context_length // 50)


def above(context_length: int) -> int:
    """Tokens of a prompt that must be refused."""
    return context_length + max(64, context_length // 20)


def prefix(model: str, words: str, context_length: int) -> dict[str, Any]:
    """A prompt that begins as no other has, and is asked twice. words: of chance."""
    tokens = min(PREFIX_TOKENS_LIMIT, context_length // 2 or PREFIX_TOKENS_LIMIT)
    said = f"{words} " + UNIT * max(1, int(tokens / 1.5))
    return streamed(chat(model, said, PREFIX_OUTPUT_TOKENS))


def tool(model: str, choice: str, max_tokens: int) -> dict[str, Any]:
    said = "Call weather_in: what will the weather in Paris be in the next 3 days?"
    return chat(model, said, max_tokens, tools=[OTHER_TOOL, TOOL], tool_choice=CHOICES[choice])


def schema(model: str, max_tokens: int) -> dict[str, Any]:
    said = "Invent a person: a name, an age and a favourite colour. Answer in JSON."
    named = {"name": "person", "schema": SCHEMA, "strict": True}
    return chat(model, said, max_tokens, response_format={"type": "json_schema", "json_schema": named})


def picture(model: str, colour: str, max_tokens: int) -> dict[str, Any]:
    asked = "Which one colour fills this picture? Answer with one word: red, green, blue or yellow."
    url = f"data:image/png;base64,{base64.b64encode(png(COLOURS[colour], PICTURE_PIXELS)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": asked}]
    return chat(model, parts, max_tokens)


def png(colour: tuple[int, int, int], pixels: int) -> bytes:
    """A square of one colour."""
    head = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)
    lines = (b"\0" + bytes(colour) * pixels) * pixels
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def embedding(model: str, said: str) -> dict[str, Any]:
    return {"model": model, "input": said}
