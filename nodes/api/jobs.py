"""Jobs over REST: how far each is, what it found, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db.models import Q
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.listing import Filter, Listing
from catalog.reading import quote
from catalog.resources import Resource
from nodes import jobs
from nodes.models import Job
from nodes.schema.jobs import describe_jobs


@describe_jobs
class JobViewSet(Resource):
    """Jobs, newest first."""

    queryset = jobs.jobs()
    lookup_value_regex = "[0-9a-fA-F-]{36}"
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_job",
        "retrieve": "nodes.view_job",
        "destroy": "nodes.change_job",
    }
    listing = Listing(
        orders={"asked": "asked_at", "state": "state", "model": "model_name"},
        newest_first=True,
        filters={
            "kind": Filter("Of this kind.", lambda kind: Q(kind=kind), tuple(Job.Kind.values)),
            "model": Filter("About this model.", lambda name: Q(model_name=name)),
            "state": Filter("In this state.", lambda state: Q(state=state), tuple(Job.State.values)),
        },
        search=lambda text: (
            Q(model_name__icontains=text) | Q(by__icontains=text) | Q(problem__icontains=text)
        ),
    )

    def get_object(self) -> Job:
        text = self.kwargs["pk"]
        try:
            found: Job | None = self.get_queryset().filter(pk=text).first()
        except ValidationError:  # of a UUID
            found = None
        if found is None:
            raise exceptions.NotFound(f"there is no job {quote(text)}; GET /api/jobs lists them")
        return found

    def destroy(self, request: Request, pk: str) -> Response:
        by, why = request.user.get_username(), request.query_params.get("why", "")
        jobs.stop(self.get_object().pk, by=by, why=why, door="api")
        return Response(self.shown(self.get_object()), status=status.HTTP_202_ACCEPTED)

    def shown(self, job: Job) -> dict[str, Any]:
        return jobs.job_as_dict(job)
