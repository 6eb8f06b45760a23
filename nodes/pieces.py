"""How replicas and nodes look on the admin's pages, the catalog's included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.pieces import badge, said, sentence, table
from catalog.typed import span_words
from nodes import agenda, telling
from nodes.attention import FRESHNESS_LOOKS, Matter
from nodes.checks import Verdict
from nodes.consequences import Consequences
from nodes.measured import STEP_HEADINGS, step_line
from nodes.models import Job, Node, Replica, Weights
from nodes.overview import Fact, Overview, facts_of
from nodes.placement import agreeing
from nodes.progress import Progress
from nodes.showing import (
    Checked,
    GpuUse,
    freshness_of,
    kept_free_words,
    progress_of,
    running_on,
    staleness_of,
)
from nodes.why import Why

NAMES_SHOWN = 12
_STATE_LOOKS = {
    Replica.State.READY: "good",
    Replica.State.FETCHING: "busy",
    Replica.State.STARTING: "busy",
    Replica.State.DRAINING: "busy",
    Replica.State.FAILED: "bad",
    Replica.State.LOST: "bad",
}
_GPU_LOOKS = {
    GpuUse.FREE: "good",
    GpuUse.REPLICA: "busy",
    GpuUse.ORPHAN: "warn",
    GpuUse.FOREIGN: "warn",
    GpuUse.SICK: "bad",
}
_BUCKET_LOOKS = {
    agenda.START: "good",
    agenda.ADOPT: "good",
    agenda.ROLLED: "good",
    agenda.DRAIN: "busy",
    agenda.STOP: "busy",
    agenda.EVICT: "busy",
    agenda.HELD: "warn",
    agenda.ORPHAN: "warn",
    agenda.BLOCKED: "bad",
    agenda.LOST: "bad",
    agenda.HALTED: "bad",
}
_WEIGHTS_LOOKS: dict[str, str] = {
    Weights.State.HELD: "good",
    Weights.State.FETCHING: "busy",
    Weights.State.PARTIAL: "warn",
}
_JOB_LOOKS: dict[str, str] = {
    Job.State.RUNNING: "busy",
    Job.State.DONE: "good",
    Job.State.FAILED: "bad",
    Job.State.STOPPED: "warn",
}
_PAGES = {
    "model": "catalog_model",
    "node": "nodes_node",
    "orphan": "nodes_orphan",
    "reconciler": "nodes_cluster",
    "replica": "nodes_replica",
    "usage": "nodes_usage",
}
_VERDICT_LOOKS: dict[Verdict, str] = {
    Verdict.VERIFIED: "good",
    Verdict.FAILED: "bad",
    Verdict.BONUS: "",
    Verdict.ABSENT: "",
    Verdict.UNCLEAR: "warn",
    Verdict.NEVER: "",
    Verdict.NOT_APPLICABLE: "",
}


def replica_badge(replica: Replica) -> SafeString:
    return badge(replica.state, _STATE_LOOKS.get(Replica.State(replica.state), ""))


def stale_badge(replica: Replica) -> SafeString | str:
    """Amber where a restart would change what runs, grey where it would not, nothing without a difference."""
    found = staleness_of(replica)
    if not found.word:
        return ""
    look = "warn" if found.restart_needed else ""
    return format_html_join(" ", "{}", ((badge(word, look),) for word in found.word.split(", ")))


def freshness_badge(node: Node) -> SafeString:
    found = freshness_of(node)
    return badge(found, FRESHNESS_LOOKS.get(found, ""))


def kept_free_badge(node: Node) -> SafeString:
    """Of a row of `nodes()`: whether operators keep things off it, and how much is to leave yet."""
    words = kept_free_words(node, len(running_on(node)))
    return badge(words, "warn") if words else SafeString("")


def check_badges(found: Checked) -> SafeString:
    """What an engine check says, a badge each; grey what is older than its profile."""
    looks = ((each.says, "" if each.is_older else _VERDICT_LOOKS[each.verdict]) for each in found.badges)
    return format_html_join(" ", "{}", ((badge(says, look),) for says, look in looks))


def engine_check_shown(found: Checked) -> SafeString:
    """Its badges, and all of its findings behind them."""
    if found.row is None:
        return check_badges(found)
    when = said(
        f"Of {found.row.profile_name or 'an unknown profile'} on "
        f"{found.found.engine if found.found else found.row.engine}, {found.row.gpu or 'no GPU'}."
    )
    return format_html(
        '{}{}<details><summary>All findings</summary>{}<p><a href="{}">The job</a></p></details>',
        check_badges(found),
        when,
        verdict_table(found.verdicts),
        reverse("admin:nodes_job_change", args=[found.row.job]),
    )


def steps_table(steps: Iterable[Mapping[str, Any]]) -> SafeString:
    """Load by load, what a bench has seen; empty where there is none yet."""
    lines = [[sentence(str(each)) or "-" for each in step_line(step)] for step in steps]
    return table(STEP_HEADINGS, lines) if lines else SafeString("")


def verdict_table(rows: Iterable[tuple[str, str, str, str]]) -> SafeString:
    """Check, whether it is claimed, verdict and why."""
    cells = [
        (check, claimed, badge(verdict, _VERDICT_LOOKS[Verdict(verdict)]), says)
        for check, claimed, verdict, says in rows
    ]
    return table(("check", "claimed", "verdict", "what it does"), cells, ("brief", "brief", "brief", ""))


def job_badge(job: Job) -> SafeString:
    is_stopping = job.state == Job.State.RUNNING and job.stop_asked_at
    return badge("stopping" if is_stopping else job.state, _JOB_LOOKS.get(job.state, ""))


def weights_badge(row: Weights) -> SafeString:
    return badge(row.state, _WEIGHTS_LOOKS.get(row.state, ""))


def progress_bar(found: Progress) -> SafeString:
    """With its words beside it."""
    return format_html(
        '<progress max="{}" value="{}" aria-label="{}"></progress>{}',
        found.total,
        found.done,
        found.words,
        said(found.words),
    )


def progress_bars(replica: Replica) -> SafeString:
    """Of a row of `replicas()`: how far it is with what it does now; nothing where it does nothing such."""
    return format_html_join("", "{}", ((progress_bar(each),) for each in progress_of(replica)))


def gpu_badge(use: GpuUse) -> SafeString:
    return badge(use, _GPU_LOOKS[use])


def matter_row(matter: Matter) -> tuple[SafeString, SafeString, SafeString]:
    """A badge, a link to what it is about, and why."""
    page = _PAGES[matter.kind]
    where = (
        reverse(f"admin:{page}_change", args=[matter.key])
        if matter.key
        else reverse(f"admin:{page}_changelist")
    )
    link = format_html('<a href="{}{}">{}</a>', where, matter.query, sentence(matter.subject))
    return badge(matter.word, matter.look), link, said(matter.why)


def overview_shown(seen: Overview) -> dict[str, Any]:
    """What the first page's template is given."""
    return {
        "needs": _matters(seen.needs),
        "under_way": _matters(seen.under_way),
        "facts": [(fact.name, _parts(fact)) for fact in facts_of(seen)],
        "events": _happened(seen) if seen.events else "",
        "sees_traffic": seen.traffic is not None,
    }


