"""Models in the admin: the list that says what is wrong, and the page of one model with its profiles.

Pages read rows and call verbs; nothing here saves a row. A verb's refusal is shown on the same page, at the
fields it is about.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import F, Max, OuterRef, QuerySet, Subquery
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST, require_safe

from catalog import actions
from catalog.admin.benching import bench_page, bench_plots
from catalog.admin.doing import (
    check,
    check_engine,
    check_sources,
    commits,
    end_roll,
    pin,
    remove,
    roll,
    turn_off,
)
from catalog.admin.filters import AttentionFilter, EngineFilter, ScalingFilter
from catalog.admin.foretelling import Foretold, foretold
from catalog.admin.profiles import ProfileInline
from catalog.admin.stored import notes_of, will_run
from catalog.forms import ModelForm
from catalog.hiding import SEE_ENV, hide_model
from catalog.models import Model
from catalog.pages import VerbAdmin
from catalog.parts import LIMIT_KEYS, TIMEOUT_KEYS
from catalog.pieces import as_json, badge, difference_table, live, said, sentence, table
from catalog.reading import CatalogError
from catalog.typed import bounds_words, scaling_words, span_words
from nodes.agents import ask_paths
from nodes.models import Demand, Node, Replica
from nodes.outlook import why_of
from nodes.pieces import (
    engine_check_shown,
    nodes_shown,
    progress_bars,
    replica_badge,
    replica_link,
    rooms_shown,
    stale_badge,
)
from nodes.plots import model_figure
from nodes.showing import (
    check_of_model,
    differences_as_dicts,
    models_with_replicas,
    replicas_to_show,
    spec_of,
    staleness_of,
    tally,
)
from nodes.tasks import wake

_SOURCE_BADGES = {
    Model.Source.UNCHECKED: ("not checked", ""),
    Model.Source.OK: ("found", "good"),
    Model.Source.WARN: ("warning", "warn"),
    Model.Source.REFUSE: ("refused", "bad"),
}
_REPLICA_HEADINGS = ("replica", "state", "for", "node", "differs", "reason")
_REPLICA_LOOKS = ("", "brief", "brief", "brief", "", "")
_MESSAGE_LEVELS = {"ok": messages.SUCCESS, "warn": messages.WARNING, "refuse": messages.ERROR}


@admin.register(Model)
class ModelAdmin(VerbAdmin):
    form = ModelForm
    inlines = (ProfileInline,)
    list_display = ("name", "scaling", "ready", "stale", "source_found", "asked", "limits")
    list_filter = (AttentionFilter, ScalingFilter, EngineFilter, "source_state")
    search_fields = ("names__name", "source", "description")
    actions: ClassVar[list[Any]] = [check_sources, check_engine, pin, roll, end_roll, turn_off, remove]
    fieldsets = (
        ("Now", {"fields": ("now", "nodes_say", "running", "differences")}),
        ("Lately", {"fields": ("lately",)}),
        ("Engine check", {"fields": ("checked",)}),
        (None, {"fields": ("name", "aliases", "description")}),
        ("Source", {"fields": ("source", "source_check", "skip_source_check")}),
        (
            "Scaling",
            {"fields": (("scaling_min", "scaling_max", "idle_timeout"), "fallbacks", "routing_profile")},
        ),
        ("Lengths and promises", {"fields": (("context_length", "max_output"), ("ttft_p99", "tpot_p99"))}),
        ("Limits", {"fields": ((*LIMIT_KEYS, "over_max_output"),)}),
        ("Time-outs of its requests", {"fields": (TIMEOUT_KEYS,)}),
        ("Capabilities", {"fields": (("tools", "vision", "embeddings"),)}),
        ("What it will run", {"fields": ("will_run",), "classes": ("last",)}),
        ("This change", {"fields": ("why", "revision"), "classes": ("last",)}),
    )
    readonly_fields = (
        *("now", "nodes_say", "running", "differences", "lately", "checked"),
        *("source_check", "will_run"),
    )
    is_live = True

    # --- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        """With the database's clock, which ages are told by, and when each was last asked for."""
        asked = Demand.objects.filter(model=OuterRef("pk")).values("model")
        latest = asked.annotate(latest=Max("asked_at")).values("latest")
        return models_with_replicas().annotate(read_at=Now(), asked_at=Subquery(latest))

    @admin.display(description="scaling", ordering="scaling_max")
    def scaling(self, model: Model) -> str:
        return scaling_words(spec_of(model).scaling, settings.LLMGW_IDLE_TIMEOUT)

    @admin.display(description="limits")
    def limits(self, model: Model) -> str:
        return bounds_words(spec_of(model)) or "-"

    @admin.display(description="last asked for", ordering=F("asked_at").asc(nulls_first=True))
    def asked(self, model: Model) -> str:
        return _ago(model, model.asked_at)

    @admin.display(description="ready")
    def ready(self, model: Model) -> SafeString | str:
        counted = tally(model)
        if not counted.wanted and not counted.ready:
            return "-"
        look = "good" if counted.ready >= counted.wanted else "warn" if counted.ready else "bad"
        found = badge(f"{counted.ready} of {counted.wanted}", look)
        why = said(model.unplaced.why, "problem") if hasattr(model, "unplaced") else ""
        return format_html("{}{}", found, why)

    @admin.display(description="stale")
    def stale(self, model: Model) -> SafeString | str:
        counted = tally(model)
        found = [badge(f"{counted.stale} stale", "warn")] if counted.stale else []
        if counted.mild:
            found += [badge(f"{counted.mild} stale"), said("no restart needed")]
        if hasattr(model, "roll"):
            word, look = ("roll halted", "bad") if model.roll.halted else ("rolling", "busy")
            found.append(badge(word, look))
        return format_html_join(" ", "{}", ((part,) for part in found)) or "-"

    @admin.display(description="source", ordering=F("source_checked_at").asc(nulls_first=True))
    def source_found(self, model: Model) -> SafeString:
        found = badge(*_SOURCE_BADGES[Model.Source(model.source_state)])
        return format_html("{}{}", found, said(_ago(model, model.source_checked_at, never="")))

    # --- the page of one model

    def get_fieldsets(self, request: HttpRequest, obj: Model | None = None) -> Any:
        if obj is None:
            shown = [
                (
                    title,
                    {
                        **options,
                        "fields": [row for row in options["fields"] if row not in self.readonly_fields],
                    },
                )
                for title, options in self.fieldsets
            ]
            return [(title, options) for title, options in shown if options["fields"]]
        if not self.has_change_permission(request, obj):
            now = {"fields": (*self.fieldsets[0][1]["fields"], "source_check")}
            run = ("What it will run", {"fields": ("will_run",)})
            return (("Now", now), *self.fieldsets[1:3], ("As written", {"fields": ("written",)}), run)
        return self.fieldsets

    def get_inlines(self, request: HttpRequest, obj: Model | None) -> Any:
        return self.inlines if obj is None or self.has_change_permission(request, obj) else ()

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        model = context["original"]
        if model:
            context["unlawful"] = [sentence(fault.sentence) for fault in spec_of(model).faults_today()]
            context["has_moved_on"] = bool(commits([model]))
            context["has_roll"] = hasattr(model, "roll")
            is_rolling = context["has_roll"] and not model.roll.halted
            context["can_roll"] = bool(tally(model).stale) and not is_rolling
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description="state")
    def now(self, model: Model) -> SafeString:
        parts = [sentence(self.scaling(model)), self.stale(model), self.ready(model)]
        if hasattr(model, "roll"):
            why = f": {model.roll.why}" if model.roll.why else ""
            parts.append(said(model.roll.halted or f"Rolled by {model.roll.by}{why}."))
        parts.append(said(f"Last asked for: {self.asked(model)}."))
        told = format_html_join(" ", "{}", ((part,) for part in parts if part != "-"))
        return live("state", told)

    @admin.display(description="why")
    def nodes_say(self, model: Model) -> SafeString:
        """Asked for once it is open, as it takes a plan of the whole cluster: at once where that has news."""
        way, counted = reverse("admin:catalog_model_why", args=[model.pk]), tally(model)
        return format_html(
            '<details data-from="{}"{}><summary>Why it runs as it does, and what each node says</summary>'
            '<div><a href="{}">On a page of its own</a></div></details>',
            way,
            " open" if counted.ready < counted.wanted else "",
            way,
        )

    @admin.display(description="replicas")
    def running(self, model: Model) -> SafeString:
        rows = [
            (
                replica_link(row.pk, str(row)),
                replica_badge(row),
                span_words(row.age.total_seconds()),
                ", ".join(rank.node.name for rank in row.ranks.all()),
                format_html("{}{}", stale_badge(row), said(staleness_of(row).sentence)),
                format_html("{}{}", said(row.reason), progress_bars(row)),
            )
            for row in _replicas_of(model)
        ]
        shown = table(_REPLICA_HEADINGS, rows, _REPLICA_LOOKS) if rows else "none"
        return live("replicas", shown)

    @admin.display(description="what differs")
    def differences(self, model: Model) -> SafeString:
        """Field by field, once for all replicas that differ in the same."""
        alike: dict[str, tuple[list[dict[str, Any]], list[str]]] = {}
        for row in _replicas_of(model):
            found = staleness_of(row)
            fields = found.stale_fields + found.launch_fields
            if fields:
                told = differences_as_dicts(fields, sees_env=model.sees_env)
                alike.setdefault(repr(fields), (told, []))[1].append(str(row.pk)[:8])
        parts = [
            (sentence(f"{len(names)} of them: {', '.join(names)}"), difference_table(told))
            for told, names in alike.values()
        ]
        if parts:
            return live("differences", format_html_join("", '<h3 class="run">{}</h3>{}', parts))
        return live("differences", "nothing: each runs what is written here" if _replicas_of(model) else "-")

    @admin.display(description="plots")
    def lately(self, model: Model) -> SafeString:
        return model_figure(model.name)

    @admin.display(description="engine check")
    def checked(self, model: Model) -> SafeString:
        return engine_check_shown(check_of_model(model))

    def has_check_engine_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("nodes.add_job"))

    @admin.display(description="source check")
    def source_check(self, model: Model) -> SafeString:
        parts = [self.source_found(model)]
        if model.source_sentence:
            parts.append(said(model.source_sentence))
        parts += [said(also) for also in model.source_facts.get("also", ())]
        if model.source_skipped_by:
            parts.append(said(f"Kept on the word of {model.source_skipped_by}."))
        if model.source_revision:
            parts.append(said(f"Launches pin revision {model.source_revision}."))
        return format_html_join(" ", "{}", ((part,) for part in parts))

    @admin.display(description="model")
    def written(self, model: Model) -> SafeString:
        return as_json(hide_model(spec_of(model).as_text_dict(), sees_env=model.sees_env))

    @admin.display(description="profiles")
    def will_run(self, model: Model) -> SafeString:
        return will_run(model, sees_env=model.sees_env)

    # --- saving: through the verb, which refuses or does all of it, or tells what it would do

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> HttpResponse:
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except Foretold as trial:
            request.foretold = trial
            context = {**(extra_context or {}), **foretold(trial, sees_env=request.user.has_perm(SEE_ENV))}
            return super().changeform_view(request, object_id, form_url, context)

    def get_form(
        self, request: HttpRequest, obj: Model | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        form.seen = getattr(request, "seen", ())
        form.only_shows = hasattr(request, "foretold")
        form.notes = notes_of(obj).get("", {}) if obj else {}
        return form

    def get_formset_kwargs(
        self, request: HttpRequest, obj: Model, inline: Any, prefix: str
    ) -> dict[str, Any]:
        shared = {"sees_env": getattr(obj, "sees_env", False), "notes": notes_of(obj) if obj.pk else {}}
        kwargs = super().get_formset_kwargs(request, obj, inline, prefix)
        return {**kwargs, "faults": getattr(request, "faults", ()), "form_kwargs": shared}

    def save_model(self, request: HttpRequest, obj: Model, form: Any, change: bool) -> None:
        """Nothing yet: the profiles are not known here."""

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        stored: Model | None = form.instance if change else None
        raw = form.raw(formsets[0].raws())
        said_with = {
            "is_trial": "_foretell" in request.POST,
            "by": request.user.get_username(),
            "why": form.cleaned_data["why"],
            "door": "admin",
            "skip_source_check": form.cleaned_data["skip_source_check"],
            "ask_paths": ask_paths,
            "after_change": wake,
        }
        if stored:
            outcome = actions.edit_model(stored.name, raw, expected=form.expected, **said_with)
        else:
            outcome = actions.add_model(raw, **said_with)
        if outcome.trial:
            raise Foretold(stored.name if stored else outcome.model.name, outcome)
        form.instance.pk, form.instance.name = outcome.model.pk, outcome.model.name
        for warning in outcome.warnings:
            messages.warning(request, sentence(warning))

    def subject_of(self, model: Model) -> tuple[str, str, str]:
        return "model", str(model.pk), model.name

    # --- asking about the source again

    def get_urls(self) -> list[Any]:
        bench = self.admin_site.admin_view(self.bench_view)
        plots = self.admin_site.admin_view(require_safe(self.bench_plots_view))
        check = self.admin_site.admin_view(require_POST(self.check_view))
        why = self.admin_site.admin_view(require_safe(self.why_view))
        return [
            path("<path:object_id>/bench/", bench, name="catalog_model_bench"),
            path("<path:object_id>/bench/plots/", plots, name="catalog_model_bench_plots"),
            path("<path:object_id>/check/", check, name="catalog_model_check"),
            path("<path:object_id>/why/", why, name="catalog_model_why"),
            *super().get_urls(),
        ]

    def why_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Why the model does not run where or as wanted."""
        model = self.get_object(request, unquote(object_id))
        if model is None:
            return self.is_gone(request, object_id)
        if not self.has_view_or_change_permission(request, model):
            raise Http404
        why = why_of(model.name)
        context = {
            **self.admin_site.each_context(request),
            "title": f"Why {sentence(model.name)} runs as it does",
            "opts": self.opts,
            "original": model,
            "says": sentence(why.says),
            "amiss": [sentence(each.rstrip(".")) for each in (*why.amiss, *why.notes)],
            "rooms": rooms_shown(why),
            "by_node": nodes_shown(why, dict(Node.objects.values_list("name", "pk"))),
        }
        return TemplateResponse(request, "admin/catalog/model/why.html", context)

    def bench_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        model = self._seen(request, object_id)
        return self.is_gone(request, object_id) if model is None else bench_page(self, request, model)

    def bench_plots_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        model = self._seen(request, object_id)
        return self.is_gone(request, object_id) if model is None else bench_plots(model)

    def _seen(self, request: HttpRequest, object_id: str) -> Model | None:
        """The model, for whoever may look at it."""
        model: Model | None = self.get_object(request, unquote(object_id))
        if model is not None and not self.has_view_or_change_permission(request, model):
            raise Http404
        return model

    def check_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """ "Check now": asks, and comes back to the page with what was found."""
        model = self.get_object(request, unquote(object_id))
        if model is None:
            return self.is_gone(request, object_id)
        if not self.has_change_permission(request, model):
            raise PermissionDenied
        try:
            finding = check(model, by=request.user.get_username(), door="admin").finding
        except CatalogError as no:
            messages.error(request, sentence(str(no)))
        else:
            messages.add_message(request, _MESSAGE_LEVELS[finding.level], sentence(finding.sentence))
        return redirect("admin:catalog_model_change", model.pk)

    # --- removing

    def get_actions(self, request: HttpRequest) -> Any:
        return {
            name: known for name, known in super().get_actions(request).items() if name != "delete_selected"
        }

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        model = self.get_object(request, unquote(object_id))
        if model is None:
            return self.is_gone(request, object_id)
        return remove(self, request, models_with_replicas().filter(pk=model.pk))


def _replicas_of(model: Model) -> list[Replica]:
    """Those that its page shows, read once."""
    if "replicas_shown" not in model.__dict__:
        model.__dict__["replicas_shown"] = list(replicas_to_show(model))
    found: list[Replica] = model.__dict__["replicas_shown"]
    return found


def _ago(model: Model, moment: datetime | None, never: str = "never") -> str:
    return f"{span_words((model.read_at - moment).total_seconds())} ago" if moment else never
