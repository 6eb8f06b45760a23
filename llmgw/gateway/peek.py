"""Reading a request's body: its top level, and no deeper than must be.

The whole body is checked to be JSON once, by a parser that builds nothing of what it skips; the values stay
as the bytes that came. A look deeper is paid for only where cheap counts of bytes cannot rule out that there
is something to see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from llmgw.gateway import bounds, context
from llmgw.gateway.admission import Refused
from llmgw.gateway.bounds import Peek
from llmgw.gateway.context import Span
from llmgw.gateway.needs import TOOLS, VISION, Needs
from llmgw.gateway.surface import COMPLETION, Endpoint

Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(Fields)
_NULL = msgspec.Raw(b"null")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Half a character passes as bytes, and is no text."""


class _Message(msgspec.Struct, frozen=True, gc=False):
    """Engines read what is no text in its content alone."""

    content: msgspec.Raw = _NULL


_list = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(list[_Message])
_any = msgspec.json.Decoder()

_TRACES, _TRACES_WITH_UNDERSCORE = (b'"url"', b'"image"', b'"source"'), (b"_url", b"_embeds", b"input_")
_ESCAPE = b"\\u00"
"""A name cannot hide behind an escape: one that writes a plain letter begins like this."""
_UNDERSCORE, _BACKSLASH = b"_\\"
_IMAGES = frozenset({"image_url", "input_image", "image"})
_MEDIA = _IMAGES | {
    "input_audio",
    "audio_url",
    "audio",
    "video_url",
    "video",
    "input_file",
    "file",
    "document",
}

_CAPABILITIES = {name: frozenset({name} if name else ()) for name in ("", "embeddings", TOOLS, VISION)}
_LOOKED_AT = bounds.BOUNDED | bounds.REFUSED_FIELDS.keys() | {"system"}
"""A body without any of these fields has nothing to be seen, but for what its messages may hold."""
_NO_PARTS: Sequence[bytes] = ()
_NOTHING_ELSE = Peek()[2:]
"""What is seen of most bodies beside the model and whether it is a stream."""
_TOO_SHORT_TO_BE_DEEP = 2 * bounds.DEPTH_LIMIT
_TOO_SHORT_FOR_VALUES, _TOO_SHORT_FOR_TEXTS = 2 * bounds.VALUES_LIMIT, 3 * bounds.TEXTS_LIMIT
"""In bytes: a level is opened and closed, a value takes one and a comma, a text two quotes and a comma."""

TOKENS_LIMIT = 10**9
"""A number of tokens that is as good as any larger one: no model has so many."""
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_OF_TOKENS = b"0123456789,[] \t\r\n"


def decode(body: bytes) -> Fields:
    """The top level of a JSON object, each value as it came."""
    if not body.isascii():
        try:
            body.decode()  # msgspec looks for bad UTF-8 only where it makes texts
        except UnicodeDecodeError as error:
            raise _malformed(error) from None
    outside = _outside_of_texts(body)
    try:
        fields = _fields.decode(body)
    except _UNREADABLE as error:
        raise _malformed(error) from None
    if outside:
        _check_shape(outside, fields)
    return fields


def look_at(fields: Fields) -> Peek:
    """Raises Refused where something is larger, or more of it, than may be."""
    is_plain, numbers = _LOOKED_AT.isdisjoint(fields), []
    if not is_plain:
        for name, raw in fields.items():
            if name in bounds.BOUNDED:
                _bound(name, bytes(raw))
                if name in bounds.NUMBERS:
                    numbers.append((name, _value(raw)))
    model, stream = _value(fields.get("model")), _value(fields.get("stream"))
    messages = fields.get("messages")
    parts = _NO_PARTS if messages is None else _parts_of(messages)
    if is_plain and not parts:
        return tuple.__new__(Peek, (model, stream, *_NOTHING_ELSE))
    found = _Found()
    for name in ("input", "system"):
        if (value := fields.get(name)) is not None and (part := bytes(value))[:1] != b'"':
            parts = [*parts, part]
    for part in parts:
        if _has_traces(part):
            found.look_into(_value(part))
    if (value := fields.get("tools")) is not None and _has_traces(bytes(value)):
        tools = _value(value)
        for tool in tools if isinstance(tools, list) else []:
            found.nested |= bounds.REFUSED_IN_TOOLS & tool.keys() if isinstance(tool, dict) else set()
    if (value := fields.get("chat_template_kwargs")) is not None and isinstance(
        kwargs := _value(value), dict
    ):
        found.nested |= bounds.REFUSED_IN_TEMPLATES & kwargs.keys()
    return Peek(
        model=model,
        stream=stream,
        fields=fields.keys(),
        nested_fields=found.nested,
        media_urls=found.urls,
        numbers=numbers,
        has_images=not _IMAGES.isdisjoint(found.kinds),
        has_media=not _MEDIA.isdisjoint(found.kinds),
    )


