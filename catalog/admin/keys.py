"""API keys in the admin: made, shown once, changed in what they open, revoked."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString

from catalog import actions
from catalog.forms import KeyEditForm, KeyForm
from catalog.models import Key
from catalog.pages import VerbAdmin
from catalog.parts import LIMIT_KEYS
from catalog.pieces import badge, sentence
from catalog.reach import opens_words
from catalog.showing import ANY_KEY, key_state, keys_for
from catalog.typed import limits_words


@admin.register(Key)
class KeyAdmin(VerbAdmin):
    """What a key opens may change; its text, its owner and its end may not. One's own keys, unless one may
    those of others."""

    form = KeyForm
    list_display = ("name", "id", "user", "scope", "state", "created_at", "expires_at", "opens", "limits")
    list_filter = ("scope",)
    search_fields = ("name", "id", "user__username")
    list_select_related = ("user",)
    of_row = ("name", "user", "scope", "id", "created_at", "expires_at")
    of_reach = (("only_these", "models"), LIMIT_KEYS, "cache_scope")
    fields = ("name", "user", "scope", "expires_in", *of_reach, "why")
    actions: ClassVar[list[Any]] = ["revoke"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Key]:
        return keys_for(request.user)

    def has_change_permission(self, request: HttpRequest, obj: Key | None = None) -> bool:
        return (obj is None or not obj.revoked_at) and super().has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Key | None = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: Key | None = None) -> Any:
        if obj is None:
            return self.fields
        if not self.has_change_permission(request, obj):
            return (*self.of_row, "revoked_at", "opens", "limits", "cache_scope")
        return (*self.of_row, *self.of_reach, "why", "revision")

    def get_readonly_fields(self, request: HttpRequest, obj: Key | None = None) -> Any:
        return (*self.of_row, "opens", "limits") if obj else ()

    @admin.display(description="opens")
    def opens(self, key: Key) -> str:
        return sentence(opens_words(key.reach))

    @admin.display(description="limits")
    def limits(self, key: Key) -> str:
        return limits_words(key.reach.limits) or "-"

    @admin.display(description="state")
    def state(self, key: Key) -> SafeString:
        state = key_state(key)
        return badge(state, "good" if state == "live" else "bad")

    def get_form(
        self, request: HttpRequest, obj: Key | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        if obj is not None and self.has_change_permission(request, obj):
            kwargs["form"] = KeyEditForm
        form = super().get_form(request, obj, change, **kwargs)
        form.seen = getattr(request, "seen", ())
        if obj is None and not request.user.has_perm(ANY_KEY):
            users = form.base_fields["user"]
            users.queryset = users.queryset.filter(pk=request.user.pk)
        return form

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        return {"user": request.user.pk, **super().get_changeform_initial_data(request)}

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """After a key has been made its page is shown, once, and no form."""
        context |= {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().render_change_form(request, context, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: Key, form: Any, change: bool) -> None:
        asked = form.cleaned_data
        if change:
            actions.edit_key(
                obj.pk,
                form.reach(),
                expected=form.expected,
                why=asked["why"],
                by=request.user.get_username(),
                door="admin",
                maker=request.user,
            )
            return
        _, request.key_text = actions.mint_key(  # type: ignore[attr-defined]
            asked["name"],
            user=asked["user"],
            scope=asked["scope"],
            expires_in_ns=asked["expires_in"],
            reach={key: value for key, value in form.reach().items() if value is not None},
            why=asked["why"],
            by=request.user.get_username(),
            door="admin",
            maker=request.user,
        )

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """A key has nothing beside it."""

    def response_add(self, request: HttpRequest, obj: Key, post_url_continue: Any = None) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": f"The key {obj.name}",
            "text": request.key_text,  # type: ignore[attr-defined]
        }
        return TemplateResponse(request, "admin/catalog/key/shown_once.html", context)

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[Key]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="revoke",
            title="Revoke keys",
            question="Refuse these keys from now on? It cannot be taken back; make a new one instead.",
            button="Yes, revoke",
            done="revoked",
            act=lambda key, **told: actions.revoke_key(key.pk, **told),
        )
