"""Jobs in the admin: who asked for what, how far it is, and what came of it."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from catalog.pieces import as_json, said, sentence
from catalog.typed import span_words
from nodes import jobs
from nodes.admin.reading import ReadOnlyAdmin
from nodes.checks import CHECKS
from nodes.models import Job
from nodes.pieces import job_badge, replica_link, steps_table, verdict_table


def _verdicts(findings: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """As they were held against what was claimed at that time."""
    words = {True: "yes", False: "no", None: ""}
    return [
        (CHECKS[each["check"]], words[each["claimed"]], each["verdict"], each["says"]) for each in findings
    ]


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin):
    list_display = ("job", "state_shown", "progress_shown", "by_shown", "asked_at", "lasted", "note")
    list_filter = ("kind", "state")
    search_fields = ("id", "model_name", "by", "problem")
    fields = (
        "model_shown", "state_shown", "progress_shown", "note", "by_shown", "why_shown", "asked_at", "lasted",
        "about", "replica_shown", "options_shown", "result_shown",
    )  # fmt: skip
    actions: ClassVar[list[Any]] = ["stop"]
    is_live = True

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        return jobs.jobs()

    def subject_of(self, job: Job) -> tuple[str, str, str]:
        """Events name the model: a job has no life without one."""
        return "model", str(job.model_id or ""), job.model_name

    @admin.display(description="job", ordering="kind")
    def job(self, job: Job) -> str:
        return sentence(str(job))

    @admin.display(description="model")
    def model_shown(self, job: Job) -> SafeString | str:
        if job.model_id is None:
            return sentence(job.model_name)
        return format_html(
            '<a href="{}">{}</a>',
            reverse("admin:catalog_model_change", args=[job.model_id]),
            sentence(job.model_name),
        )

    @admin.display(description="state", ordering="state")
    def state_shown(self, job: Job) -> SafeString:
        return job_badge(job)

    @admin.display(description="progress")
    def progress_shown(self, job: Job) -> SafeString | str:
        part, says = job.progress.get("part"), jobs.says_of(job)
        if job.state != Job.State.RUNNING or not isinstance(part, int | float):
            return said(says) if says else "-"
        return format_html('<progress max="1" value="{}"></progress>{}', f"{part:.3f}", said(says))

    @admin.display(description="asked for by", ordering="by")
    def by_shown(self, job: Job) -> str:
        return sentence(job.by)

    @admin.display(description="because")
    def why_shown(self, job: Job) -> str:
        return sentence(job.why) or "-"

    @admin.display(description="lasted")
    def lasted(self, job: Job) -> str:
        lasted = job.lasted  # type: ignore[attr-defined]  # annotated
        return "-" if lasted is None else span_words(lasted.total_seconds())

    @admin.display(description="note")
    def note(self, job: Job) -> SafeString | str:
        if not job.problem:
            return "-"
        return said(job.problem, "problem" if job.state == Job.State.FAILED else "")

    @admin.display(description="done to")
    def about(self, job: Job) -> str:
        words = (f"{job.engine} {job.engine_version}".strip(), job.gpu, job.fingerprint)
        return sentence(", ".join(filter(None, words))) or "not known yet"

    @admin.display(description="replica")
    def replica_shown(self, job: Job) -> SafeString | str:
        return replica_link(job.replica, str(job.replica)) if job.replica else "any that is ready"

    @admin.display(description="asked with")
    def options_shown(self, job: Job) -> SafeString | str:
        return as_json(job.options) if job.options else "-"

    @admin.display(description="result")
    def result_shown(self, job: Job) -> SafeString | str:
        if job.kind == Job.Kind.ENGINE_CHECK and isinstance(findings := job.result.get("findings"), list):
            return verdict_table(_verdicts(findings))
        if job.kind == Job.Kind.BENCH and job.model_id and (steps := job.result.get("steps")):
            way = reverse("admin:catalog_model_bench", args=[job.model_id])
            return format_html('{}<p><a href="{}">Beside other runs</a></p>', steps_table(steps), way)
        return as_json(job.result) if job.result else "-"

    @admin.action(description="Stop the selected jobs", permissions=["change"])
    def stop(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="stop",
            title="Stop jobs",
            question="Stop these? What they have found until now is kept with them.",
            button="Yes, stop",
            done="told to stop",
            act=lambda job, **told: jobs.stop(job.pk, **told),
        )
