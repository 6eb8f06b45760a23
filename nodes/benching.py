"""Benches: asked for, carried out at a replica or through the gateway, and what follows of them applied.

A bench finds the highest load at which the model's promise holds. It is a job, so that a worker or a shell
carries it out, with its progress on the row. Whatever ends it, nothing of it goes on: requests are cut off
with their connections, and the key that a bench of the gateway uses is revoked, of one that was killed as
soon as it is missed (`jobs.sweep`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction

from catalog.actions import AfterChange, AskPaths, Outcome, find_model, mint_key, patch_model
from catalog.durations import HOUR
from catalog.models import Key, Model
from catalog.reading import CatalogError, quote
from catalog.spec import ProfileSpec
from nodes.agents import last_report
from nodes.bench.asks import Row
from nodes.bench.options import DIRECTLY, GATEWAY, Options, load_of
from nodes.bench.weighing import Weighing, build_of
from nodes.conversation import cluster_keys
from nodes.generator import Aim, Generator
from nodes.jobs import JobFailed, JobRefused, Report, ask, describe, end_key, keep_key, without_model
from nodes.measured import ready_ranks, weighing_of
from nodes.models import Job, Rank
from nodes.origins import engine_url
from nodes.protocol import ClusterKey
from nodes.stale import launch_from
from nodes.stepping import Run

KEY_LIVES_NS = 4 * HOUR


def ask_bench(
    model: Model,
    raw: object,
    *,
    replica: uuid.UUID | None = None,
    profile: str = "",
    address: str = "",
    rows: Sequence[Row] = (),
    by: str,
    why: str = "",
    door: str,
) -> Job:
    """The bench, queued. `replica` or `profile` say where; left out, a ready replica is taken, sooner one of
    a profile that was not measured yet. `address`: of the gateway, where a shell knows a better one than the
    settings. `rows`: of the dataset that the options name, from a shell that carries the bench out itself.
    Raises CatalogError, whose sentence says what is in the way."""
    options = Options.load(raw)
    _judge(model, options)
    _check_dataset(model.name, options, rows)
    ranks = ready_ranks(model)
    if options.through == GATEWAY:
        if replica or profile:
            raise JobRefused(
                "Through the gateway requests go to any replica; leave out the replica and the profile, or "
                "bench directly.",
                field="through",
            )
        _check_address(address or settings.LLMGW_GATEWAY_URL)
        _owner(by)
    found = _chosen(model, ranks, replica, profile)
    _check_context(model, found, options, rows)
    kept = options.as_dict() | ({"address": address} if address else {})
    at = None if options.through == GATEWAY else found.replica_id
    return ask(Job.Kind.BENCH, model, replica=at, options=kept, by=by, why=why, door=door)


def carry_out(job: Job, report: Report, *, rows: Sequence[Row] = ()) -> Mapping[str, Any]:
    """What the bench found, as JSON. `rows`: of the dataset that its options name. Raises JobFailed and
    JobStopped, with what was found until then."""
    if job.model is None:
        raise JobFailed(without_model(job.model_name))
    options = load_of(job.options)
    ranks = ready_ranks(job.model)
    try:
        _check_dataset(job.model.name, options, rows)
        rank = _chosen(job.model, ranks, job.replica, "")
    except JobRefused as no:
        raise JobFailed(str(no)) from None
    head = _described(job, options, rank, len(ranks))
    with ExitStack() as stack:
        try:
            aim, name = stack.enter_context(_aim(job, options, rank))
        except CatalogError as no:  # there can be no key for it
            raise JobFailed(str(no)) from None
        generator = stack.enter_context(Generator(aim))
        return Run(job, report, options, rows, generator, name, head).run()


def apply_weights(
    model: Model,
    weighing: Weighing,
    *,
    by: str,
    why: str,
    door: str,
    ask_paths: AskPaths,
    after_change: AfterChange,
) -> Outcome | None:
    """Give the model's profiles the weights that were shown. None: they have them. Raises CatalogError where
    the model has changed since it was read, and JobRefused where there is nothing to give."""
    if not weighing.proposals:
        raise JobRefused(weighing.says)
    weights = {each.profile: each.weight for each in weighing.changes}
    if not weights:
        return None
    profiles = [
        profile.as_text_dict() | ({"weight": weights[profile.name]} if profile.name in weights else {})
        for profile in model.spec.profiles
    ]
    return patch_model(
        model.name,
        {"profiles": profiles},
        expected=model.revision,
        by=by,
        why=why or "measured by bench",
        door=door,
        ask_paths=ask_paths,
        after_change=after_change,
    )


def proposed(name: str) -> tuple[Model, Weighing]:
    """The model as it is, and the weights that follow from what was measured. Raises CatalogError."""
    model = find_model(name)
    return model, weighing_of(model)


def replica_named(text: str) -> uuid.UUID:
    """Raises JobRefused."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise JobRefused(
            f"{quote(text)} is no replica's id; manage.py replicas and GET /api/replicas tell them.",
            field="replica",
        ) from None


