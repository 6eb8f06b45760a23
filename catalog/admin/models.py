"""Models and their profiles in the admin.

Pages read rows and call verbs; nothing here saves a row. A verb's refusal is shown on the same page, at the
fields it is about.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog import actions
from catalog.forms import ModelForm, ProfileForm, ProfileFormSet
from catalog.hiding import hide_model
from catalog.models import Model, Profile
from catalog.pages import VerbAdmin
from catalog.pieces import as_json, badge, said, sentence, table
from catalog.typed import scaling_words, span_words
from nodes.agents import ask_paths
from nodes.models import Replica
from nodes.pieces import replica_badge, stale_badge
from nodes.showing import models_with_replicas, replicas, spec_of, staleness_of, tally
from nodes.tasks import wake

SOURCE_LOOKS = {Model.Source.OK: "good", Model.Source.WARN: "warn", Model.Source.REFUSE: "bad"}


class ProfileInline(admin.StackedInline):
    model = Profile
    form = ProfileForm
    formset = ProfileFormSet
    extra = 0
    min_num = 1
    verbose_name_plural = "profiles: the ways to run it, one for each GPU class"
    fieldsets = (
        (
            None,
            {
                "fields": (
                    ("name", "engine", "gpu_class"),
                    ("tp", "pp", "nodes", "gpus_per_node"),
                    ("min_memory_gb", "min_disk_gb", "startup_timeout"),
                    ("priority", "weight"),
                    ("args", "env", "node_selector"),
                )
            },
        ),
    )

    # Profiles are part of their model: whoever may edit the one may edit the other.

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return request.user.has_perm("catalog.change_model" if obj else "catalog.add_model")

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return self.has_add_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return self.has_add_permission(request, obj)

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return request.user.has_perm("catalog.view_model") or self.has_add_permission(request, obj)


@admin.register(Model)
class ModelAdmin(VerbAdmin):
    form = ModelForm
    inlines = (ProfileInline,)
    list_display = ("name", "scaling", "ready", "stale", "waits_for", "source_found", "profile_names")
    list_filter = ("source_state",)
    search_fields = ("names__name", "source", "description")
    actions: ClassVar[list[Any]] = ["remove"]
    fieldsets = (
        ("Now", {"fields": ("now", "running", "source_check")}),
        (None, {"fields": ("name", "aliases", "description")}),
        ("Source", {"fields": ("source", "skip_source_check")}),
        (
            "Scaling",
            {"fields": (("scaling_min", "scaling_max", "idle_timeout"), "fallbacks", "routing_profile")},
        ),
        ("Limits and promises", {"fields": (("context_length", "max_output"), ("ttft_p99", "tpot_p99"))}),
        ("Capabilities", {"fields": (("tools", "vision", "embeddings"),)}),
        ("This change", {"fields": ("why",)}),
    )
    readonly_fields = ("now", "running", "source_check")

    # --- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        return models_with_replicas()

    @admin.display(description="scaling", ordering="scaling_max")
    def scaling(self, model: Model) -> str:
        return scaling_words(spec_of(model).scaling, settings.LLMGW_IDLE_TIMEOUT)

    @admin.display(description="ready")
    def ready(self, model: Model) -> SafeString | str:
        counted = tally(model)
        if not counted.wanted and not counted.ready:
            return "-"
        look = "good" if counted.ready >= counted.wanted else "warn" if counted.ready else "bad"
        return badge(f"{counted.ready} of {counted.wanted}", look)

    @admin.display(description="stale")
    def stale(self, model: Model) -> SafeString | str:
        counted = tally(model)
        found = [badge(f"{counted.stale} stale", "warn")] if counted.stale else []
        if counted.mild:
            found += [badge(f"{counted.mild} stale"), said("no restart needed")]
        return format_html_join(" ", "{}", ((part,) for part in found)) or "-"

    @admin.display(description="source", ordering="source_state")
    def source_found(self, model: Model) -> SafeString:
        state = Model.Source(model.source_state)
        return badge(state.label.split(",")[0], SOURCE_LOOKS.get(state, ""))

    @admin.display(description="profiles")
    def profile_names(self, model: Model) -> str:
        return sentence(", ".join(profile.name for profile in model.profiles.all()))

    @admin.display(description="waits for")
    def waits_for(self, model: Model) -> SafeString | str:
        return said(model.unplaced.why, "problem") if hasattr(model, "unplaced") else "-"

    # --- the page of one model

    def get_fieldsets(self, request: HttpRequest, obj: Model | None = None) -> Any:
        if obj is None:
            return self.fieldsets[1:]
        if not self.has_change_permission(request, obj):
            return (self.fieldsets[0], ("As written", {"fields": ("written",)}))
        return self.fieldsets

    def get_inlines(self, request: HttpRequest, obj: Model | None) -> Any:
        return self.inlines if obj is None or self.has_change_permission(request, obj) else ()

    @admin.display(description="state")
    def now(self, model: Model) -> SafeString:
        words = sentence(self.scaling(model))
        if hasattr(model, "unplaced"):
            return format_html("{} {} {}", words, self.ready(model), said(model.unplaced.why, "problem"))
        return format_html("{} {}", words, self.ready(model))

    @admin.display(description="replicas")
    def running(self, model: Model) -> SafeString | str:
        rows = [
            (
                format_html('<a href="{}">{}</a>', reverse("admin:nodes_replica_change", args=[row.pk]), row),
                replica_badge(row),
                span_words(row.age.total_seconds()),
                ", ".join(rank.node.name for rank in row.ranks.all()),
                format_html("{}{}", stale_badge(row), said(staleness_of(row).sentence)),
                row.reason,
            )
            for row in replicas().filter(model=model).exclude(state__in=Replica.OVER)
        ]
        return table(("replica", "state", "for", "node", "differs", "reason"), rows) if rows else "none"

    @admin.display(description="source check")
    def source_check(self, model: Model) -> SafeString:
        parts = [self.source_found(model)]
        if model.source_sentence:
            parts.append(said(model.source_sentence))
        if model.source_skipped_by:
            parts.append(said(f"Kept on the word of {model.source_skipped_by}."))
        if model.source_revision:
            parts.append(said(f"Launches pin revision {model.source_revision}."))
        return format_html_join(" ", "{}", ((part,) for part in parts))

    @admin.display(description="model")
    def written(self, model: Model) -> SafeString:
        return as_json(hide_model(spec_of(model).as_text_dict()))

    # --- saving: through the verb, which refuses or does all of it

    def get_formset_kwargs(
        self, request: HttpRequest, obj: Model, inline: Any, prefix: str
    ) -> dict[str, Any]:
        shared = {"hides_secrets": not request.user.is_superuser}
        kwargs = super().get_formset_kwargs(request, obj, inline, prefix)
        return {**kwargs, "faults": getattr(request, "faults", ()), "form_kwargs": shared}

    def save_model(self, request: HttpRequest, obj: Model, form: Any, change: bool) -> None:
        """Nothing yet: the profiles are not known here."""

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        stored: Model | None = form.instance if change else None
        raw = form.raw(formsets[0].raws())
        said_with = {
            "by": request.user.get_username(),
            "why": form.cleaned_data["why"],
            "door": "admin",
            "skip_source_check": form.cleaned_data["skip_source_check"],
            "ask_paths": ask_paths,
            "after_change": wake,
        }
        if stored:
            outcome = actions.edit_model(stored.name, raw, **said_with)
        else:
            outcome = actions.add_model(raw, **said_with)
        form.instance.pk, form.instance.name = outcome.model.pk, outcome.model.name
        if outcome.finding.level != "ok" and outcome.finding.code != "recorded":
            messages.warning(request, sentence(outcome.finding.sentence))
        for warning in outcome.warnings:
            messages.warning(request, sentence(warning))

    def subject_of(self, model: Model) -> tuple[str, str]:
        return "model", model.name

    # --- removing

    def get_actions(self, request: HttpRequest) -> Any:
        return {
            name: known for name, known in super().get_actions(request).items() if name != "delete_selected"
        }

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        model = self.get_object(request, unquote(object_id))
        if model is None:
            raise Http404
        return self.remove(request, models_with_replicas().filter(pk=model.pk))

    @admin.action(description="Remove the selected models", permissions=["delete"])
    def remove(self, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
        if not self.has_delete_permission(request):
            raise PermissionDenied
        return self.confirm(
            request,
            queryset,
            action="remove",
            title="Remove models",
            question="Take these out of the catalog? Their replicas finish what they are doing and stop.",
            button="Yes, remove",
            done="removed",
            act=lambda model, **told: actions.remove_model(model.name, after_change=wake, **told),
            describe=_with_replicas,
        )


def _with_replicas(model: Model) -> str:
    alive = len(model.alive)  # type: ignore[attr-defined]  # prefetched
    return f"{model.name}: {alive} {'replica' if alive == 1 else 'replicas'} will stop"
