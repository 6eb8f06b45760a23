"""The pieces that llmgw's admin pages are made of: badges, small tables, the page that asks before it acts.

Everything they are given is data and is escaped; what cannot be seen in it is made visible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.contrib.admin import ModelAdmin, helpers
from django.contrib.messages import ERROR, SUCCESS, WARNING
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from catalog.reading import CatalogError, shown

SENTENCE_LIMIT = 2_000


def sentence(text: str) -> str:
    """A text of some length that somebody else wrote, made fit to be seen; line ends stay."""
    return "\n".join(shown(line, SENTENCE_LIMIT) for line in text[:SENTENCE_LIMIT].split("\n"))


def badge(word: str, look: str = "") -> SafeString:
    """A word and a colour: good, busy, warn, bad, or none."""
    return format_html('<span class="badge {}">{}</span>', look, shown(word))


def said(text: str, look: str = "") -> SafeString:
    return format_html('<span class="said {}">{}</span>', look, sentence(text))


def preformatted(text: str, look: str) -> SafeString:
    return format_html(
        '<pre class="{}">{}</pre>', look, "\n".join(shown(line, 4_000) for line in text.split("\n"))
    )


def as_json(value: Any) -> SafeString:
    return preformatted(json.dumps(value, indent=2, ensure_ascii=False), "json")


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], looks: Sequence[str] = ()) -> SafeString:
    """A small table. Cells are texts, or SafeStrings made here; `looks` are the columns' classes."""
    looks = looks or [""] * len(headings)
    head = format_html_join("", "<th>{}</th>", ((heading,) for heading in headings))
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


def history(kind: str, subject: str) -> HttpResponse:
    """The events of one thing: the only history there is, whoever did it and through whichever door."""
    events = reverse("admin:catalog_event_changelist")
    return redirect(f"{events}?{urlencode({'kind': kind, 'subject': subject})}")


def confirm(
    admin: ModelAdmin,
    request: HttpRequest,
    queryset: QuerySet[Any],
    *,
    action: str,
    title: str,
    question: str,
    button: str,
    done: str,
    act: Callable[[Any, str], object],
    after: Callable[[], object] = lambda: None,
    describe: Callable[[Any], str] = str,
) -> HttpResponse:
    """Asks whether and why; once confirmed, `act(row, why)` for each row, and says to how many it was done.

    `act` answers False where there was nothing left to do, or raises CatalogError, which stops none of the
    others. `done` completes "3 of 4 models ...". Who may do it is for the caller to have checked.
    """
    back = reverse(f"admin:{admin.opts.app_label}_{admin.opts.model_name}_changelist")
    rows: list[Model] = list(queryset)
    if request.method != "POST" or request.POST.get("confirmed") != "yes":
        context = {
            **admin.admin_site.each_context(request),
            "title": title,
            "opts": admin.opts,
            "media": admin.media,
            "question": question,
            "button": button,
            "lines": [shown(describe(row), SENTENCE_LIMIT) for row in rows],
            "keys": [str(row.pk) for row in rows],
            "action": action,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "back": back,
        }
        return TemplateResponse(request, "admin/confirm_action.html", context)
    why = request.POST.get("why", "").replace("\0", "").strip()  # PostgreSQL takes no NUL
    count = 0
    for row in rows:
        try:
            count += act(row, why) is not False
        except CatalogError as no:
            admin.message_user(request, sentence(str(no)), ERROR)
    if count:
        after()
    names = str(admin.opts.verbose_name if len(rows) == 1 else admin.opts.verbose_name_plural)
    admin.message_user(request, f"{count} of {len(rows)} {names} {done}.", SUCCESS if count else WARNING)
    return redirect(back)
