"""How every address under /api/ says no, and what each status of it means."""

from __future__ import annotations

from rest_framework import serializers as shapes

REFUSALS = {
    "400": "Something sent cannot be; each error says what to send instead.",
    "401": "No credential, or one that is not valid.",
    "403": "This user may not do this.",
    "404": "There is no such thing, or none that this user may see.",
    "406": "Asked for in another form than JSON.",
    "409": "Something else stands against it.",
    "413": "The body is too large.",
    "415": "The body is no JSON.",
    "500": "llmgw failed; its log tells more.",
    "503": "The database is away for now.",
}


class ErrorSerializer(shapes.Serializer):
    field = shapes.CharField(allow_blank=True, help_text="Empty where it is about no one field.")
    code = shapes.CharField()
    sentence = shapes.CharField(help_text="What is wrong, why, and what to do.")
    profile = shapes.CharField(required=False, help_text="The profile that it is about.")


class ErrorsSerializer(shapes.Serializer):
    errors = shapes.ListField(child=ErrorSerializer(), min_length=1)  # type: ignore[assignment]  # a declared field is taken off the class
