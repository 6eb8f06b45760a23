"""What the body of a request may hold: which fields, how many of what, and how much.

Bounds protect engines and this process from one request; what is within them is the engine's to judge. Fields
that nobody here knows pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from catalog.reading import quote
from llmgw.gateway.admission import Refused

KIB, MIB = 1024, 1024 * 1024

DEPTH_LIMIT = 100
PARTS_LIMIT = 4_096
"""Parts of all messages together."""
TEXTS_LIMIT, LISTS_LIMIT, VALUES_LIMIT = 100_000, 60_000, 100_000
"""Of a whole body, however they are nested: texts, names among them; lists and objects; values that are not
the first of theirs, but for the numbers of a prompt's tokens."""

# Fields that let a client reach files, hosts or code through the engine.
REFUSED_FIELDS: Mapping[str, str] = {
    "chat_template": "a template is a program that the engine would run, and comes with the model",
    "logits_processors": "they are programs that the engine would run",
    "custom_logit_processor": "it is a program that the engine would run",
    "prompt_embeds": "the engine would unpack it without looking",
    "input_embeds": "the engine would unpack it without looking",
    "image_embeds": "the engine would unpack it without looking",
    "audio_embeds": "the engine would unpack it without looking",
    "lora_path": "it names a file on the engine's machine",
    "lora_request": "it names a file on the engine's machine",
    "api_base": "llmgw chooses where a request goes",
    "api_key": "llmgw chooses where a request goes",
    "api_url": "llmgw chooses where a request goes",
    "base_url": "llmgw chooses where a request goes",
    "server_url": "it names a host that the engine would connect to",
    "mcp_servers": "they name hosts that the engine would connect to",
    "bootstrap_host": "it names a host that the engine would connect to",
    "bootstrap_port": "it names a host that the engine would connect to",
    "bootstrap_room": "it names a host that the engine would connect to",
    "kv_transfer_params": "it names a host that the engine would connect to",
}

_REFUSED = frozenset(REFUSED_FIELDS)

# Those that an engine also reads where they stand deeper: in parts of messages, in a template's arguments, in
# the description of a tool. Elsewhere a name is the client's own, such as that of a tool's argument.
REFUSED_IN_PARTS = frozenset({"prompt_embeds", "input_embeds", "image_embeds", "audio_embeds"})
REFUSED_IN_TEMPLATES = frozenset({"chat_template"})
REFUSED_IN_TOOLS = frozenset({"server_url"})
MEDIA_FIELDS = frozenset({"image_url", "audio_url", "video_url", "file_url"})

# The greatest number for each. A text is refused, as engines would read a number in it.
NUMBERS: Mapping[str, int] = {
    "n": 128,
    "best_of": 128,
    "logprobs": 20,
    "top_logprobs": 20,
    "prompt_logprobs": 20,
}

# How many of each.
COUNTS: Mapping[str, int] = {
    "messages": 4_096,
    "input": 2_048,
    "prompt": 2_048,
    "documents": 2_048,
    "queries": 2_048,
    "items": 2_048,
    "text_1": 2_048,
    "text_2": 2_048,
    "tools": 512,
    "functions": 512,
    "stop": 32,
    "stop_sequences": 32,
    "stop_token_ids": 1_024,
    "bad_words": 1_024,
    "allowed_token_ids": 65_536,
}

# How many bytes of JSON each may be.
SIZES: Mapping[str, int] = {
    "tools": MIB,
    "functions": MIB,
    "response_format": 256 * KIB,
    "text": 256 * KIB,
    "guided_json": 256 * KIB,
    "guided_regex": 64 * KIB,
    "guided_grammar": 64 * KIB,
    "guided_choice": 64 * KIB,
    "structured_outputs": 256 * KIB,
    "json_schema": 256 * KIB,
    "grammar": 64 * KIB,
    "regex": 64 * KIB,
    "ebnf": 64 * KIB,
    "logit_bias": 64 * KIB,
    "stop": 16 * KIB,
    "stop_sequences": 16 * KIB,
    "chat_template_kwargs": 64 * KIB,
    "metadata": 64 * KIB,
}


BOUNDED = NUMBERS.keys() | COUNTS.keys() - {"messages"} | SIZES.keys()


class Peek(NamedTuple):
    """The few things of a body that are looked at: its fields' names where any of them tells something,
    refused ones that stand deeper, numbers that have a bound, and where its media would come from."""

    model: object = None
    stream: object = None
    fields: Set[str] = frozenset()
    nested_fields: Set[str] = frozenset()
    media_urls: Sequence[str] = ()
    numbers: Sequence[tuple[str, object]] = ()
    has_images: bool = False
    has_media: bool = False


def check_body(peek: Peek, media_hosts: Collection[str] = ()) -> str:
    """The name that the request asks for. `media_hosts` are those that engines may fetch from."""
    model, stream, fields, nested_fields, media_urls, numbers, *_ = peek
    if model is None:
        raise Refused(
            400,
            "missing_model",
            "The request names no model: set `model`; GET /v1/models lists them.",
            param="model",
        )
    if not isinstance(model, str) or not model:
        raise Refused(400, "invalid_model", "`model` must be a text that names a model.", param="model")
    if not (stream is None or isinstance(stream, bool)):
        raise Refused(400, "invalid_stream", "`stream` must be true or false.", param="stream")
    if nested_fields or (fields and not _REFUSED.isdisjoint(fields)):
        name = min((_REFUSED & fields) | nested_fields)
        raise Refused(
            400,
            "field_not_accepted",
            f"The field `{name}` is not accepted: {REFUSED_FIELDS[name]}. Leave it out.",
            param=name,
        )
    for name, value in numbers:
        check_number(name, value)
    for url in media_urls:
        if not is_media_allowed(url, media_hosts):
            raise Refused(
                400,
                "remote_media",
                f"The URL {quote(url[:200])} is not fetched for a request: send the content itself as a "
                "data: URL.",
                param="messages",
            )
    return model


_REMOTE = re.compile(r"https?://([A-Za-z0-9.-]+)(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]*)?")


def is_media_allowed(url: str, hosts: Collection[str]) -> bool:
    """Strict, because the engine reads the address with another reader: nothing before the host, and no
    character that any reader takes for an end."""
    if url[:5].lower() == "data:":
        return True
    found = _REMOTE.fullmatch(url)
    return found is not None and found[1].lower() in hosts


def check_number(name: str, value: object) -> None:
    limit = NUMBERS[name]
    if value is None or (isinstance(value, (int, float)) and 0 <= value <= limit):
        return
    raise Refused(400, "out_of_bounds", f"`{name}` must be a number from 0 to {limit}.", param=name)


def too_many(name: str, limit: int) -> Refused:
    return Refused(400, "out_of_bounds", f"`{name}` has more than {limit} entries: send fewer.", param=name)


def too_many_in_all(what: str, limit: int) -> Refused:
    return Refused(
        400, "out_of_bounds", f"The body has more than {limit} {what}: send fewer, or several requests."
    )


def too_many_parts() -> Refused:
    return Refused(
        400,
        "out_of_bounds",
        f"`messages` have more than {PARTS_LIMIT} parts together: send fewer.",
        param="messages",
    )


def too_big(name: str, limit: int) -> Refused:
    return Refused(
        400, "out_of_bounds", f"`{name}` is larger than {limit} bytes: make it smaller.", param=name
    )


def malformed(cause: str) -> Refused:
    return Refused(400, "malformed_json", f"The body is not a JSON object: {cause}.")


def too_deep() -> Refused:
    return malformed(f"it is nested deeper than {DEPTH_LIMIT} levels")
