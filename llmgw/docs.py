"""The OpenAPI description of /api/, and a page of it that people can read.

Both are for whoever may come in. The page is made here, from the description alone: no script, no other host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.reading import INT_LIMIT


@functools.cache
def schema() -> dict[str, Any]:
    """The same for all users; what one may is told by the answers."""
    found: dict[str, Any] = SchemaGenerator().get_schema(public=True)
    return found


@extend_schema(exclude=True)
@api_view(["GET", "HEAD"])
def show_schema(request: Request) -> Response:
    return Response(schema())


@require_safe
def show_docs(request: HttpRequest) -> HttpResponse:
    """Of `urls`, behind the admin's login."""
    told = schema()
    context = {
        **admin.site.each_context(request),
        "title": "REST",
        "says": told["info"]["description"],
        "origin": request.build_absolute_uri("/").rstrip("/"),
        "groups": _groups(told),
        "shapes": [_shape(name, each) for name, each in told["components"]["schemas"].items()],
    }
    return TemplateResponse(request, "docs.html", context)


def _groups(told: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The operations, as the page shows them, by what they are about."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, operations in told["paths"].items():
        for method, each in operations.items():
            groups.setdefault(each["tags"][0], []).append(_operation(path, method, each))
    return groups


def _operation(path: str, method: str, told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": told["operationId"],
        "method": method.upper(),
        "path": path,
        "summary": told["summary"],
        "parameters": [
            (each["name"], each["in"], _kind(each["schema"]), each.get("description", ""))
            for each in told.get("parameters", ())
        ],
        "body": _of_content(told.get("requestBody")),
        "answers": [
            (code, each["description"], _of_content(each)) for code, each in told["responses"].items()
        ],
    }


def _of_content(told: Mapping[str, Any] | None) -> str:
    """The name of the shape that a body has; empty without a body."""
    content = (told or {}).get("content", {}).get("application/json")
    return _name(content["schema"]) if content else ""


def _shape(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    if "oneOf" in told:
        either = [("either", _name(each), _name(each), "", "") for each in told["oneOf"]]
        return {"name": name, "says": told.get("description", ""), "fields": either}
    required = told.get("required", ())
    fields = [
        (field, _kind(each), _name(each), "" if field in required else "may be left out", _says(each))
        for field, each in told.get("properties", {}).items()
    ]
    return {"name": name, "says": told.get("description", ""), "fields": fields}


def _name(told: Mapping[str, Any]) -> str:
    """The shape that a field is of, or is a list of, for a link."""
    inner = told.get("items", told)
    ref = inner.get("$ref") or next((part["$ref"] for part in inner.get("allOf", ()) if "$ref" in part), "")
    return str(ref).rpartition("/")[2]


def _says(told: Mapping[str, Any]) -> str:
    return str(told.get("description", ""))


_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
_FORMATS = {"date-time": "moment", "uuid": "UUID", "uri": "address"}


def _kind(told: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    kind = _bare_kind(told)
    return f"{kind}, or null" if told.get("nullable") and kind != "anything" else kind


def _bare_kind(told: Mapping[str, Any]) -> str:
    if "anyOf" in told:
        return " or ".join(_kind(each) for each in told["anyOf"])
    kind = told.get("type", "")
    if kind == "array":
        return f"list of {_many(told, 'Items')}{_kind(told['items'])}"
    if name := _name(told):
        return name
    if "enum" in told:
        return "one of " + ", ".join(str(each) or '""' for each in told["enum"] if each is not None)
    if kind == "object":
        inner = told.get("additionalProperties")
        return f"map of {_kind(inner)}" if inner else "map"
    if "example" in told:
        return f"text such as {told['example']}"
    if "maxLength" in told:
        return f"text of {_many(told, 'Length')}characters"
    word = _FORMATS.get(told.get("format", "")) or _WORDS.get(kind, "anything")
    return word + "".join(
        f" {preposition} {told[bound]}"
        for preposition, bound in (("from", "minimum"), ("up to", "maximum"))
        if abs(told.get(bound, INT_LIMIT)) < INT_LIMIT  # what any whole number is bounded by
    )


def _many(told: Mapping[str, Any], what: str) -> str:
    lowest, highest = told.get(f"min{what}", 0), told.get(f"max{what}")
    if highest is None:
        return ""
    return f"{lowest} to {highest} " if lowest else f"up to {highest} "
