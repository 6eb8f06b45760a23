"""What was used, in the admin: by key and by model, with tokens and times, for whoever may see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from catalog.pieces import said, sentence, table
from catalog.reading import CatalogError
from nodes.admin.reading import ReadOnlyAdmin
from nodes.models import Usage
from nodes.reckoning import BY, SEES_ALL, SINCE, Answer, answer, ask, lasted
from nodes.tallies import Tally

SPANS = {"1h": "hour", "24h": "24 hours", "168h": "7 days", "720h": "30 days", "2160h": "90 days"}
APART = {"model": "model", "key": "key", "both": "key and model"}
COUNTS = (
    *("requests", "errors", "left", "prompt tokens", "of them cached", "output tokens"),
    *("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "hold p50"),
)
CODES_SHOWN = 3
ASKED = ("since", "by", "key", "model")


@admin.register(Usage)
class UsageAdmin(ReadOnlyAdmin):
    """Sums in the place of a list: no row is a thing that one would look at."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Usage]:
        return Usage.objects.none()

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        told = {name: request.GET[name] for name in ASKED if request.GET.get(name)}
        refusal = ""
        try:
            question = ask(**{"by": "model"} | told)
        except CatalogError as no:
            refusal, told = sentence(str(no)), {}
            question = ask(by="model")
        found = answer(question, request.user)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": "Usage",
            "refusal": refusal,
            "says": _says(told, sees_all=request.user.has_perm(SEES_ALL)),
            "shown": _table(found, told) if found.lines else "",
            "choices": [
                ("in the last", list(_choices(told, "since", SPANS, SINCE))),
                ("by", list(_choices(told, "by", APART, "model"))),
            ],
            "clear": _query({name: told[name] for name in told if name not in ("key", "model")})
            if {"key", "model"} & told.keys()
            else "",
        }
        return TemplateResponse(request, "admin/nodes/usage/change_list.html", context)


def _says(told: dict[str, str], *, sees_all: bool) -> str:
    since = told.get("since", SINCE)
    parts = [f"The last {SPANS.get(since, since)}"]
    if "model" in told:
        parts.append(f"of the model {told['model']}")
    if "key" in told:
        parts.append(f"with the key {told['key']}")
    own = "" if sees_all else ", of your own keys"
    return sentence(f"{' '.join(parts)}{own}.")


def _choices(
    told: dict[str, str], name: str, words: dict[str, str], usual: str
) -> Iterator[tuple[str, str, bool]]:
    for value, word in words.items():
        yield word, _query(told, **{name: value}), told.get(name, usual) == value


def _query(told: dict[str, str], **changed: str) -> str:
    all_told = told | changed
    return f"?{urlencode([(name, all_told[name]) for name in ASKED if name in all_told])}"


def _table(found: Answer, told: dict[str, str]) -> SafeString:
    """Which errors there were is told where there is room for it."""
    apart = BY[found.question.by]
    tells_codes = len(apart) == 1
    rows: list[list[Any]] = []
    for line in found.lines:
        names = {
            "key": _narrowing(told, "key", line.key, line.key_name or line.key),
            "model": _narrowing(told, "model", line.model, line.model),
        }
        rows.append([*(names[each] for each in apart), *_counts(line.tally)])
        if tells_codes:
            rows[-1].append(_codes(line.tally))
    if len(rows) > 1:
        rows.append(["total", *[""] * (len(apart) - 1), *_counts(found.total)])
        if tells_codes:
            rows[-1].append(_codes(found.total))
    headings = [*apart, *COUNTS, *["which errors"] * tells_codes]
    looks = [*["called"] * len(apart), *["count"] * len(COUNTS), *[""] * tells_codes]
    return table(headings, rows, looks)


def _narrowing(told: dict[str, str], name: str, value: str, word: str) -> SafeString | str:
    """A name that leads to what it used, told apart by the other."""
    if not value:
        return "no key" if name == "key" else "no model"
    other = {"key": "model", "model": "key"}[name]
    return format_html('<a href="{}">{}</a>', _query(told, **{name: value, "by": other}), sentence(word))


def _counts(tally: Tally) -> list[Any]:
    cached = f"{tally.cached_tokens / tally.prompt_tokens:.0%}" if tally.prompt_tokens else "-"
    return [
        f"{tally.requests:,}",
        f"{tally.errors:,}",
        f"{tally.left:,}",
        _short(tally.prompt_tokens),
        cached,
        _short(tally.completion_tokens),
        lasted(tally.quantile("ttft", 0.5)),
        lasted(tally.quantile("ttft", 0.99)),
        lasted(tally.quantile("tpot", 0.5)),
        lasted(tally.quantile("tpot", 0.99)),
        lasted(tally.quantile("hold", 0.5)),
    ]


def _short(count: int) -> str:
    """`9,999`, `12.3 k`, `4.56 M`: a sum of tokens is read at a glance."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * size or (count >= size and size > 1_000):
            return f"{count / size:,.1f} {unit}"
    return f"{count:,}"


def _codes(tally: Tally) -> SafeString:
    often = sorted(tally.codes.items(), key=lambda item: (-item[1], item[0]))
    told = [f"{code} {times:,}" for code, times in often[:CODES_SHOWN]]
    more = ["..."] if len(often) > CODES_SHOWN else []
    return said(", ".join(told + more))