def needs_of(endpoint: Endpoint, fields: Fields, seen: Peek) -> Needs:
    """Of a body that was looked at."""
    capabilities, prompt = _CAPABILITIES[endpoint.capability], context.UNKNOWN
    if not seen.has_media:
        prompt = _span(endpoint, fields)
    if seen.fields:
        if _is_filled(fields.get("tools")) or _is_filled(fields.get("functions")):
            capabilities |= _CAPABILITIES[TOOLS]
        if seen.has_images:
            capabilities |= _CAPABILITIES[VISION]
    return tuple.__new__(Needs, (endpoint, capabilities, prompt, output_asked(endpoint, fields) or 0))


def output_asked(endpoint: Endpoint, fields: Fields) -> int | None:
    """None where it is left open; what is no number is the engine's to refuse."""
    for name in endpoint.output_fields:
        if (raw := fields.get(name)) is not None:
            value = _value(raw)
            if type(value) is int or type(value) is float:  # and no bool
                return TOKENS_LIMIT if value > TOKENS_LIMIT else int(value)
    return None


def wants_usage(fields: Fields) -> bool:
    options = _value(fields.get("stream_options"))
    return isinstance(options, dict) and options.get("include_usage") is True


def with_output(endpoint: Endpoint, fields: Mapping[str, msgspec.Raw], tokens: int) -> Fields:
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
    try:
        return _any.decode(raw)
    except _UNREADABLE as error:
        raise _malformed(error) from None


def _count(entries: bytes) -> int:
    """Of a list, as it is written."""
    return len(_list.decode(entries))


def _malformed(error: Exception) -> Refused:
    match error:
        case UnicodeDecodeError():
            return bounds.malformed("it is not UTF-8")
        case RecursionError():
            return bounds.too_deep()
        case _:
            return bounds.malformed(str(error))


def _is_filled(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw).strip() not in (b"null", b"[]", b"{}")


def _span(endpoint: Endpoint, fields: Fields) -> Span:
    """Several prompts in one request are answered one by one, and their sum says nothing of the longest."""
    if not endpoint.output_fields and not endpoint.capability:
        return context.UNKNOWN
    size = 0
    for name in endpoint.prompt_fields:
        if (raw := fields.get(name)) is not None:
            size += len(memoryview(raw))
    span = Span.of_bytes(size)
    if endpoint.kind == COMPLETION or endpoint.capability:
        begins = bytes(memoryview(fields.get(endpoint.prompt_fields[0], _NULL))[:64])
        if begins[:1] == b"[" and begins[1:].lstrip()[:1] in (b'"', b"["):
            return Span(0, span.most)
    return span


def _has_traces(part: bytes) -> bool:
    """Written out, because it is asked of every text that is sent as a part, and the answer is nearly always
    no. A byte is looked for many times as fast as a word."""
    if _UNDERSCORE in part:
        for trace in _TRACES_WITH_UNDERSCORE:
            if trace in part:
                return True
    plain_url, image, source = _TRACES
    return plain_url in part or image in part or source in part or (_BACKSLASH in part and _ESCAPE in part)


# --- how much there is --------------------------------------------------------------------------------------


