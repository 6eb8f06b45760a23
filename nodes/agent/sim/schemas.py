"""A JSON value that a JSON schema describes: pure, the same for the same schema and seed.

It understands what engines' grammars do, reads oneOf as anyOf as they do, and refuses what it cannot promise
to follow. A hostile schema costs a bounded number of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SIZE_LIMIT = 64 * 1024  # characters of its JSON
STEPS_LIMIT = 2_000
DEEPEST = 32
SHALLOW = 3  # below this only what the schema insists on
LONGEST = 1_000  # characters or items that a schema may insist on
LARGEST = 2**53  # whole numbers up to here are exact in every reader

FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT5M",
    "email": "sim@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/sim",
    "uuid": "00000000-0000-4000-8000-000000000001",
}

# What would change what is valid, and is not understood.
_BEYOND = (
    "not", "if", "then", "else", "pattern", "patternProperties", "propertyNames", "minProperties",
    "dependentRequired", "dependentSchemas", "contains", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


class SchemaError(ValueError):
    """A schema that no value is made for; the text is the sentence."""


def example(schema: object, seed: int, words: Sequence[str]) -> Any:
    """A value for it, its texts made of `words`. Raises SchemaError."""
    if len(json.dumps(schema)) > SIZE_LIMIT:
        raise SchemaError(f"The JSON schema is longer than {SIZE_LIMIT} characters.")
    return _Filler(schema, seed, words).fill(schema, 0)


class _Filler:
    def __init__(self, root: object, seed: int, words: Sequence[str]) -> None:
        self._root, self._seed, self._words = root, seed, words
        self._steps = 0

    def fill(self, schema: object, depth: int) -> Any:
        self._steps += 1
        if self._steps > STEPS_LIMIT or depth > DEEPEST:
            raise SchemaError("The JSON schema is too large, or goes on without end.")
        if schema is True or schema == {}:
            return self._words[self._next() % len(self._words)].strip()
        if not isinstance(schema, Mapping):
            raise SchemaError("The JSON schema allows nothing, or is none.")
        for keyword in _BEYOND:
            if keyword in schema:
                raise SchemaError(f"The JSON schema's keyword {keyword} is not supported.")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return _one_of(schema["enum"], "enum", self._next())
        if "$ref" in schema:
            return self.fill(_merged(schema, "$ref", self._at(schema["$ref"])), depth + 1)
        if "allOf" in schema:
            parts = _list(schema["allOf"], "allOf")
            whole = {key: value for key, value in schema.items() if key != "allOf"}
            for part in parts:
                whole = _both(whole, self._resolved(part))
            return self.fill(whole, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._fill_any(schema, keyword, depth)
        return self._fill_type(schema, self._type_of(schema), depth)

    def _fill_any(self, schema: Mapping[str, Any], keyword: str, depth: int) -> Any:
        choices = _list(schema[keyword], keyword)
        if depth >= SHALLOW:  # what refers to nothing comes to an end
            choices = sorted(choices, key=lambda each: "$ref" in str(each))
        refused = SchemaError(f"The JSON schema's {keyword} offers nothing.")
        for choice in choices:
            try:
                return self.fill(_merged(schema, keyword, choice), depth + 1)
            except SchemaError as error:
                if self._steps > STEPS_LIMIT:
                    raise
                refused = error
        raise refused

    def _type_of(self, schema: Mapping[str, Any]) -> str:
        told = schema.get("type")
        kinds = [told] if isinstance(told, str) else told
        if kinds is None:
            if "properties" in schema or "required" in schema:
                return "object"
            return "array" if "items" in schema or "prefixItems" in schema else "string"
        kind = kinds[0] if isinstance(kinds, list) and kinds else None
        if kind not in _TYPES:
            raise SchemaError("The JSON schema's type is not one of JSON's.")
        return str(kind)

    def _fill_type(self, schema: Mapping[str, Any], kind: str, depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._text(schema)
        if kind in ("integer", "number"):
            return self._number(schema, is_whole=kind == "integer")
        return self._next() % 2 == 0 if kind == "boolean" else None

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = _properties(schema), _required(schema)
        others = schema.get("additionalProperties", True)
        names = [name for name in properties if depth < SHALLOW or name in required]
        names += [name for name in required if name not in properties]
        return {name: self.fill(properties.get(name, others), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = _list(schema["prefixItems"], "prefixItems") if "prefixItems" in schema else []
        least = _count(schema, "minItems", 0)
        most = _count(schema, "maxItems", LONGEST)
        items = schema.get("items", True)
        wanted = max(least, min(most, max(len(first), 2 if depth < SHALLOW and items is not False else 0)))
        if schema.get("uniqueItems") and wanted > 1:
            if least > 1:
                raise SchemaError("The JSON schema's keyword uniqueItems is not supported above one item.")
            wanted = 1
        return [
            self.fill(first[index] if index < len(first) else items, depth + 1) for index in range(wanted)
        ]

    def _text(self, schema: Mapping[str, Any]) -> str:
        least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", LONGEST)
        start = self._next() % len(self._words)
        text = "".join((*self._words[start:], *self._words)) * (least // 100 + 1)
        text = text[: min(most, max(least, 12))]
        if isinstance(told := schema.get("format"), str):
            text = FORMATS.get(told, "")
            if not text or not least <= len(text) <= most:
                raise SchemaError(f"The JSON schema's format {told[:40]} is not supported here.")
        return text.rstrip().ljust(least, ".")

    def _number(self, schema: Mapping[str, Any], *, is_whole: bool) -> float:
        low, high = _bound(schema, "minimum", -math.inf), _bound(schema, "maximum", math.inf)
        above, below = (
            _bound(schema, "exclusiveMinimum", -math.inf),
            _bound(schema, "exclusiveMaximum", math.inf),
        )
        step = _bound(schema, "multipleOf", 1)
        if step <= 0 or (is_whole and step != int(step)):
            raise SchemaError("The JSON schema's multipleOf is not above zero, or no whole number.")
        least, most = max(low, above), min(high, below)
        times = self._next() % 100 if least == -math.inf else math.ceil(least / step)
        if least == -math.inf and most < times * step:
            times = math.floor(most / step)
        for value in (times * step, (times + 1) * step, (times - 1) * step, least / 2 + most / 2):
            if not (math.isfinite(value) and low <= value <= high and above < value < below):
                continue
            if "multipleOf" in schema and not math.isclose(value / step, round(value / step)):
                continue
            if not is_whole:
                return value
            if value == int(value):
                return int(value)
        raise SchemaError("The JSON schema leaves no number between its bounds.")

    def _resolved(self, schema: object) -> Mapping[str, Any]:
        for _ in range(DEEPEST):
            if not isinstance(schema, Mapping):
                break
            if "$ref" not in schema:
                return schema
            schema = _merged(schema, "$ref", self._at(schema["$ref"]))
        raise SchemaError("The JSON schema's allOf holds what is no schema.")

    def _at(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError("The JSON schema refers to another document; put everything into one.")
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise SchemaError(f"The JSON schema refers to {reference[:80]}, which it does not hold.")
        return found

    def _next(self) -> int:
        """Another number each time."""
        self._seed = (self._seed * 1_103_515_245 + 12_345) % 2**31
        return self._seed >> 8


def _merged(schema: Mapping[str, Any], keyword: str, part: object) -> object:
    """What is said beside a $ref or a choice holds as well."""
    rest = {
        key: value
        for key, value in schema.items()
        if key != keyword and key not in ("$defs", "definitions", "title", "description", "default")
    }
    if not rest or not isinstance(part, Mapping):
        return part
    return _both(rest, part)


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    whole = {**one, **other}
    if "properties" in one and "properties" in other:
        whole["properties"] = {**_properties(one), **_properties(other)}
    if "required" in one and "required" in other:
        whole["required"] = list(dict.fromkeys([*_required(one), *_required(other)]))
    for keyword, sterner in _STERNER.items():
        if keyword in one and keyword in other:
            whole[keyword] = sterner(_bound(one, keyword, 0), _bound(other, keyword, 0))
    return whole


_STERNER: Mapping[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise SchemaError("The JSON schema's properties are no object.")
    return properties


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError("The JSON schema's required is no list of names.")
    return required


def _list(value: object, keyword: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"The JSON schema's {keyword} is no list, or an empty one.")
    return value


def _one_of(value: object, keyword: str, number: int) -> Any:
    choices = _list(value, keyword)
    return choices[number % len(choices)]


def _bound(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SchemaError(f"The JSON schema's {keyword} is no number.")
    if keyword in schema and not -LARGEST <= value <= LARGEST:
        raise SchemaError(f"The JSON schema's {keyword} is beyond 2 to the 53rd.")
    return value


def _count(schema: Mapping[str, Any], keyword: str, default: int) -> int:
    value = _bound(schema, keyword, default)
    if value != int(value) or not 0 <= value <= LONGEST:
        raise SchemaError(f"The JSON schema's {keyword} is not a number from 0 to {LONGEST}.")
    return int(value)
