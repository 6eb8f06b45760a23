"""What REST says where an agent cannot be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rest_framework import exceptions, status

from nodes import actions, stocking


class Unreachable(exceptions.APIException):
    status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    default_code = "agent_unreachable"


@contextmanager
def reached() -> Iterator[None]:
    """That an agent cannot be asked is nobody's mistake."""
    try:
        yield
    except actions.NodeRefused as no:
        if no.faults[0].code == stocking.UNREACHABLE:
            raise Unreachable(str(no)) from None
        raise
