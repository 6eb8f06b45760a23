"""The pieces that llmgw's admin pages are made of: badges, sentences and small tables.

Everything they are given is data and is escaped; what cannot be seen in it is made visible.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.reading import shown

SENTENCE_LIMIT = 2_000


def sentence(text: str) -> str:
    """A text of some length that somebody else wrote, made fit to be seen; line ends stay."""
    return "\n".join(shown(line, SENTENCE_LIMIT) for line in text[:SENTENCE_LIMIT].split("\n"))


def badge(word: str, look: str = "") -> SafeString:
    """A word and a colour: good, busy, warn, bad, or none."""
    return format_html('<span class="badge {}">{}</span>', look, shown(word))


def said(text: str, look: str = "") -> SafeString:
    return format_html('<span class="said {}">{}</span>', look, sentence(text))


def live(name: str, shown_: Any) -> SafeString:
    """A part of a page that follows what happens while the page is open. name: one of its page."""
    return format_html('<div data-live="{}" data-called="{}">{}</div>', name, name, shown_)


def preformatted(text: str, look: str) -> SafeString:
    """Of any length: it scrolls, and so the keyboard reaches it."""
    return format_html(
        '<pre class="{}" tabindex="0">{}</pre>',
        look,
        "\n".join(shown(line, 4_000) for line in text.split("\n")),
    )


def as_json(value: Any) -> SafeString:
    return preformatted(json.dumps(value, indent=2, ensure_ascii=False), "json")


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], looks: Sequence[str] = ()) -> SafeString:
    """A small table. Cells are texts, or SafeStrings made here; `looks` are the columns' classes."""
    looks = looks or [""] * len(headings)
    columns = zip(looks, headings, strict=True)
    head = format_html_join("", '<th scope="col" class="{}">{}</th>', columns)
    lines = [
        (
            format_html_join(
                "",
                '<td class="{}">{}</td>',
                (
                    (look, cell if isinstance(cell, SafeString) else sentence(str(cell)))
                    for look, cell in zip(looks, row, strict=True)
                ),
            ),
        )
        for row in rows
    ]
    body = format_html_join("", "<tr>{}</tr>", lines)
    return format_html('<table class="facts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>', head, body)


def difference_table(differences: Iterable[Mapping[str, Any]]) -> SafeString:
    """Field by field: was, is now. Entries of one map, or of one list, stand below each other."""
    rows = [(each["field"], _entries(each["was"]), _entries(each["now"])) for each in differences]
    return table(("field", "was", "is now"), rows, looks=("", "was", "now"))


def _entries(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "not set"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={_entries(inner)}" for name, inner in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return "\n".join(_entries(inner) for inner in value)
    return value if isinstance(value, str) else json.dumps(value)
