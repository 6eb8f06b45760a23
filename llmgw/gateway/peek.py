"""Reading a request's body: its top level, and no deeper than must be.

The whole body is checked to be JSON once, by a parser that builds nothing of what it skips; the values stay
as the bytes that came. A look deeper is paid for only where cheap counts of bytes cannot rule out that there
is something to see.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from llmgw.gateway import bounds, context
from llmgw.gateway.bounds import Peek
from llmgw.gateway.context import Span
from llmgw.gateway.needs import TOOLS, VISION, Needs
from llmgw.gateway.surface import COMPLETION, Endpoint

Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(Fields)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()

# A name cannot hide behind an escape: one that writes a plain letter begins like the last of these.
_TRACES = (b"_url", b"_embeds", b'"url"', b"\\u00")
_LOOKED_INTO = ("messages", "input", "prompt", "system")
_IMAGES = frozenset({"image_url", "input_image", "image"})

BUILT_LIMIT = 20_000
"""Brackets in a body that is built to see how deep it is."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def decode(body: bytes) -> Fields:
    """The top level of a JSON object, each value as it came."""
    with _as_malformed():
        body.decode()  # msgspec looks for bad UTF-8 only where it makes texts
        fields = _fields.decode(body)
    if _is_too_deep(body):
        raise bounds.too_deep()
    return fields


def look_at(fields: Fields) -> Peek:
    """Raises Refused where something is larger, or more of it, than may be."""
    numbers = []
    for name, raw in fields.items():
        if name in bounds.SIZES and len(bytes(raw)) > bounds.SIZES[name]:
            raise bounds.too_big(name, bounds.SIZES[name])
        if name in bounds.COUNTS:
            _count(name, bytes(raw), bounds.COUNTS[name])
        if name in bounds.NUMBERS:
            numbers.append((name, _value(raw)))
    nested: set[str] = set()
    urls: list[str] = []
    for name in _LOOKED_INTO:
        if (value := fields.get(name)) is not None and _has_traces(bytes(value)):
            _look_into(_value(value), nested, urls)
    if (value := fields.get("tools")) is not None and _has_traces(bytes(value)):
        tools = _value(value)
        for tool in tools if isinstance(tools, list) else []:
            nested |= bounds.REFUSED_IN_TOOLS & tool.keys() if isinstance(tool, dict) else set()
    if isinstance(kwargs := _value(fields.get("chat_template_kwargs")), dict):
        nested |= bounds.REFUSED_IN_TEMPLATES & kwargs.keys()
    return Peek(
        model=_value(fields.get("model")),
        stream=_value(fields.get("stream")),
        fields=frozenset(fields),
        nested_fields=frozenset(nested),
        media_urls=tuple(urls),
        numbers=tuple(numbers),
    )


def needs_of(endpoint: Endpoint, fields: Fields) -> Needs:
    """Of a body that was looked at."""
    capabilities = {endpoint.capability} if endpoint.capability else set()
    if _is_filled(fields.get("tools")) or _is_filled(fields.get("functions")):
        capabilities.add(TOOLS)
    has_media = any(
        b"data:" in text or b"_url" in text or b'"source"' in text or b"input_audio" in text
        for name in ("messages", "input")
        if (raw := fields.get(name)) is not None and b'"' in (text := bytes(raw))
    )
    if has_media and any(_has_image(_value(fields.get(name))) for name in ("messages", "input")):
        capabilities.add(VISION)
    return Needs(
        endpoint,
        frozenset(capabilities),
        context.UNKNOWN if has_media else _span(endpoint, fields),
        output_asked(endpoint, fields) or 0,
    )


def output_asked(endpoint: Endpoint, fields: Fields) -> int | None:
    """None where it is left open; what is no number is the engine's to refuse."""
    for name in endpoint.output_fields:
        value = _value(fields.get(name))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value)
    return None


def wants_usage(fields: Fields) -> bool:
    options = _value(fields.get("stream_options"))
    return isinstance(options, dict) and options.get("include_usage") is True


def with_output(endpoint: Endpoint, fields: Fields, tokens: int) -> Fields:
    """The same request, bounded: in the field that it used, and otherwise in the one all engines know."""
    asked = [name for name in endpoint.output_fields if _value(fields.get(name)) is not None]
    value = msgspec.Raw(b"%d" % tokens)
    return {**fields, **dict.fromkeys(asked or endpoint.output_fields[-1:], value)}


