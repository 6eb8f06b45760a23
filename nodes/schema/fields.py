"""What many shapes have in common."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers as shapes

from catalog.schema import fields


def text(says: str = "") -> Any:
    return shapes.CharField(allow_blank=True, help_text=says)


def whole(says: str = "", **told: Any) -> Any:
    return shapes.IntegerField(help_text=says, **told)


def unknown(says: str = "") -> Any:
    return shapes.IntegerField(allow_null=True, help_text=says or "null: unknown")


class ReasonSerializer(shapes.Serializer):
    """Why it is done."""

    why = fields.why()
