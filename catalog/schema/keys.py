"""API keys, without what opens a door: that is told once, when one is made."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.models import Key
from catalog.reading import TEXT_LIMIT
from catalog.schema import fields
from catalog.schema.beside import GONE, LOCATION, WHY


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


class NewKeySerializer(shapes.Serializer):
    """A key to be made."""

    name = fields.name("What it is for.")
    user = fields.text(TEXT_LIMIT, "Yourself, if left out.")
    scope = shapes.ChoiceField(Key.Scope.values, required=False, help_text="inference, if left out")
    expires_in = fields.duration("Such as 720h; a key lasts, if left out.")
    why = fields.why()


class MadeKeySerializer(KeySerializer):
    """A key that was just made, with its text."""

    key = shapes.CharField(help_text="The key itself, shown in this answer and never again.")


describe_keys = extend_schema_view(
    list=extend_schema(summary="API keys", responses=KeySerializer(many=True)),
    retrieve=extend_schema(summary="One API key", responses=KeySerializer),
    create=extend_schema(
        summary="Make an API key",
        parameters=[LOCATION],
        request=NewKeySerializer,
        responses={201: MadeKeySerializer},
    ),
    destroy=extend_schema(summary="Revoke an API key", parameters=[WHY], responses={204: GONE}),
)