# --- may it be? -----------------------------------------------------------------------------------


def _judge(model: Model, options: Options) -> None:
    spec, name = model.spec, quote(model.name)
    if not spec.scaling.max:
        raise JobRefused(
            f"The model {name} is off, so nothing of it runs; turn it on (manage.py model_edit {model.name} "
            "--max 1), then bench it.",
            code="off",
        )
    if spec.capabilities.embeddings:
        raise JobRefused(
            f"The model {name} makes embeddings, and a bench measures how chats are streamed; choose another."
        )
    promise = options.promise(spec.slo)
    if not (promise.ttft_s or promise.tpot_s):
        raise JobRefused(
            f"The model {name} promises nothing that could be held; give it an SLO (manage.py model_edit "
            f"{model.name} --ttft-p99 1s --tpot-p99 50ms), or the bench one with the same options.",
            field="ttft_p99",
            code="required",
        )


def _chosen(model: Model, ranks: Sequence[Rank], replica: uuid.UUID | None, profile: str) -> Rank:
    """The rank to measure. Raises JobRefused."""
    name = quote(model.name)
    if replica is not None:
        for rank in ranks:
            if rank.replica_id == replica:
                return rank
        raise JobRefused(
            f"The replica {str(replica)[:8]} of {name} is not ready; manage.py replicas tells which are.",
            field="replica",
            code="not_ready",
        )
    if profile and all(each.name != profile for each in model.spec.profiles):
        names = ", ".join(each.name for each in model.spec.profiles)
        raise JobRefused(
            f"The model {name} has no profile {quote(profile)}; choose among {names}.",
            field="profile",
            code="unknown",
        )
    fit = [rank for rank in ranks if profile in ("", rank.replica.profile_name)]
    if not fit:
        whose = f"profile {quote(profile)} of {name}" if profile else f"{name}"
        raise JobRefused(
            f"No replica of {whose} is ready; manage.py why {model.name} tells what is in the way.",
            code="not_ready",
        )
    measured = {each.profile for each in weighing_of(model).proposals}
    return next((rank for rank in fit if rank.replica.profile_name not in measured), fit[0])


def _check_dataset(name: str, options: Options, rows: Sequence[Row]) -> None:
    """Raises JobRefused where the options name a dataset that whoever carries the bench out does not have."""
    if options.dataset and not rows:
        raise JobRefused(
            f"The dataset {quote(options.dataset)} is read by the shell that carries the bench out, and by "
            f"no worker; bench from a shell where it is (manage.py bench {name} --dataset FILE), or leave it "
            "out.",
            field="dataset",
        )


def _check_context(model: Model, rank: Rank, options: Options, rows: Sequence[Row]) -> None:
    """Raises JobRefused where an engine would refuse what it is to be asked, whatever the load."""
    context_length = rank.context_length or model.spec.context_length
    usual = Row(options.prompt_tokens, options.output_tokens)
    largest = max(rows or (usual,), key=lambda row: row.prompt_tokens + row.output_tokens)
    if not 0 < context_length < largest.prompt_tokens + largest.output_tokens:
        return
    asked = f"a prompt of {largest.prompt_tokens} tokens and an answer of {largest.output_tokens}"
    if not largest.prompt_tokens:  # its messages have as many as the engine counts
        asked = f"an answer of {largest.output_tokens} tokens"
    raise JobRefused(
        f"The context of {quote(model.name)} is {context_length} tokens, which has no room for {asked}; "
        + (f"leave such rows out of the dataset {quote(options.dataset)}." if rows else "ask for fewer."),
        field="dataset" if rows else "prompt_tokens",
        code="range",
    )


