"""What every address under /api/ has in common: who comes in, what a request may be, and how a no looks.

Errors are `{"errors": [{"field", "code", "sentence"}]}`, whatever went wrong. The settings name these classes
as the defaults, so an address that says nothing of its own is closed, bounded and answers like the others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.authentication import BaseAuthentication
from rest_framework.parsers import BaseParser
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.actions import ChangedSince, SourceRefused
from catalog.keys import KeyText
from catalog.models import Key
from catalog.reading import CatalogError, Fault
from catalog.showing import KEY_STATES, event_as_dict

# --- who comes in ---------------------------------------------------------------------------------


class TwoCredentials(exceptions.APIException):
    status_code = status.HTTP_400_BAD_REQUEST
    default_detail = "The request brings an API key and a session: send one of the two."
    default_code = "two_credentials"


def bearer_of(request: Request) -> str | None:
    """The one credential that the request brings in its header; None where it brings none there."""
    header = request.META.get("HTTP_AUTHORIZATION")
    if header is None:
        return None
    if settings.SESSION_COOKIE_NAME in request.COOKIES:
        raise TwoCredentials
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "bearer":
        raise exceptions.AuthenticationFailed("Send the API key as Authorization: Bearer llmgw_...")
    return str(text.strip())


class KeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer llmgw_...`, a key of this scope: one that manages may do what its owner may.

    Which keys there are is nobody's business: unknown, revoked and expired ones get the same answer.
    """

    scope = Key.Scope.MANAGE

    def authenticate(self, request: Request) -> tuple[Any, Key] | None:
        text = bearer_of(request)
        if text is None:
            return None
        key = self._key(text)
        if key is None:
            raise exceptions.AuthenticationFailed(
                "This API key is not valid: it is unknown, revoked or expired."
            )
        if key.scope != self.scope:
            raise exceptions.PermissionDenied(
                f"This API key is for {key.get_scope_display()}: use one whose scope is {self.scope.value}, "
                f"or make one."
            )
        return key.user, key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="llmgw"'

    def _key(self, text: str) -> Key | None:
        typed = KeyText.parse(text)
        if typed is None:
            return None
        live = Key.objects.filter(KEY_STATES["live"], user__is_active=True).select_related("user")
        row = live.filter(pk=typed.id).first()
        # A comparison in any case: time does not tell whether there is such an id.
        fits = typed.matches(row.digest if row else "0" * 64, settings.LLMGW_KEY_PEPPER)
        return row if row and fits else None


class MayDo(BasePermission):
    """Staff, with the permission that the view's `needs` name for it. What is not named there is closed."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not request.user.is_staff:
            return False
        if view.action in (None, "metadata"):  # a method that the address has not: 405 comes next
            return True
        return view.action in view.needs and request.user.has_perm(view.needs[view.action])


# --- what a request may be ------------------------------------------------------------------------


class TooLarge(exceptions.APIException):
    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_code = "too_large"


class BoundedJSONParser(BaseParser):
    """JSON of a bounded size, read strictly: no NaN, no key twice."""

    media_type = "application/json"
    limit_bytes = 1024 * 1024  # a catalog entry is a few KB

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        if encoding := parser_context["request"].META.get("HTTP_CONTENT_ENCODING"):
            says = f"A body with Content-Encoding {encoding[:80]!r} is not read: send it as it is."
            raise exceptions.UnsupportedMediaType(media_type, says)
        body = stream.read(self.limit_bytes + 1)
        if len(body) > self.limit_bytes:
            raise TooLarge(f"The body is larger than {self.limit_bytes} bytes: send less.")
        try:
            return json.loads(body.decode(), object_pairs_hook=_once, parse_constant=_refuse_constant)
        except RecursionError:
            raise exceptions.ParseError("The body is nested too deeply to be read.") from None
        except ValueError as problem:
            raise exceptions.ParseError(f"The body is not JSON: {problem}.") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counted.items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return read


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")


# --- how a no looks -------------------------------------------------------------------------------

ERRORS_TOLD = 100
_CONFLICTS = frozenset({"in_use", "conflict"})
NOTHING_HERE = "There is nothing at this address; GET /api/ tells what there is."
_ANONYMOUS = "This address needs a credential: send Authorization: Bearer llmgw_..., or log in."
_NOT_PERMITTED = "Your user may not do this: whoever manages users can give it the permission."
_NOT_JSON = "This address answers in JSON alone: accept application/json."


def answer_error(problem: Exception, context: Mapping[str, Any]) -> Response | None:
    """Every refusal as `errors`. What is none is a fault of ours, and stays an exception."""
    if isinstance(problem, ChangedSince):
        changes = [event_as_dict(event, context["request"].user) for event in problem.events]
        answer = _errors(412, *(_fault(fault) for fault in problem.faults))
        answer.data["changes"] = changes
        return answer
    if isinstance(problem, (CatalogError, SourceRefused)):
        is_conflict = problem.faults[0].code in _CONFLICTS
        return _errors(409 if is_conflict else 400, *(_fault(fault) for fault in problem.faults))
    if isinstance(problem, Http404):
        problem = exceptions.NotFound(NOTHING_HERE)
    elif isinstance(problem, PermissionDenied):
        problem = exceptions.PermissionDenied()
    if not isinstance(problem, exceptions.APIException):
        return None
    is_code_told = isinstance(problem.detail, exceptions.ErrorDetail)
    code = str(problem.get_codes()) if is_code_told else problem.default_code
    says = _words(problem, context)
    answer = _errors(problem.status_code, {"field": "", "code": code, "sentence": says})
    if header := getattr(problem, "auth_header", None):
        answer["WWW-Authenticate"] = header
    if wait := getattr(problem, "wait", None):
        answer["Retry-After"] = str(math.ceil(wait))
    if isinstance(problem, exceptions.UnsupportedMediaType):
        answer["Accept"] = "application/json"
    return answer


def _words(problem: exceptions.APIException, context: Mapping[str, Any]) -> str:
    """The framework's own sentences say what is wrong; ours say what to do as well."""
    if isinstance(problem, exceptions.NotAuthenticated):
        return _ANONYMOUS
    if isinstance(problem, exceptions.NotAcceptable):
        return _NOT_JSON
    if isinstance(problem, exceptions.MethodNotAllowed):
        possible = ", ".join(context["view"].allowed_methods)
        return f"{context['request'].method} is not possible here; these are: {possible}."
    if problem.detail == exceptions.PermissionDenied.default_detail:
        return _NOT_PERMITTED
    return str(problem.detail)


def _fault(fault: Fault) -> dict[str, str]:
    where = {"profile": fault.profile} if fault.profile else {}
    return {"field": fault.field, "code": fault.code, "sentence": fault.sentence, **where}


def _errors(status_code: int, *errors: dict[str, str]) -> Response:
    told = list(errors[:ERRORS_TOLD])
    if more := len(errors) - len(told):
        told.append({"field": "", "code": "more", "sentence": f"... and {more} more; mend these first."})
    return Response({"errors": told}, status=status_code)
