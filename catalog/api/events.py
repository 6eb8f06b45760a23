"""The history over REST: read, and never written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.db.models import Q, QuerySet
from rest_framework import exceptions

from catalog.listing import Filter, Listing
from catalog.models import Event
from catalog.resources import Resource
from catalog.schema import describe_events
from catalog.showing import event_as_dict, events_for


@describe_events
class EventViewSet(Resource):
    """Who did what to what, and why, newest first."""

    queryset = Event.objects.none()
    lookup_value_regex = "[0-9]{1,18}"
    needs: ClassVar[Mapping[str, str]] = {"list": "catalog.view_event", "retrieve": "catalog.view_event"}
    listing = Listing(
        orders={"at": "id"},
        newest_first=True,
        filters={
            "kind": Filter(
                "What it was done to.",
                lambda kind: Q(kind=kind),
                ("model", "key", "node", "join token", "replica", "cluster", "user", "group"),
            ),
            "subject": Filter("The name of what it was done to.", lambda name: Q(subject=name)),
            "verb": Filter("What was done.", lambda verb: Q(verb=verb)),
            "by": Filter("Who did it; empty: llmgw itself.", lambda name: Q(by=name)),
            "door": Filter("Where from.", lambda door: Q(door=door)),
        },
        search=lambda text: Q(subject__icontains=text) | Q(by__icontains=text) | Q(why__icontains=text),
    )

    def get_queryset(self) -> QuerySet[Event]:
        return events_for(self.request.user)

    def get_object(self) -> Event:
        found = self.get_queryset().filter(pk=self.kwargs["pk"]).first()
        if found is None:
            raise exceptions.NotFound(f"there is no event {self.kwargs['pk']}; GET /api/events lists them")
        return found

    def shown(self, event: Event) -> dict[str, Any]:
        return event_as_dict(event, self.request.user)
