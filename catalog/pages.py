"""What llmgw's admin pages have in common: they change nothing themselves, but ask, and call a verb.

So the history of a row is its events, whoever did it and through whichever door. What nobody can have chosen
on a page (an id that is none, a text that no column holds) finds nothing, and is no failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import unquote
from django.contrib.messages import ERROR, SUCCESS, WARNING
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse

from catalog.actions import ChangedSince, SourceRefused
from catalog.hiding import SEE_ENV
from catalog.history import events_of, history_table
from catalog.models import database_now
from catalog.pieces import SENTENCE_LIMIT, sentence
from catalog.reading import CatalogError, shown

HISTORY_PAGE = 50  # events
_LONGEST_NUMBER = 18  # digits that a column of 64 bits always holds


class VerbAdmin(ModelAdmin):
    """Pages of rows that verbs and the loop write. is_live: the list follows what happens."""

    is_live = False

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        if not all(map(_is_storable, request.GET.values())):
            raise IncorrectLookupParameters
        return super().get_changelist_instance(request)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The row, which knows as `sees_env` what whoever asks may see of environments."""
        row = super().get_object(request, object_id, from_field) if _is_storable(object_id) else None
        if row is not None:
            row.sees_env = request.user.has_perm(SEE_ENV)
        return row

    def is_gone(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """For a page of a row that is not there: as the page of the row itself. Somebody has removed it
        meanwhile, perhaps by a second click on the same button. Whoever may see no row learns of none."""
        if not self.has_view_or_change_permission(request):
            raise Http404
        answer: HttpResponse = self._get_obj_does_not_exist_redirect(  # type: ignore[attr-defined]
            request, self.opts, unquote(object_id)
        )
        return answer

    # --- the history

    def subject_of(self, row: Any) -> tuple[str, str, str]:
        """The kind, the key and the subject by which events name the row."""
        return str(self.opts.model_name), str(row.pk), str(row.pk)

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self.is_gone(request, object_id)
        if not self.has_view_or_change_permission(request, row):
            raise Http404
        if not request.user.has_perm("catalog.view_event"):
            raise PermissionDenied
        pages = Paginator(events_of(*self.subject_of(row)), HISTORY_PAGE)
        page = pages.get_page(request.GET.get("p"))
        context = {
            **self.admin_site.each_context(request),
            "title": f"History of {sentence(str(row))}",
            "object": row,
            "opts": self.opts,
            "module_name": str(self.opts.verbose_name_plural).capitalize(),
            "history": history_table(page, now=database_now(), sees_env=row.sees_env),
            "page": page,
            "page_range": pages.get_elided_page_range(page.number),
        }
        return TemplateResponse(request, "admin/object_history.html", context)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        return []

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> None:
        """The verb has written the event."""

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> None:
        """The verb has written the event."""

    # --- saving

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> HttpResponse:
        """Without the stock transaction: a verb opens its own, and may ask a hub before. A page that was
        refused is shown again with what was typed, and the sentences at their fields; what others changed
        in between is shown above it."""
        try:
            return self._changeform_view(request, object_id, form_url, extra_context)
        except (CatalogError, SourceRefused) as no:
            request.faults = no.faults  # type: ignore[attr-defined]
            if isinstance(no, ChangedSince):
                request.seen = no.events  # type: ignore[attr-defined]
                sees_env = request.user.has_perm(SEE_ENV)
                others = history_table(no.events, now=database_now(), sees_env=sees_env)
                extra_context = {**(extra_context or {}), "others": others}
            return self._changeform_view(request, object_id, form_url, extra_context)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        form.faults = getattr(request, "faults", ())
        return form

    # --- acting

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        if all(map(self._can_be_key, request.POST.getlist(helpers.ACTION_CHECKBOX_NAME))):
            return super().response_action(request, queryset)
        self.message_user(request, "What was chosen is not in this list; choose again.", WARNING)
        return None

    def _can_be_key(self, text: str) -> bool:
        try:
            self.opts.pk.to_python(text)
        except ValidationError:
            return False
        return _is_storable(text)

    def confirm(
        self,
        request: HttpRequest,
        chosen: Iterable[Any],
        *,
        action: str,
        title: str,
        question: str,
        button: str,
        done: str,
        act: Callable[..., object],
        after: Callable[[], object] = lambda: None,
        entails: Callable[[Sequence[Any]], Mapping[Any, Sequence[str]]] = lambda rows: {},
    ) -> HttpResponse:
        """Asks whether and why; once confirmed, does `act(row, by=, why=, door=)` for each row, in this
        order, and says to how many it was done.

        `entails` tells by key what would come of the rows, for the question. `act` answers False where there
        was nothing left to do, or raises CatalogError, which stops none of the others. `done` completes
        "3 of 4 models ...". Who may do it is for the caller to have checked.
        """
        back = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        rows = list(chosen)
        if request.method != "POST" or request.POST.get("confirmed") != "yes":
            entailed = entails(rows)
            context = {
                **self.admin_site.each_context(request),
                "title": title,
                "opts": self.opts,
                "media": self.media,
                "question": question,
                "button": button,
                "lines": [
                    (sentence(str(row)), [shown(each, SENTENCE_LIMIT) for each in entailed.get(row.pk, ())])
                    for row in rows
                ],
                "keys": [str(row.pk) for row in rows],
                "action": action,
                "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
                "back": back,
            }
            return TemplateResponse(request, "admin/confirm_action.html", context)
        by, why = request.user.get_username(), request.POST.get("why", "").strip()
        count = 0
        asked = max(len(rows), len(request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)))  # some may be gone
        for row in rows:
            try:
                count += act(row, by=by, why=why, door="admin") is not False
            except CatalogError as no:
                self.message_user(request, sentence(str(no)), ERROR)
        if count:
            after()
        names = str(self.opts.verbose_name if asked == 1 else self.opts.verbose_name_plural)
        self.message_user(request, f"{count} of {asked} {names} {done}.", SUCCESS if count else WARNING)
        return redirect(back)


def _is_storable(text: str) -> bool:
    return "\0" not in text and not (text.isdecimal() and len(text) > _LONGEST_NUMBER)