def _outside_of_texts(body: bytes) -> bytes:
    """What a body has beside its texts, or nothing where it cannot have too much of it. Raises Refused for
    one of so many parts that it would hold up all others to look at them."""
    size = len(body)
    if (size <= _TOO_SHORT_TO_BE_DEEP or not _opens_more_than(body, bounds.DEPTH_LIMIT)) and (
        (size <= _TOO_SHORT_FOR_VALUES or body.count(b",") <= bounds.VALUES_LIMIT)
        and (size <= _TOO_SHORT_FOR_TEXTS or body.count(b'"') <= 2 * bounds.TEXTS_LIMIT)
    ):
        return b""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quote begins a text or ends one
    if bare.count(b'"') > 2 * bounds.TEXTS_LIMIT:
        raise bounds.too_many_in_all("texts", bounds.TEXTS_LIMIT)
    outside = b"".join(bare.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > bounds.LISTS_LIMIT:
        raise bounds.too_many_in_all("lists and objects", bounds.LISTS_LIMIT)
    return outside


def _opens_more_than(body: bytes, limit: int) -> bool:
    """Of a long body no more is looked at than must be: a byte that is rare is found faster than counted."""
    if len(body) < 512:
        return body.count(b"[") + body.count(b"{") > limit
    for sign in (b"[", b"{"):
        at = body.find(sign)
        while at >= 0:
            limit -= 1
            if limit < 0:
                return True
            at = body.find(sign, at + 1)
    return False


def _check_shape(outside: bytes, fields: Fields) -> None:
    pairs = outside.translate(_ONE_KIND, _ALL_BUT_BRACKETS)
    for _ in range(bounds.DEPTH_LIMIT):
        pairs = pairs.replace(b"[]", b"")  # the innermost level
    if pairs:
        raise bounds.too_deep()
    values = outside.count(b",")
    if values > bounds.VALUES_LIMIT:
        tokens = [bytes(raw) for name, raw in fields.items() if _are_tokens(name, bytes(raw))]
        if values - sum(raw.count(b",") for raw in tokens) > bounds.VALUES_LIMIT:
            raise bounds.too_many_in_all("values", bounds.VALUES_LIMIT)


def _bound(name: str, raw: bytes) -> None:
    if len(raw) > bounds.SIZES.get(name, len(raw)):
        raise bounds.too_big(name, bounds.SIZES[name])
    limit = bounds.COUNTS.get(name)
    # A list has one entry more than it has commas, at most.
    if limit is not None and raw[:1] == b"[" and raw.count(b",") >= limit:
        count = raw.count(b"[") - 1 if _are_tokens(name, raw) else _count(raw)
        if count > limit:
            raise bounds.too_many(name, limit)


def _are_tokens(name: str, raw: bytes) -> bool:
    """Prompts may be written in the numbers of their tokens; how many there may be, a context says."""
    return name in ("prompt", "input") and not raw.translate(None, _OF_TOKENS)


def _parts_of(raw: msgspec.Raw) -> Sequence[bytes]:
    """What of messages may hold something else than text: nearly always nothing."""
    text = bytes(raw)
    try:
        messages = _messages.decode(text)
    except msgspec.ValidationError:  # of another shape, and so the engine's to refuse
        return (text,)
    total = len(messages)
    if total > bounds.COUNTS["messages"]:
        raise bounds.too_many("messages", bounds.COUNTS["messages"])
    if text.find(b"[", 1) < 0:
        return _NO_PARTS  # no list is in this one, and parts come in lists
    lists = []
    for message in messages:
        content = bytes(message.content)
        if content[:1] == b"[":
            lists.append(content)
            total += _count(content) - 1
    if lists and total > bounds.PARTS_LIMIT:
        raise bounds.too_many_parts()
    return lists


# --- what there is ------------------------------------------------------------------------------------------


class _Found:
    """What stands in parts of messages, however nested: refused fields, URLs of media, and kinds of parts.
    What a model wrote as a tool's arguments is not read by engines, and may hold what it likes."""

    __slots__ = ("kinds", "nested", "urls")

    def __init__(self) -> None:
        self.nested: set[str] = set()
        self.urls: list[str] = []
        self.kinds: set[str] = set()

    def look_into(self, value: Any) -> None:
        left = [value]
        while left:
            item = left.pop()
            if isinstance(item, list):
                left += item
            elif isinstance(item, dict):
                kind = item.get("type")
                self._look_at(kind, item)
                left += [each for name, each in item.items() if (kind, name) != ("tool_use", "input")]

    def _look_at(self, kind: object, item: dict[str, Any]) -> None:
        self.nested |= bounds.REFUSED_IN_PARTS & item.keys()
        if isinstance(kind, str):
            self.kinds.add(kind)
        for name in bounds.MEDIA_FIELDS & item.keys():
            self.kinds.add(name)
            media = item[name]
            self._keep(media.get("url") if isinstance(media, dict) else media)
        if isinstance(source := item.get("source"), dict):
            self._keep(source.get("url"))

    def _keep(self, url: object) -> None:
        if isinstance(url, str):
            self.urls.append(url)
