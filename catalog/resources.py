"""What is a resource under /api/: rows under one address, each of them under its own.

Says who may do what, which parameters there are and how a body is read; the views say which rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import Route, SimpleRouter
from rest_framework.viewsets import GenericViewSet

from catalog.listing import Listing, Narrowing, Pages, check_parameters, choose, refused
from catalog.reading import CatalogError, Reader, quote
from catalog.rest import MayDo


class Resource(GenericViewSet[Any]):
    """Rows under one address: a list, and each of them.

    Names may hold slashes, so that no path beneath a row's own can be told from another row's by its look.
    What is done by POST to `<row>/<word>` is in `posted`; no row takes a POST itself. `parameters` are those
    of what is done, besides a list's.
    """

    permission_classes = (MayDo,)
    filter_backends = (Narrowing,)
    pagination_class = Pages
    http_method_names = ["get", "head", "post", "put", "patch", "delete"]

    needs: ClassVar[Mapping[str, str]]
    listing: ClassVar[Listing]
    posted: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[Mapping[str, tuple[str, ...]]] = {"destroy": ("why",)}

    action: Any  # None: a method that the address has not

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.action == "act":
            name, _, word = self.kwargs[self._address].rpartition("/")
            self.action = word if name and word in self.posted else None
            self.kwargs[self._address] = name
        super().initial(request, *args, **kwargs)
        of_list = self.listing.parameters if self.action == "list" else ()
        check_parameters(request, self.parameters.get(self._asked_for, of_list))

    @property
    def _asked_for(self) -> str:
        """What is done; of what may lie beneath a row, which only the view can tell from a row, its word."""
        _, slash, word = str(self.kwargs.get(self._address, "")).rpartition("/")
        is_beneath = self.action == "retrieve" and slash and word in self.parameters
        return word if is_beneath else str(self.action)

    @property
    def _address(self) -> str:
        return self.lookup_url_kwarg or self.lookup_field

    @property
    def allowed_methods(self) -> list[str]:
        is_row = self._address in self.kwargs
        names: list[str] = super().allowed_methods
        return [name for name in names if name != "POST" or not is_row or self.action in self.posted]

    def list(self, request: Request) -> Response:
        page = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        return self.get_paginated_response([self.shown(row) for row in page or ()])

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return Response(self.shown(self.get_object()))

    def act(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        if self.action is None:
            raise exceptions.MethodNotAllowed("POST")
        answer: Response = getattr(self, self.action)(request)
        return answer

    def shown(self, row: Any) -> dict[str, Any]:
        raise NotImplementedError


class Addresses(SimpleRouter):
    """With a slash at the end or without; a row's address takes a POST for what is `posted`."""

    routes = [
        Route("^{prefix}/?\\Z", {"get": "list", "post": "create"}, "{basename}-list", False, {}),
        Route(
            "^{prefix}/{lookup}/?\\Z",
            {
                "get": "retrieve",
                "put": "update",
                "patch": "partial_update",
                "delete": "destroy",
                "post": "act",
            },
            "{basename}-detail",
            True,
            {},
        ),
    ]

    def get_method_map(self, viewset: Any, method_map: Any) -> dict[str, str]:
        found: dict[str, str] = super().get_method_map(viewset, method_map)
        return found if viewset.posted else {verb: name for verb, name in found.items() if name != "act"}


def body_of(request: Request, *keys: str) -> Reader:
    """The body, for each of its fields to be read by its type; `settle` comes after that."""
    reader = Reader(request.data, [], subject="the body", model="")
    reader.refuse_unknown_keys(keys)
    return reader


def settle(reader: Reader) -> None:
    """Raises CatalogError with all that could not be read."""
    if reader.faults:
        raise CatalogError(reader.faults)


def is_dry_run(request: Request) -> bool:
    """Whether `?dry_run=` asks to save nothing."""
    return is_said(request, "dry_run")


def is_said(request: Request, name: str) -> bool:
    """Whether this parameter says yes; no unless it is there. Raises CatalogError."""
    value = request.query_params.get(name, "false")
    choose(name, value, tuple(_YES_OR_NO))
    return _YES_OR_NO[value]


_YES_OR_NO = {"true": True, "1": True, "false": False, "0": False}
_VERSION = re.compile(r'"([0-9]{1,18})"', re.ASCII)


def expected_revision(request: Request) -> int | None:
    """What If-Match says that the caller has read. None: whatever there is."""
    text = request.META.get("HTTP_IF_MATCH", "*").strip()
    if text == "*":
        return None
    match = _VERSION.fullmatch(text)
    if match is None:
        says = f"If-Match {quote(text)} is no version; send the ETag of what you have read, or *"
        raise refused("If-Match", "if_match", says)
    return int(match[1])
