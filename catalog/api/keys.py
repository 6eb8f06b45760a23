"""API keys over REST: made, shown once, changed in what they open, revoked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from django.db.models import Q, QuerySet
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog import actions
from catalog.listing import Filter, Listing
from catalog.models import Key
from catalog.reach import REACH_KEYS
from catalog.reading import Reader, quote
from catalog.resources import Resource, body_of, expected_revision, settle
from catalog.schema import describe_keys
from catalog.showing import KEY_STATES, key_as_dict, keys_for


@describe_keys
class KeyViewSet(Resource):
    """API keys: one's own, or everybody's. A key that one may not see is not there."""

    queryset = Key.objects.none()
    lookup_value_regex = "[0-9A-Za-z]{1,40}"
    needs: ClassVar[Mapping[str, str]] = {
        "list": "catalog.view_key",
        "retrieve": "catalog.view_key",
        "create": "catalog.add_key",
        "partial_update": "catalog.change_key",
        "destroy": "catalog.change_key",
    }
    listing = Listing(
        orders={"created": "created_at", "name": "name"},
        filters={
            "scope": Filter("What it opens.", lambda scope: Q(scope=scope), tuple(Key.Scope.values)),
            "state": Filter("Whether it opens.", lambda state: KEY_STATES[state], tuple(KEY_STATES)),
            "user": Filter("Whose it is.", lambda name: Q(user__username=name)),
        },
        search=lambda text: Q(name__icontains=text) | Q(id=text),
    )

    def get_queryset(self) -> QuerySet[Key]:
        return keys_for(self.request.user)

    def get_object(self) -> Key:
        found = self.get_queryset().filter(pk=self.kwargs["pk"]).first()
        if found is None:
            raise exceptions.NotFound(f"there is no key {quote(self.kwargs['pk'])}; GET /api/keys lists them")
        return found

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return self._answer(self.get_object())

    def create(self, request: Request) -> Response:
        body = body_of(request, "name", "user", "scope", "expires_in", "why", *REACH_KEYS)
        owner = body.text("user")
        asked: dict[str, Any] = {
            "name": body.text("name"),
            "scope": body.text("scope") if body.has("scope") else Key.Scope.INFERENCE.value,
            "expires_in_ns": body.duration("expires_in", negative_allowed=True)
            if body.has("expires_in")
            else None,
            "why": body.text("why"),
        }
        maker: Any = request.user
        user = self._user(body, owner) if owner else maker
        settle(body)
        key, text = actions.mint_key(
            **asked,
            reach=_reach_of(request),
            user=user,
            by=request.user.get_username(),
            door="api",
            maker=maker,
            through=cast("Key | None", request.auth),
        )
        answer = self._answer(self.get_queryset().get(pk=key.pk), status.HTTP_201_CREATED)
        answer.data["key"] = text
        answer["Cache-Control"] = "no-store"
        answer["Location"] = self.reverse_action("detail", args=[key.pk])
        return answer

    def partial_update(self, request: Request, pk: str) -> Response:
        key, body = self.get_object(), body_of(request, *REACH_KEYS, "why")
        why = body.text("why")
        settle(body)
        maker: Any = request.user
        actions.edit_key(
            key.pk,
            _reach_of(request),
            expected=expected_revision(request),
            by=maker.get_username(),
            door="api",
            why=why,
            maker=maker,
            through=cast("Key | None", request.auth),
        )
        return self._answer(self.get_object())

    def destroy(self, request: Request, pk: str) -> Response:
        key, by = self.get_object(), request.user.get_username()
        actions.revoke_key(key.pk, by=by, door="api", why=request.query_params.get("why", ""))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _user(self, body: Reader, name: str) -> Any:
        """Who is named. Whoever may make keys for themselves alone is told so, and not who there is."""
        me: Any = self.request.user
        if name == me.get_username():
            return me
        found = type(me).objects.filter(username=name, is_active=True).first()
        if found is None and me.has_perm("catalog.any_key"):
            body.refuse("user", "unknown", f"there is no user {quote(name)}; check the spelling")
        return found or type(me)(username=name)

    def shown(self, key: Key) -> dict[str, Any]:
        return key_as_dict(key)

    def _answer(self, key: Key, code: int = status.HTTP_200_OK) -> Response:
        return Response(self.shown(key), status=code, headers={"ETag": f'"{key.revision}"'})


def _reach_of(request: Request) -> dict[str, Any]:
    """What a body says of a key's reach, for the law to judge."""
    body: Any = request.data
    return {key: body[key] for key in REACH_KEYS if key in body}