def encode(fields: Mapping[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode(fields)


# --- a value ------------------------------------------------------------------------------------------------


def _value(raw: msgspec.Raw | bytes | None) -> Any:
    if raw is None:
        return None
    with _as_malformed():  # half a character passes as bytes and is no text
        return _any.decode(raw)


@contextlib.contextmanager
def _as_malformed() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise bounds.malformed("it is not UTF-8") from None
    except RecursionError:
        raise bounds.too_deep() from None
    except msgspec.DecodeError as error:
        raise bounds.malformed(str(error)) from None


def _is_filled(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw).strip() not in (b"null", b"[]", b"{}")


def _span(endpoint: Endpoint, fields: Fields) -> Span:
    """Several prompts in one request are answered one by one, and their sum says nothing of the longest."""
    if not endpoint.output_fields and not endpoint.capability:
        return context.UNKNOWN
    raws = [bytes(raw) for name in endpoint.prompt_fields if (raw := fields.get(name)) is not None]
    span = Span.of_bytes(sum(map(len, raws)))
    is_batch = endpoint.kind == COMPLETION or bool(endpoint.capability)
    if is_batch and raws and raws[0][:1] == b"[" and raws[0][1:].lstrip()[:1] in (b'"', b"["):
        return Span(0, span.most)
    return span


# --- how much there is --------------------------------------------------------------------------------------


def _is_too_deep(body: bytes) -> bool:
    """Told by the number of brackets where those, in texts or not, are too few for it; from the values where
    there may be some thousands; and from the brackets outside of texts where building so many values would
    cost more than that."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets <= bounds.DEPTH_LIMIT:
        return False
    if brackets <= BUILT_LIMIT:
        level = [_value(body)]
        for _ in range(bounds.DEPTH_LIMIT):
            level = [each for item in level for each in _within(item) if isinstance(each, (list, dict))]
        return bool(level)
    pairs = _TEXT.sub(b"", body).translate(_ONE_KIND, _ALL_BUT_BRACKETS)
    for _ in range(bounds.DEPTH_LIMIT):
        pairs = pairs.replace(b"[]", b"")  # the innermost level
    return bool(pairs)


def _within(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item


def _count(name: str, raw: bytes, limit: int) -> None:
    """A list has one entry more than it has commas, at most."""
    if raw.count(b",") < limit or raw[:1] != b"[":
        return
    with _as_malformed():
        items = _list.decode(raw)
    if len(items) > limit and not _are_tokens(name, items):
        raise bounds.too_many(name, limit)
    if name == "messages":
        parts = sum(max(1, bytes(item).count(b'"type"')) for item in items)
        if parts > bounds.PARTS_LIMIT and _parts(items) > bounds.PARTS_LIMIT:
            raise bounds.too_many_parts()


def _are_tokens(name: str, items: list[msgspec.Raw]) -> bool:
    """A prompt may be written in the numbers of its tokens; how many there may be, its context says."""
    return name in ("prompt", "input") and bytes(items[0])[:1].isdigit()


def _parts(messages: list[msgspec.Raw]) -> int:
    contents = (value.get("content") for item in messages if isinstance(value := _value(item), dict))
    return sum(len(content) if isinstance(content, list) else 1 for content in contents)


# --- what there is ------------------------------------------------------------------------------------------


def _has_traces(raw: bytes) -> bool:
    return any(trace in raw for trace in _TRACES)


def _look_into(value: object, nested: set[str], urls: list[str]) -> None:
    """Collects refused fields and the URLs of media in parts of messages, however nested. What a model wrote
    as a tool's arguments is not read by engines, and may hold what it likes."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            nested |= bounds.REFUSED_IN_PARTS & item.keys()
            for name in bounds.MEDIA_FIELDS & item.keys():
                media = item[name]
                urls += _texts(media.get("url") if isinstance(media, dict) else media)
            if isinstance(source := item.get("source"), dict):
                urls += _texts(source.get("url"))
            left += [each for name, each in item.items() if (item.get("type"), name) != ("tool_use", "input")]


def _texts(value: object) -> list[str]:
    return [value] if isinstance(value, str) else []


def _has_image(value: object) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            if item.get("type") in _IMAGES or "image_url" in item:
                return True
            left += [item.get("content"), item.get("output")]
    return False
