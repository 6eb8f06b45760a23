"""API keys, without what opens a door: that is told once, when one is made."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.models import Key
from catalog.reading import ENTRIES_LIMIT, NAME_LIMIT, TEXT_LIMIT
from catalog.schema import fields
from catalog.schema.beside import ETAG, GONE, IF_MATCH, LOCATION, WHY
from catalog.schema.events import CHANGED

LIMIT = "0: no limit."
SCOPE = "Keys of one scope may share what engines have cached of a prompt. Empty: shared by all without one."


class KeySerializer(shapes.Serializer):
    """An API key, without what opens a door."""

    id = shapes.CharField()
    name = fields.name("What it is for.")
    user = shapes.CharField(help_text="Whose it is; it may do no more than they may.")
    scope = shapes.ChoiceField(Key.Scope.values)
    state = shapes.ChoiceField(("live", "expired", "revoked"))
    created_at = fields.moment()
    expires_at = fields.moment(allow_null=True)
    revoked_at = fields.moment(allow_null=True)
    models = shapes.ListField(
        child=fields.name(),
        allow_null=True,
        help_text="Those it opens; null: every one, also those to come.",
    )
    requests_per_minute = fields.whole(LIMIT, lowest=0)
    tokens_per_minute = fields.whole(LIMIT, lowest=0)
    concurrency = fields.whole(f"Requests at once. {LIMIT}", lowest=0)
    cache_scope = shapes.CharField(allow_blank=True, help_text=SCOPE)


class NewKeySerializer(shapes.Serializer):
    """A key to be made."""

    name = fields.name("What it is for.")
    user = fields.text(TEXT_LIMIT, "Yourself, if left out.")
    scope = shapes.ChoiceField(Key.Scope.values, required=False, help_text="inference, if left out")
    expires_in = fields.duration("Such as 720h; a key lasts, if left out.")
    models = fields.names("Those it opens, by name or alias; every one, if left out.")
    requests_per_minute = fields.whole(LIMIT, lowest=0)
    tokens_per_minute = fields.whole(LIMIT, lowest=0)
    concurrency = fields.whole(f"Requests at once. {LIMIT}", lowest=0)
    cache_scope = fields.text(NAME_LIMIT, SCOPE)
    why = fields.why()


class KeyPatchSerializer(shapes.Serializer):
    """What a key opens and how much of it. A JSON merge patch (RFC 7396): null takes a field back."""

    models = shapes.ListField(
        child=fields.name(),
        max_length=ENTRIES_LIMIT,
        required=False,
        allow_null=True,
        help_text="These and no others, by name or alias; null: every one.",
    )
    requests_per_minute = fields.whole(LIMIT, lowest=0, allow_null=True)
    tokens_per_minute = fields.whole(LIMIT, lowest=0, allow_null=True)
    concurrency = fields.whole(f"Requests at once. {LIMIT}", lowest=0, allow_null=True)
    cache_scope = fields.text(NAME_LIMIT, SCOPE, allow_null=True)
    why = fields.why()


class MadeKeySerializer(KeySerializer):
    """A key that was just made, with its text."""

    key = shapes.CharField(help_text="The key itself, shown in this answer and never again.")


describe_keys = extend_schema_view(
    list=extend_schema(summary="API keys", responses=KeySerializer(many=True)),
    retrieve=extend_schema(summary="One API key", parameters=[ETAG], responses=KeySerializer),
    create=extend_schema(
        summary="Make an API key",
        parameters=[ETAG, LOCATION],
        request=NewKeySerializer,
        responses={201: MadeKeySerializer},
    ),
    partial_update=extend_schema(
        summary="Change what an API key opens",
        parameters=[IF_MATCH, ETAG],
        request=KeyPatchSerializer,
        responses={200: KeySerializer, 412: CHANGED},
    ),
    destroy=extend_schema(summary="Revoke an API key", parameters=[WHY], responses={204: GONE}),
)
