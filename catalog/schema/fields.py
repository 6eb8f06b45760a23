"""The kinds of field that bodies are made of, each within the law's own limits."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from rest_framework import serializers as shapes

from catalog.reading import ENTRIES_LIMIT, INT_LIMIT, NAME_LIMIT, TEXT_LIMIT

DURATION = r"^-?([0-9]+(\.[0-9]+)?h)?([0-9]+(\.[0-9]+)?m)?([0-9]+(\.[0-9]+)?s)?([0-9]+(\.[0-9]+)?ms)?$"


class Duration(shapes.Field):
    """`1h30m`, `1.5s`, `300ms`."""


class DurationExtension(OpenApiSerializerFieldExtension):
    target_class = Duration

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        text = {"type": "string", "pattern": DURATION, "minLength": 1, "maxLength": 64, "example": "20m"}
        if direction == "response":
            return text
        return {"anyOf": [text, {"type": "integer", "description": "nanoseconds"}]}


def text(limit: int, says: str = "", **told: Any) -> Any:
    return shapes.CharField(max_length=limit, allow_blank=True, help_text=says, **{"required": False} | told)


def name(says: str = "", **told: Any) -> Any:
    return shapes.CharField(min_length=1, max_length=NAME_LIMIT, help_text=says, **told)


def whole(says: str = "", *, lowest: int = -INT_LIMIT, **told: Any) -> Any:
    bounds = {"min_value": lowest, "max_value": INT_LIMIT}
    return shapes.IntegerField(help_text=says, required=False, **bounds, **told)


def names(says: str) -> Any:
    return shapes.ListField(child=name(), max_length=ENTRIES_LIMIT, help_text=says, required=False)


def pairs(says: str) -> Any:
    return shapes.DictField(child=text(TEXT_LIMIT), help_text=says, required=False)


def duration(says: str = "", **told: Any) -> Any:
    return Duration(help_text=says, required=False, **told)


def moment(says: str = "", **told: Any) -> Any:
    return shapes.DateTimeField(help_text=says, **told)


def why(**told: Any) -> Any:
    return text(TEXT_LIMIT, "Kept in the history.", **told)
