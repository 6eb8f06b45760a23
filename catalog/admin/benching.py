"""The page of a model's benches: one is asked for, runs stand side by side, and weights follow from them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from catalog.durations import format_duration
from catalog.models import Model
from catalog.pages import VerbAdmin
from catalog.pieces import said, sentence, table
from catalog.reading import CatalogError
from nodes.agents import ask_paths
from nodes.bench import DISTRIBUTIONS, GATEWAY, Options
from nodes.benching import apply_weights, ask_bench, proposed, replica_named
from nodes.measured import HEADINGS, curves_of, ready_ranks, run_line, runs_of
from nodes.models import Job
from nodes.pieces import job_badge, steps_table
from nodes.tasks import offer, wake

_USUAL = Options().as_dict()
_OF_OPTIONS = (
    *("distribution", "prompt_tokens", "output_tokens", "spread", "shared_prefix", "seed"),
    *("start_rate", "max_rate", "step", "ttft_p99", "tpot_p99"),
)


class LoadForm(forms.Form):
    """How the load is made. What it may be is judged by the verb; what is left out is as usual."""

    at = forms.ChoiceField(label="Ask")
    distribution = forms.ChoiceField(label="Lengths", choices=[(each, each) for each in DISTRIBUTIONS])
    prompt_tokens = forms.IntegerField(label="Tokens of a prompt", required=False)
    output_tokens = forms.IntegerField(label="Tokens of an answer", required=False)
    spread = forms.FloatField(label="Spread of lengths", required=False, help_text="as a part of their mean")
    shared_prefix = forms.FloatField(
        label="Shared prefix", required=False, help_text="of each prompt, from 0 to 1"
    )
    ttft_p99 = forms.CharField(label="TTFT p99 to hold", required=False, max_length=40)
    tpot_p99 = forms.CharField(label="TPOT p99 to hold", required=False, max_length=40)
    start_rate = forms.FloatField(label="First load", required=False, help_text="requests a second")
    max_rate = forms.FloatField(label="Highest load", required=False, help_text="requests a second")
    step = forms.CharField(label="Each load for", required=False, max_length=40)
    seed = forms.IntegerField(label="Seed", required=False)
    why = forms.CharField(label="Why, for the history", required=False, max_length=1000)

    def __init__(self, model: Model, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        places = [("", "a ready replica")]
        if model.profiles.count() > 1:
            places += [
                (f"profile:{each.name}", f"a replica of {sentence(each.name)}")
                for each in model.spec.profiles
            ]
        places += [
            (f"replica:{rank.replica_id}", f"{sentence(str(rank.replica))} on {sentence(rank.node.name)}")
            for rank in ready_ranks(model)
        ]
        at = self.fields["at"]
        assert isinstance(at, forms.ChoiceField)
        at.choices, at.required = [*places, (GATEWAY, "the gateway, as clients do")], False
        slo = model.spec.slo
        for name, own_ns in (("ttft_p99", slo.ttft_p99), ("tpot_p99", slo.tpot_p99)):
            self.fields[name].widget.attrs["placeholder"] = (
                format_duration(own_ns) if own_ns else "not promised"
            )
        for name in _OF_OPTIONS:
            self.fields[name].initial = _USUAL.get(name, "")

    @property
    def options(self) -> dict[str, Any]:
        given = {name: self.cleaned_data[name] for name in _OF_OPTIONS}
        told = {name: value for name, value in given.items() if value not in (None, "")}
        return told | ({"through": GATEWAY} if self.cleaned_data["at"] == GATEWAY else {})

    @property
    def place(self) -> dict[str, Any]:
        kind, _, name = self.cleaned_data["at"].partition(":")
        if kind == "replica":
            return {"replica": replica_named(name)}
        return {"profile": name} if kind == "profile" else {}


def bench_page(page: VerbAdmin, request: HttpRequest, model: Model) -> HttpResponse:
    """Asked for by POST, by whoever may ask for jobs; its weights are set by whoever may change the model.
    Everybody else who sees it may look."""
    may_ask = request.user.has_perm("nodes.add_job")
    may_change = page.has_change_permission(request, model)
    form = LoadForm(model)
    if request.method == "POST":
        if not (may_change if "apply" in request.POST else may_ask):
            raise PermissionDenied
        if "apply" in request.POST:
            _apply(request, model)
            return redirect("admin:catalog_model_bench", model.pk)
        form = LoadForm(model, request.POST)
        if form.is_valid() and _is_asked(request, model, form):
            return redirect("admin:catalog_model_bench", model.pk)
    live = Job.objects.filter(model=model, kind=Job.Kind.BENCH, state__in=Job.LIVE).first()
    runs = runs_of(model.name)
    context = {
        **page.admin_site.each_context(request),
        "title": f"Bench of {sentence(model.name)}",
        "opts": page.opts,
        "original": model,
        "media": page.media,
        "form": form if may_ask else None,
        "running": live and _running(live),
        "runs": table(HEADINGS, [_run_row(each) for each in runs]) if runs else "",
        "latest": [_steps_of(each) for each in runs[:1]],
        "plots": reverse("admin:catalog_model_bench_plots", args=[model.pk]),
        "has_curves": any(each.result.get("steps") for each in runs),
        **_weights(model, may_change=may_change),
    }
    return TemplateResponse(request, "admin/catalog/model/bench.html", context)


def bench_plots(model: Model) -> HttpResponse:
    return JsonResponse(curves_of(model.name, model.spec.slo))


def _is_asked(request: HttpRequest, model: Model, form: LoadForm) -> bool:
    """Whether the bench is queued; what is in the way stands at its field otherwise."""
    try:
        job = ask_bench(
            model,
            form.options,
            **form.place,
            by=request.user.get_username(),
            why=form.cleaned_data["why"],
            door="admin",
        )
    except CatalogError as no:
        for fault in no.faults:
            form.add_error(fault.field if fault.field in form.fields else None, sentence(fault.sentence))
        return False
    offer(job)
    messages.success(request, "The bench is asked for; a worker begins it in a moment.")
    return True


def _apply(request: HttpRequest, model: Model) -> None:
    said_with = {"by": request.user.get_username(), "why": request.POST.get("why", ""), "door": "admin"}
    try:
        found, weighing = proposed(model.name)
        if request.POST["apply"] != _sign(found, weighing.changes):
            messages.warning(request, "The model or what was measured has changed; look again.")
            return
        apply_weights(found, weighing, **said_with, ask_paths=ask_paths, after_change=wake)
    except CatalogError as no:
        messages.error(request, sentence(str(no)))
    else:
        messages.success(request, "The weights are set; requests follow at once.")


def _sign(model: Model, changes: Any) -> str:
    """What was shown, so that nothing else is applied."""
    return f"{model.revision}:" + ",".join(f"{each.profile}={each.weight:g}" for each in changes)


def _weights(model: Model, *, may_change: bool) -> dict[str, Any]:
    found, weighing = proposed(model.name)
    if not weighing.proposals:
        return {"weights_say": sentence(weighing.says)}
    rows = [
        (
            sentence(each.profile),
            sentence(each.gpu_class) or "-",
            f"{each.rate:.3g}",
            f"{each.was:g}",
            f"{each.weight:g}" if each.is_change else "as it is",
        )
        for each in weighing.proposals
    ]
    shown = table(("profile", "GPU class", "held, req/s", "weight", "proposed"), rows)
    sign = _sign(found, weighing.changes) if may_change and weighing.changes else ""
    return {"weights": shown, "apply": sign}


def _running(job: Job) -> SafeString:
    way = reverse("admin:nodes_job_change", args=[job.pk])
    part = job.progress.get("part")
    numbers = [f"{job.progress[key]} {word}" for key, word in _NUMBERS if job.progress.get(key) is not None]
    return format_html(
        '<p>{} <progress max="1" value="{}" aria-label="how far it is"></progress> '
        '{}. <a href="{}">The job, and how to stop it</a></p>',
        job_badge(job),
        f"{part:.3f}" if isinstance(part, int | float) else "0",
        sentence("; ".join([str(job.progress.get("say") or "waits for a worker"), *numbers])),
        way,
    )


_NUMBERS = (("answered", "answered"), ("open", "open"), ("failed", "failed"), ("ttft_p99_ms", "ms TTFT p99"))


def _run_row(job: Job) -> list[Any]:
    cells: list[Any] = [sentence(str(each)) or "-" for each in run_line(job)]
    way = reverse("admin:nodes_job_change", args=[job.pk])
    cells[0] = format_html('<a href="{}">{}</a>', way, cells[0])
    cells[2] = job_badge(job)
    return cells


def _steps_of(job: Job) -> tuple[SafeString, SafeString]:
    """What the latest found, and each load that it tried."""
    says = said(str(job.result.get("says") or job.problem))
    return says, steps_table(job.result.get("steps", ()))
