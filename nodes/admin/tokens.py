"""Join tokens in the admin: how a node is added, and what has become of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString

from catalog.forms import LinesField, SpanField, why_field
from catalog.pages import VerbAdmin
from catalog.pieces import badge, sentence
from catalog.reading import Fault
from catalog.typed import read_pairs
from nodes import joining
from nodes.bundle import join_line
from nodes.models import JoinToken
from nodes.pieces import node_link
from nodes.tokens import join_tokens, token_state

_LOOKS = {"live": "good", "used": "", "revoked": "bad", "expired": "bad"}


class JoinTokenForm(forms.ModelForm):
    """A join token to be made."""

    faults: ClassVar[Sequence[Fault]] = ()

    labels = LinesField("labels", read_pairs, "what node selectors look for, NAME=value a line", rows=3)
    expires_in = SpanField("expires_in", "up to 168h; empty: 1h", "1h")
    plain_http = forms.BooleanField(
        label="Plain HTTP beyond loopback",
        help_text="gateways reach its engines without TLS, unless the agent is told --engine-tls; over a "
        "network that is trusted or encrypted",
        required=False,
    )
    engine_tls = forms.BooleanField(
        label="TLS to its engines",
        help_text="they answer gateways over TLS alone (--engine-tls), with the agent's own certificate",
        required=False,
    )
    why = why_field()

    class Meta:
        model = JoinToken
        fields = ("node_name",)
        help_texts: ClassVar[dict[str, str]] = {
            "node_name": "empty: as the machine calls itself. The name of a node that is there: this machine "
            "takes its place"
        }

    def clean(self) -> dict[str, Any]:
        for fault in self.faults:
            self.add_error("node_name" if fault.field == "name" else fault.field, fault.sentence)
        return self.cleaned_data


@admin.register(JoinToken)
class JoinTokenAdmin(VerbAdmin):
    """Join tokens are made, used once and revoked, never edited."""

    form = JoinTokenForm
    list_display = ("id", "whom", "state", "by", "created_at", "expires_at", "used_by")
    search_fields = ("id", "node_name", "by")
    fields = ("node_name", "labels", "expires_in", "plain_http", "engine_tls", "why")
    actions: ClassVar[list[Any]] = ["revoke"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[JoinToken]:
        return join_tokens()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm(joining.MAY_ADD))

    def has_change_permission(self, request: HttpRequest, obj: JoinToken | None = None) -> bool:
        return obj is None and self.has_add_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: JoinToken | None = None) -> bool:
        return False

    def subject_of(self, token: JoinToken) -> tuple[str, str, str]:
        return "join token", token.pk, token.pk

    def get_fields(self, request: HttpRequest, obj: JoinToken | None = None) -> Any:
        of_row = ("id", "whom", "state", "labels", "by", "created_at", "expires_at", "used_at", "used_by")
        return of_row if obj else self.fields

    def get_readonly_fields(self, request: HttpRequest, obj: JoinToken | None = None) -> Any:
        return self.get_fields(request, obj) if obj else ()

    @admin.display(description="node")
    def whom(self, token: JoinToken) -> str:
        return sentence(token.node_name) or "any"

    @admin.display(description="state")
    def state(self, token: JoinToken) -> SafeString:
        state = token_state(token)
        return badge(state, _LOOKS[state])

    @admin.display(description="used by")
    def used_by(self, token: JoinToken) -> SafeString | str:
        return node_link(token.node) if token.node else "-"

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """After a token has been made its page is shown, once, and no form."""
        context |= {"show_save_and_add_another": False, "show_save_and_continue": False}
        context["title"] = "Add node" if kwargs["add"] else "Join token"
        return super().render_change_form(request, context, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: JoinToken, form: Any, change: bool) -> None:
        asked = form.cleaned_data
        request.made = joining.mint_join_token(  # type: ignore[attr-defined]
            name=asked["node_name"],
            labels=asked["labels"],
            lives_ns=asked["expires_in"],
            why=asked["why"],
            by=request.user.get_username(),
            door="admin",
            maker=request.user,
        )
        flags = {"--plain-http": asked["plain_http"], "--engine-tls": asked["engine_tls"]}
        request.options = [flag for flag, is_given in flags.items() if is_given]  # type: ignore[attr-defined]

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """A token has nothing beside it."""

    def response_add(
        self, request: HttpRequest, obj: JoinToken, post_url_continue: Any = None
    ) -> HttpResponse:
        token, text = request.made  # type: ignore[attr-defined]
        url = request.build_absolute_uri("/").rstrip("/")
        context = {
            **self.admin_site.each_context(request),
            "title": "Add node",
            "line": join_line(url, request.options),  # type: ignore[attr-defined]
            "text": text,
            "token": token,
        }
        return TemplateResponse(request, "admin/nodes/jointoken/shown_once.html", context)

    @admin.action(description="Revoke the selected join tokens", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[JoinToken]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="revoke",
            title="Revoke join tokens",
            question="Let no machine join with these any more? A node that one of them made stays.",
            button="Yes, revoke",
            done="revoked",
            act=joining.revoke_join_token,
        )