def _check_address(address: str) -> None:
    if not address:
        raise JobRefused(
            "Where the gateway listens is not known; set LLMGW_GATEWAY_URL, or give --gateway-url.",
            field="through",
            code="required",
        )
    try:
        parts = urlsplit(address)
        is_fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_fit = is_fit and not (parts.username or parts.password)
    except ValueError:  # of its brackets, or of its port
        is_fit = False
    if not is_fit:
        raise JobRefused(
            f"{quote(address)} is no address of a gateway; give one such as http://127.0.0.1:8000.",
            field="address",
        )


# --- what it is done to ---------------------------------------------------------------------------


def _described(job: Job, options: Options, rank: Rank, count: int) -> dict[str, Any]:
    """What the result begins with; the row is told of it at once."""
    replica = rank.replica
    launch = launch_from(replica.launch)
    node = last_report(rank.node)
    try:
        profile = None if launch is None else ProfileSpec.load(launch.profile)
    except CatalogError:  # what an older release wrote
        profile = None
    engine = profile.engine if profile is not None else ""
    versions = {each.name: each.version for each in node.engines} if node is not None else {}
    describe(
        job.pk,
        fingerprint=replica.fingerprint,
        engine=engine,
        engine_version=versions.get(engine) or "",
        gpu=_gpu_words(rank),
    )
    assert job.model is not None
    promise = options.promise(job.model.spec.slo)
    is_direct = options.through == DIRECTLY
    return {
        "through": options.through,
        "replica": str(replica.pk) if is_direct else None,
        "replicas": 1 if is_direct else count,
        "node": rank.node.name if is_direct else None,
        "profile": replica.profile_name if is_direct else None,
        "gpu_class": profile.gpu_class if profile is not None else "",
        "build": build_of(profile) if profile is not None else "",
        "promise": {
            "ttft_p99_ms": round(promise.ttft_s * 1_000, 3),
            "tpot_p99_ms": round(promise.tpot_s * 1_000, 3),
        },
        "seed": options.seed,
    }


def _gpu_words(rank: Rank) -> str:
    """Such as `2 x NVIDIA L4`: those of all ranks, named as the first one's node names its own."""
    report = last_report(rank.node)
    names = {gpu.id: gpu.name or gpu.gpu_class for gpu in report.gpus} if report is not None else {}
    count = sum(each.claims.count() for each in rank.replica.ranks.all())
    name = next((names[claim.gpu] for claim in rank.claims.all() if claim.gpu in names), "")
    return f"{count} x {name}" if count > 1 and name else name


@contextmanager
def _aim(job: Job, options: Options, rank: Rank) -> Iterator[tuple[Aim, str]]:
    """Where requests go, by which key, and under which name of the model."""
    replica = rank.replica
    if options.through == DIRECTLY:
        assert rank.port is not None, "what is ready listens"
        origin = engine_url(rank.node.address, rank.port, rank.certificate)
        key = ClusterKey.chosen(cluster_keys(), replica.key_id).replica_key(
            str(replica.pk), replica.generation
        )
        yield Aim(origin, key, rank.certificate), replica.model_name
        return
    assert job.model is not None
    with transaction.atomic():
        row, text = mint_key(
            f"bench of {job.model.name}"[:200],
            user=_owner(job.by),
            scope=Key.Scope.INFERENCE,
            by=job.by,
            door=job.kind,
            why=f"the bench {str(job.pk)[:8]}",
            expires_in_ns=KEY_LIVES_NS,
            reach={"models": [job.model.name]},
        )
        keep_key(job, row)
    try:
        yield Aim(job.options.get("address") or settings.LLMGW_GATEWAY_URL, text), job.model.name
    finally:
        end_key(job, why="it is over")


def _owner(by: str) -> User:
    """Whose the key is: of who asked, or of somebody who may do everything, where that was a shell. Raises
    JobRefused."""
    people = User.objects.filter(is_active=True)
    found = people.filter(username=by).first() or people.filter(is_superuser=True).order_by("pk").first()
    if found is None:
        raise JobRefused(
            "A key belongs to a user, and there is none who may do everything; make one (manage.py "
            "createsuperuser), then bench through the gateway."
        )
    return found
