"""Webhooks in the admin: added, tried, paused, and what became of the last notices."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.messages import ERROR
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from catalog.forms import why_field
from catalog.forms.fields import TypedField
from catalog.pages import VerbAdmin
from catalog.pieces import badge, live, said, sentence, table
from catalog.reading import Fault, quote
from nodes import webhooks
from nodes.models import Delivery, Webhook
from nodes.notices import KINDS, host_words

_LOOKS = {"live": "good", "failing": "bad", "paused": "warn"}
_DELIVERY_LOOKS: dict[str, str] = {
    Delivery.State.WAITING: "busy",
    Delivery.State.DELIVERED: "good",
    Delivery.State.GIVEN_UP: "bad",
}
DELIVERY_HEADINGS = ("made", "notice", "about", "delivery", "tries", "next try", "answer")
DELIVERY_LOOKS = ("brief", "brief", "", "brief", "brief", "brief", "")


class WebhookForm(forms.ModelForm):
    """A webhook to be added, or one that is there."""

    faults: ClassVar[Sequence[Fault]] = ()

    name = TypedField("name", "what it is for, such as pager", **{"class": "vTextField short"})
    url = TypedField("URL", "begins with https://; what is private in it belongs in its path", size=80)
    kinds = forms.MultipleChoiceField(
        label="Told of",
        choices=[(kind, f"{kind}: {each.says}") for kind, each in KINDS.items()],
        widget=forms.CheckboxSelectMultiple,
        required=False,
        help_text="none chosen: of all of them",
    )
    why = why_field()

    class Meta:
        model = Webhook
        fields = ()

    def _get_validation_exclusions(self) -> set[str]:
        """The verb judges these, not the columns: every door is to say the same sentence."""
        return {*super()._get_validation_exclusions(), "name", "url", "kinds"}

    def clean(self) -> dict[str, Any]:
        for fault in self.faults:
            self.add_error(fault.field or None, fault.sentence)
        return self.cleaned_data


@admin.register(Webhook)
class WebhookAdmin(VerbAdmin):
    """Those who may not change one see its host alone."""

    form = WebhookForm
    list_display = ("name", "state", "host", "told_of", "waiting", "delivered", "given_up")
    search_fields = ("name",)
    fields = ("name", "url", "kinds", "why")
    of_row = ("now", "last", "by", "created_at")
    is_live = True
    actions: ClassVar[list[Any]] = ["try_out", "pause", "resume", "remove"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Webhook]:
        return webhooks.webhooks()

    def has_delete_permission(self, request: HttpRequest, obj: Webhook | None = None) -> bool:
        return False

    def has_remove_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm(webhooks.MAY_DELETE))

    def subject_of(self, webhook: Webhook) -> tuple[str, str, str]:
        return "webhook", str(webhook.pk), webhook.name

    def get_fields(self, request: HttpRequest, obj: Webhook | None = None) -> Any:
        if obj is None:
            return self.fields
        if not self.has_change_permission(request, obj):
            return ("name", "host", "told_of", *self.of_row)
        return (*self.fields, *self.of_row)

    def get_readonly_fields(self, request: HttpRequest, obj: Webhook | None = None) -> Any:
        return ("host", "told_of", *self.of_row) if obj else ()

    @admin.display(description="state")
    def state(self, webhook: Webhook) -> SafeString:
        state = webhooks.state_of(webhook)
        return badge(state, _LOOKS[state])

    @admin.display(description="URL")
    def host(self, webhook: Webhook) -> str:
        return sentence(host_words(webhook.url))

    @admin.display(description="told of")
    def told_of(self, webhook: Webhook) -> str:
        return webhooks.kinds_words(webhook)

    @admin.display(description="waiting")
    def waiting(self, webhook: Webhook) -> int:
        return webhook.waiting  # type: ignore[attr-defined]  # annotated

    @admin.display(description="state")
    def now(self, webhook: Webhook) -> SafeString:
        return live("state", format_html("{} {}", self.state(webhook), said(self._counts(webhook))))

    def _counts(self, webhook: Webhook) -> str:
        counted = (
            (webhook.delivered, "delivered"),
            (self.waiting(webhook), "waiting"),
            (webhook.failed, "tries that failed"),
            (webhook.given_up, "given up"),
        )
        return ", ".join(f"{count} {words}" for count, words in counted)

    @admin.display(description="last notices")
    def last(self, webhook: Webhook) -> SafeString:
        rows = [_line(delivery) for delivery in webhooks.deliveries_of(webhook)]
        shown = table(DELIVERY_HEADINGS, rows, DELIVERY_LOOKS) if rows else "none yet; Test sends one"
        return live("last notices", shown)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """After one has been added its secret is shown, once, and no form."""
        context |= {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().render_change_form(request, context, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: Webhook, form: Any, change: bool) -> None:
        asked = {key: form.cleaned_data[key] for key in self.fields}
        told = {"by": request.user.get_username(), "door": "admin"}
        if change:
            webhooks.edit_webhook(Webhook.objects.get(pk=obj.pk), **asked, **told)
        else:
            request.made = webhooks.add_webhook(**asked, **told)  # type: ignore[attr-defined]

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """A webhook has nothing beside it."""

    def response_add(self, request: HttpRequest, obj: Webhook, post_url_continue: Any = None) -> HttpResponse:
        webhook, secret = request.made  # type: ignore[attr-defined]
        context = {
            **self.admin_site.each_context(request),
            "title": f"The webhook {sentence(webhook.name)}",
            "text": secret,
            "pk": webhook.pk,
        }
        return TemplateResponse(request, "admin/nodes/webhook/shown_once.html", context)

    @admin.action(description="Send a test notice to the selected webhooks", permissions=["change"])
    def try_out(self, request: HttpRequest, queryset: QuerySet[Webhook]) -> HttpResponse:
        chosen = list(queryset)
        tried: dict[uuid.UUID, Delivery] = {}

        def act(webhook: Webhook, **told: Any) -> bool:
            """All at the same time, with the first: those that hang have one time-out between them."""
            if not tried:
                tried.update(webhooks.try_webhooks(chosen, **told))
            problem = tried[webhook.pk].problem if webhook.pk in tried else "It was removed meanwhile."
            if problem:
                says = f"The webhook {quote(webhook.name)} did not take it. {problem}"
                self.message_user(request, sentence(says), ERROR)
            return not problem

        return self.confirm(
            request,
            chosen,
            action="try_out",
            title="Test webhooks",
            question="Post a notice of kind test to these now? What each answers is told.",
            button="Yes, post it",
            done="took a test notice",
            act=act,
        )

    @admin.action(description="Pause the selected webhooks", permissions=["change"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Webhook]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="pause",
            title="Pause webhooks",
            question="Post nothing to these until they are resumed? What begins meanwhile is lost on them.",
            button="Yes, pause",
            done="paused",
            act=webhooks.pause_webhook,
        )

    @admin.action(description="Resume the selected webhooks", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Webhook]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="resume",
            title="Resume webhooks",
            question="Post notices to these again?",
            button="Yes, resume",
            done="are told again",
            act=webhooks.resume_webhook,
        )

    @admin.action(description="Remove the selected webhooks", permissions=["remove"])
    def remove(self, request: HttpRequest, queryset: QuerySet[Webhook]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="remove",
            title="Remove webhooks",
            question="Remove these, and with them what they were to be told yet? Their secrets end for good.",
            button="Yes, remove",
            done="removed",
            act=webhooks.remove_webhook,
        )


def _line(delivery: Delivery) -> tuple[Any, ...]:
    told = webhooks.delivery_as_dict(delivery)
    next_at = f"{delivery.next_at:%H:%M:%S} UTC" if told["next_at"] else ""
    return (
        f"{delivery.made_at:%Y-%m-%d %H:%M:%S} UTC",
        " ".join(dict.fromkeys((told["kind"], told["state"]))),
        told["subject"],
        badge(delivery.state, _DELIVERY_LOOKS[delivery.state]),
        str(delivery.tries),
        next_at,
        said(told["problem"]) if told["problem"] else str(told["status"] or ""),
    )
