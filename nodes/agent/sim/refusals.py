"""A request's own fault, in vllm's words."""

from __future__ import annotations

from collections.abc import Mapping


class Refused(Exception):
    """Answered with its status and `{"error": {...}}`."""

    def __init__(
        self, status: int, message: str, param: str | None = None, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.kind = status, message, param, kind


def refused_value(name: str, value: object, rule: str) -> Refused:
    return Refused(400, f"{name} {rule}, got {value}. (parameter={name}, value={value})", name)


def invalid(where: str, kind: str, rule: str, value: object, *, hint: str = "") -> Refused:
    shown = f"<dict of {len(value)} items>" if isinstance(value, Mapping) else str(value)[:40]
    context = f", 'ctx': {{'error': '{hint}'}}" if hint else ""
    fault = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{rule}', 'input': '{shown}'{context}}}"
    return Refused(400, f"1 validation error:\n  {fault}", where, "Bad Request")
