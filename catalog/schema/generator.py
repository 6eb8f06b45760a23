"""How the description is put together of the views: the settings name these classes and functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiResponse

from catalog.models import Model
from catalog.schema.refusals import REFUSALS, ErrorsSerializer


class Schema(AutoSchema):
    """Tells of each operation how it refuses, too."""

    def get_operation_id(self) -> str:
        return f"{self.get_tags()[0]}_{self.view.action}"

    def get_description(self) -> str:
        return ""

    def _get_response_bodies(self, direction: Any = "response") -> Any:
        bodies = super()._get_response_bodies(direction)
        for code in self._refusals():
            refusal = OpenApiResponse(ErrorsSerializer, REFUSALS[code])
            bodies.setdefault(code, self._get_response_for_code(refusal, code))
        return dict(sorted(bodies.items()))

    def _refusals(self) -> Iterator[str]:
        yield from ("400", "401", "403", "406", "500", "503")
        if "{" in self.path:
            yield "404"
        if self.method in ("POST", "PUT", "PATCH"):
            yield from ("413", "415")
        rows = getattr(self.view, "queryset", None)
        if self.method != "GET" and rows is not None and rows.model is Model:
            yield "409"


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "catalog.rest.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        says = "An API key whose scope is manage: llmgw_..."
        return {"type": "http", "scheme": "bearer", "description": says}


def addresses(endpoints: Iterable[tuple[str, str, str, Any]]) -> list[tuple[str, str, str, Any]]:
    """Each address without its last slash. What a POST to a row does, and what lies beneath a row, are told
    under an address of their own; to Django they are the row's, since names hold slashes."""
    found = []
    for address, regex, method, view in endpoints:
        path = address.rstrip("/")
        posted, beneath = getattr(view.cls, "posted", ()), getattr(view.cls, "beneath", {})
        if posted and method == "POST" and path.endswith("}"):
            views = {word: view.cls.as_view({"post": word}, **view.initkwargs) for word in posted}
            found += [(f"{path}/{word}", regex, method, each) for word, each in views.items()]
            continue
        found.append((path, regex, method, view))
        if method == "GET" and path.endswith("}"):
            found += [
                (f"{path}/{below}", regex, method, view.cls.as_view({"get": word}, **view.initkwargs))
                for word, below in beneath.items()
            ]
    return found


def close(result: dict[str, Any], **told: Any) -> dict[str, Any]:
    """A body has no other fields than these; what a GET tells beside them may be sent back."""
    for name, shape in result["components"]["schemas"].items():
        if name.endswith("Request"):
            shape["additionalProperties"] = False
        if name.endswith(("ModelRequest", "ModelPatchRequest")):
            says = "As a GET told it; it is not looked at."
            shape["properties"]["status"] = {"type": "object", "readOnly": True, "description": says}
    return result
