"""The fields that the catalog's forms are made of, and what all of those forms do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django import forms
from django.contrib.admin.widgets import AdminTextareaWidget, AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.utils.html import format_html

from catalog.durations import format_duration
from catalog.models import Event
from catalog.pieces import said
from catalog.typed import TypingError, read_duration


class TypedField(forms.Field):
    """A text exactly as it was typed, whatever it is: the law judges it."""

    def __init__(self, label: str, help_text: str = "", widget: Any = None, **attrs: object) -> None:
        widget = widget or AdminTextInputWidget(attrs=attrs)
        label = label[:1].upper() + label[1:]
        super().__init__(label=label, help_text=help_text, widget=widget, required=False)

    def to_python(self, value: Any) -> str:
        return str(value or "").replace("\r\n", "\n")


class LinesField(TypedField):
    """One entry a line, read by `read`; a line that cannot be read is the field's error."""

    def __init__(self, label: str, read: Callable[[str], Any], help_text: str, rows: int = 4) -> None:
        widget = AdminTextareaWidget(attrs={"rows": rows, "class": "lines", "spellcheck": "false"})
        super().__init__(label, help_text, widget)
        self.read = read

    def clean(self, value: Any) -> Any:
        try:
            return self.read(super().clean(value))
        except TypingError as no:
            raise ValidationError(str(no)) from None


class SpanField(TypedField):
    """A length of time in nanoseconds, None where it was left empty. `key` is what the law calls it."""

    def __init__(self, key: str, help_text: str, example: str) -> None:
        attrs = {"size": 8, "placeholder": example, "class": "number"}
        super().__init__(key.replace("_", " "), help_text, **attrs)
        self.key = key

    def clean(self, value: Any) -> int | None:
        text = super().clean(value)
        try:
            return read_duration(self.key, text) if text.strip() else None
        except TypingError as no:
            raise ValidationError(str(no)) from None


def number_field(label: str, help_text: str = "") -> TypedField:
    return TypedField(label, help_text, inputmode="decimal", size=8, **{"class": "number"})


def duration_field(label: str, help_text: str = "", example: str = "20m") -> TypedField:
    return TypedField(label, help_text, size=8, placeholder=example, **{"class": "number"})


def choice_field(label: str, choices: Sequence[str], help_text: str = "") -> TypedField:
    return TypedField(label, help_text, forms.Select(choices=[(choice, choice or "-") for choice in choices]))


def why_field() -> TypedField:
    return TypedField("why", "kept in the history beside your name", **{"class": "vTextField"})


def add_notes(form: forms.BaseForm, notes: Mapping[str, Sequence[str]]) -> None:
    """Puts what is to be said of stored values beside the fields that hold them."""
    for name, sentences in notes.items():
        field = form.fields[name]
        for each in sentences:
            field.help_text = format_html("{} {}", field.help_text, said(each, "note"))


def take_for_seen(form: forms.BaseForm, events: Sequence[Event]) -> None:
    """The next save counts as made with these in sight."""
    data: Any = form.data.copy()
    data["revision"] = str(events[-1].revision)
    form.data = data


def revision_of(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else 0


def duration_text(nanoseconds: int) -> str:
    return format_duration(nanoseconds) if nanoseconds else ""
