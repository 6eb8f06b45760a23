"""JSON, sign by sign, so that each part has its line; its cost is bounded before a parser builds anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from catalog.files.building import DIGITS_LIMIT, Building, refuse_too_deep
from catalog.files.places import refused

# A text that does not end is one sign, too, and no sign is looked for twice: whatever the file, it is gone
# through once.
_SIGN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]|[^\s{}\[\],:"]++|(?P<between>[\s,:]++)')


def read_json(text: str, building: Building) -> None:
    _bound_json(text)
    try:
        json.loads(text, parse_int=str)
    except json.JSONDecodeError as problem:
        raise refused(problem.lineno, "syntax", f"this is not JSON: {problem.msg}") from None
    for sign, line in _signs(text):
        match sign[0]:
            case "{" | "[":
                building.open({} if sign == "{" else [], line)
            case "}" | "]":
                building.close()
            case '"' if building.wants_key:
                building.key(json.loads(sign), line)
            case _:
                building.put(_json_value(sign, line, building), line)


def _bound_json(text: str) -> None:
    """What the text would cost, before a parser that builds as it reads."""
    counting, depth = Building(), 0
    for sign, line in _signs(text):
        depth += (sign in "{[") - (sign in "}]")
        refuse_too_deep(depth, line)
        if depth < 0:
            return  # more is closed than was opened: the parser says where
        if sign not in "}]":
            counting.count(line)


def _signs(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in _SIGN.finditer(text):
        if not match["between"]:
            yield match[0], line
        line += match[0].count("\n")


def _json_value(sign: str, line: int, building: Building) -> Any:
    if len(sign) > DIGITS_LIMIT and sign.lstrip("-").isdigit():
        building.refuse(line, "range", f"a number of {len(sign)} digits is out of range; write a smaller one")
        return 0
    return json.loads(sign)
