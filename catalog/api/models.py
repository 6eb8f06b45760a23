"""Models over REST, with what lies beneath each: its profiles, and why it does not run as wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from django.db.models import Q, QuerySet
from rest_framework import exceptions, status
from rest_framework.generics import get_object_or_404
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.reverse import reverse

from catalog import actions
from catalog.hiding import SEE_ENV, hide_all, hide_model
from catalog.lint import lint
from catalog.listing import Filter, Listing, check_parameters
from catalog.models import Model, Name, Profile, database_now
from catalog.reading import NAME_LIMIT, Reader, quote
from catalog.resources import Resource, body_of, expected_revision, is_dry_run, settle
from catalog.schema import describe_check, describe_models, describe_profile, describe_roll
from catalog.showing import SCALINGS
from catalog.spec import ENGINES
from nodes.actions import cancel_roll, roll_model
from nodes.agents import ask_paths
from nodes.benching import ask_bench, replica_named
from nodes.checking import ask_check
from nodes.jobs import job_as_dict
from nodes.models import Job
from nodes.outlook import preview_change, why_of
from nodes.plots import asked_span, describe_model_series
from nodes.preview import preview
from nodes.schema import describe_bench, describe_engine_check, describe_why
from nodes.series import series_of_model
from nodes.showing import model_as_dict, models_with_replicas
from nodes.tasks import offer, wake
from nodes.telling import consequences_as_dict, why_as_dict

_BESIDE = ("why", "skip_source_check")  # said of a change, and no part of the model
_READ_ONLY = ("status",)  # told by a GET beside the catalog's own fields; ignored where it is sent back


def _search_models(text: str) -> Q:
    named = Name.objects.filter(name__icontains=text)
    return Q(pk__in=named.values("model")) | Q(source__icontains=text) | Q(description__icontains=text)


@describe_models
class ModelViewSet(Resource):
    """Models by canonical name; an alias is no address."""

    queryset = models_with_replicas()
    lookup_field = "name"
    lookup_value_regex = "[^\\x00]+?"  # names may have slashes
    posted = ("bench", "check", "engine_check", "roll")
    parameters: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "create": ("dry_run",),
        "update": ("dry_run",),
        "partial_update": ("dry_run",),
        "destroy": ("dry_run", "why"),
        "series": ("span",),
    }
    beneath: ClassVar[Mapping[str, str]] = {"profile": "profiles/{profile}", "why": "why", "series": "series"}
    needs: ClassVar[Mapping[str, str]] = {
        "list": "catalog.view_model",
        "retrieve": "catalog.view_model",  # and what lies beneath it
        "create": "catalog.add_model",
        "update": "catalog.change_model",
        "partial_update": "catalog.change_model",
        "check": "catalog.change_model",
        "roll": "catalog.change_model",
        "bench": "nodes.add_job",
        "engine_check": "nodes.add_job",
        "destroy": "catalog.delete_model",
    }
    listing = Listing(
        orders={"added": "id", "name": "name", "changed": "changed_at"},
        filters={
            "source_state": Filter(
                "What the last check of the source found.",
                lambda state: Q(source_state="" if state == "unchecked" else state),
                ("unchecked", *filter(None, Model.Source.values)),
            ),
            "scaling": Filter("How it is kept.", lambda how: SCALINGS[how], tuple(SCALINGS)),
            "engine": Filter(
                "With a profile for this engine.",
                lambda engine: Q(pk__in=Profile.objects.filter(engine=engine).values("model")),
                ENGINES,
            ),
            "gpu_class": Filter(
                "With a profile for this GPU class.",
                lambda name: Q(pk__in=Profile.objects.filter(gpu_class=name).values("model")),
            ),
        },
        search=_search_models,
    )

    def get_object(self) -> Model:
        return self._found(self.get_queryset())

    def _found(self, rows: QuerySet[Model]) -> Model:
        name = self.kwargs["name"]
        found = rows.filter(name=name).first()
        if found is None:
            raise exceptions.NotFound(f"model {quote(name)} is not in the catalog; check the spelling")
        return found

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """A model by the whole address if there is one; otherwise what lies beneath another."""
        name = self.kwargs["name"]
        found = self.get_queryset().filter(name=name).first()
        if found is None and name.endswith("/series"):
            return self.series(request)
        check_parameters(request, ())
        if found:
            return self._answer(found)
        return self.why(request) if name.endswith("/why") else self.profile(request)

    @describe_model_series
    def series(self, request: Request) -> Response:
        span = asked_span(request)
        self.kwargs["name"] = self.kwargs["name"].removesuffix("/series")
        model = self._found(Model.objects.only("name"))
        return Response(series_of_model(model.name, span, database_now(), request.user).as_dict())

    @describe_why
    def why(self, request: Request) -> Response:
        self.kwargs["name"] = self.kwargs["name"].removesuffix("/why")
        return Response(why_as_dict(why_of(self.get_object().name)))

    @describe_profile
    def profile(self, request: Request) -> Response:
        model, name = self._split_address()
        profile = model.spec.profile(name)
        if profile is None:
            there = ", ".join(quote(each.name) for each in model.spec.profiles)
            says = f"model {quote(model.name)} has no profile {quote(name)}; it has {there}"
            raise exceptions.NotFound(says)
        told = preview(model.spec, profile, model.source_revision)
        found = [each for each in lint(model.spec, model.source_facts) if each.profile in ("", name)]
        shown = told.as_dict(sees_env=request.user.has_perm(SEE_ENV))
        return Response(shown | {"warnings": [asdict(each) for each in found]})

    def _split_address(self) -> tuple[Model, str]:
        """Names may hold slashes: the model with the longest name that the address could begin with."""
        parts = self.kwargs["name"].split("/profiles/")
        split = {"/profiles/".join(parts[:at]): "/profiles/".join(parts[at:]) for at in range(1, len(parts))}
        near = {name: rest for name, rest in split.items() if len(name) <= NAME_LIMIT}
        found = max(self.get_queryset().filter(name__in=near), key=lambda row: len(row.name), default=None)
        return (found, near[found.name]) if found else (self.get_object(), "")

    def create(self, request: Request) -> Response:
        raw, words = self._asked()
        outcome = actions.add_model(raw, **words)
        if outcome.trial:
            return self._trial(outcome.model.name, outcome)
        answer = self._outcome(outcome, status.HTTP_201_CREATED)
        name = outcome.model.name
        # One slash at the end of an address is not part of the name.
        answer["Location"] = self.reverse_action("detail", args=[name]) + "/" * name.endswith("/")
        return answer

    def update(self, request: Request, name: str) -> Response:
        stored = self.get_object()
        raw, words = self._asked()
        raw = {"name": stored.name, **raw} if isinstance(raw, Mapping) else raw
        words["expected"] = expected_revision(request)
        return self._edited(stored.name, actions.edit_model(stored.name, raw, **words))

    def partial_update(self, request: Request, name: str) -> Response:
        stored = self.get_object()
        patch, words = self._asked()
        words["expected"] = expected_revision(request)
        return self._edited(stored.name, actions.patch_model(stored.name, patch, **words))

    def destroy(self, request: Request, name: str) -> Response:
        stored, is_trial = self.get_object(), is_dry_run(request)
        actions.remove_model(
            stored.name,
            expected=expected_revision(request),
            is_trial=is_trial,
            by=request.user.get_username(),
            why=request.query_params.get("why", ""),
            door="api",
            after_change=wake,
        )
        return self._trial(stored.name) if is_trial else Response(status=status.HTTP_204_NO_CONTENT)

    @describe_check
    def check(self, request: Request) -> Response:
        stored = self.get_object()
        body = body_of(request, "pin", "why")
        pin, why = body.is_true("pin"), body.text("why")
        settle(body)
        said = {"by": request.user.get_username(), "why": why, "door": "api"}
        return self._outcome(
            actions.check_model(stored.name, pin=pin, ask_paths=ask_paths, after_change=wake, **said)
        )

    @describe_roll
    def roll(self, request: Request) -> Response:
        stored = self.get_object()
        body = body_of(request, "cancel", "why")
        verb = cancel_roll if body.is_true("cancel") else roll_model
        why = body.text("why")
        settle(body)
        if verb(stored, by=request.user.get_username(), why=why, door="api"):
            wake()
        return self._answer(self.get_object())

    @describe_bench
    def bench(self, request: Request) -> Response:
        stored = self.get_object()
        body = body_of(request, "options", "replica", "profile", "why")
        profile, why, replica = body.name("profile"), body.text("why"), body.text("replica")
        settle(body)
        job = ask_bench(
            stored,
            request.data.get("options", {}) if isinstance(request.data, Mapping) else {},
            replica=replica_named(replica) if replica else None,
            profile=profile,
            by=request.user.get_username(),
            why=why,
            door="api",
        )
        return self._queued(job)

    @describe_engine_check
    def engine_check(self, request: Request) -> Response:
        stored = self.get_object()
        body = body_of(request, "replica", "why")
        replica, why = body.text("replica"), body.text("why")
        settle(body)
        job = ask_check(stored, replica=replica, by=request.user.get_username(), why=why, door="api")
        return self._queued(job)

    def _queued(self, job: Job) -> Response:
        """Offered to the workers, with the address at which its progress is."""
        offer(job)
        headers = {"Location": reverse("job-detail", args=[job.pk], request=self.request)}
        return Response(job_as_dict(job), status=status.HTTP_202_ACCEPTED, headers=headers)

    def _asked(self) -> tuple[Any, dict[str, Any]]:
        """The body apart from what is said beside the model; and what every verb wants to be told."""
        body: Any = self.request.data
        is_map = isinstance(body, Mapping)
        beside = Reader(
            {key: body[key] for key in _BESIDE if is_map and key in body}, [], subject="", model=""
        )
        told = {
            "is_trial": is_dry_run(self.request),
            "by": self.request.user.get_username(),
            "why": beside.text("why"),
            "door": "api",
            "skip_source_check": beside.is_true("skip_source_check"),
            "ask_paths": ask_paths,
            "after_change": wake,
        }
        settle(beside)
        if is_map:
            body = {key: value for key, value in body.items() if key not in (*_BESIDE, *_READ_ONLY)}
        return body, told

    def _edited(self, name: str, outcome: actions.Outcome) -> Response:
        return self._trial(name, outcome) if outcome.trial else self._outcome(outcome)

    def _trial(self, name: str, outcome: actions.Outcome | None = None) -> Response:
        """What would become of the model of this name, and of what runs. Without an outcome it is removed."""
        wanted, finding = (outcome.trial, outcome.finding) if outcome else (None, None)
        sees_env = self.request.user.has_perm(SEE_ENV)
        found = preview_change(name, wanted, finding)
        told = {
            "model": hide_model(wanted.as_text_dict(), sees_env=sees_env) if wanted else None,
            "changes": hide_all(outcome.changes, sees_env=sees_env) if outcome else {},
            "warnings": outcome.warnings if outcome else [],
            "consequences": consequences_as_dict(found, sees_env=sees_env),
        }
        return Response(told)

    def shown(self, model: Model) -> dict[str, Any]:
        return model_as_dict(model, sees_env=self.request.user.has_perm(SEE_ENV))

    def _outcome(self, outcome: actions.Outcome, code: int = status.HTTP_200_OK) -> Response:
        answer = self._answer(get_object_or_404(self.get_queryset(), pk=outcome.model.pk), code)
        answer.data["status"]["warnings"] = outcome.warnings
        return answer

    def _answer(self, model: Model, code: int = status.HTTP_200_OK) -> Response:
        return Response(self.shown(model), status=code, headers={"ETag": f'"{model.revision}"'})