def _matters(found: tuple[Matter, ...]) -> SafeString | str:
    return table(("state", "what", "why"), map(matter_row, found)) if found else ""


def _parts(fact: Fact) -> SafeString:
    """Each a badge that leads to the rows it counts."""
    where = reverse(f"admin:{_PAGES[fact.kind]}_changelist")
    parts = ((where, part.query, badge(part.words, part.look)) for part in fact.parts)
    return format_html_join(" ", '<a href="{}{}">{}</a>', parts)


def _happened(seen: Overview) -> SafeString:
    rows = [
        (
            f"{span_words((seen.at - each.at).total_seconds())} ago",
            format_html(
                '<a href="{}">{}</a>',
                reverse("admin:catalog_event_change", args=[each.key]),
                sentence(each.did),
            ),
            each.by or "llmgw",
            said(each.why),
        )
        for each in seen.events or ()
    ]
    return table(("when", "did", "who", "why"), rows, ("brief", "", "brief", ""))


def replica_link(pk: Any, text: str) -> SafeString:
    return format_html(
        '<a href="{}">{}</a>', reverse("admin:nodes_replica_change", args=[pk]), sentence(text)
    )


def node_link(node: Node) -> SafeString:
    return format_html(
        '<a href="{}">{}</a>', reverse("admin:nodes_node_change", args=[node.pk]), sentence(node.name)
    )


def item_row(item: agenda.Item) -> tuple[Any, ...]:
    """A line of a plan, for a table under the headings of `telling`."""
    what, subject, place, why = telling.item_row(item)
    return badge(what, _BUCKET_LOOKS[item.bucket]), subject, place, said(why)


def consequences_shown(found: Consequences) -> SafeString | str:
    """What a change would bring about."""
    parts = [
        (says, table(headings, rows)) for says, headings, rows in telling.consequences_tables(found, item_row)
    ]
    return format_html_join("", '<h3 class="run">{}</h3>{}', parts) or telling.NO_CONSEQUENCES


def rooms_shown(why: Why) -> SafeString:
    """What every node says to each profile, a line for each thing that is said."""
    rows = []
    for profile, by_node in why.reasons.items():
        nodes: dict[str, list[str]] = {}
        for node, reason in sorted(by_node.items()):
            nodes.setdefault(reason, []).append(node)
        for reason, names in sorted(nodes.items(), key=lambda entry: (entry[0] != "", -len(entry[1]))):
            word = agreeing(reason, len(names)) or badge(telling.ROOM, "good")
            rows.append((profile, len(names), word, _named(names)))
    return table(("profile", "nodes", "say", "which"), rows)


def _named(names: list[str]) -> SafeString | str:
    """All of them; many fold out."""
    told = ", ".join(names)
    if len(names) <= NAMES_SHOWN:
        return told
    first = f"{', '.join(names[:NAMES_SHOWN])} and {len(names) - NAMES_SHOWN} more"
    return format_html("<details><summary>{}</summary>{}</details>", sentence(first), sentence(told))


def nodes_shown(why: Why, keys: Mapping[str, int]) -> SafeString:
    """Node by node: what each says to each profile. `keys` are the nodes' rows, by name."""
    names = sorted({node for by_node in why.reasons.values() for node in by_node})
    rows = [
        (
            format_html(
                '<a href="{}">{}</a>', reverse("admin:nodes_node_change", args=[keys[name]]), sentence(name)
            )
            if name in keys
            else name,
            *(_says(by_node.get(name)) for by_node in why.reasons.values()),
        )
        for name in names
    ]
    return table(("node", *map(sentence, why.reasons)), rows)


def _says(reason: str | None) -> SafeString | str:
    if reason is None:
        return "-"
    return agreeing(reason, 1) or badge(telling.ROOM, "good")
