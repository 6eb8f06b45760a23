"""YAML, event by event: what its readers disagree about is refused, and nothing is expanded."""

from __future__ import annotations

import re
from typing import Any

import yaml

from catalog.files.building import DIGITS_LIMIT, Building
from catalog.files.places import FileError, placed_fault, refused
from catalog.reading import quote, shown

_TAG = "tag:yaml.org,2002:"
_TRUE_AND_FALSE = {"true": True, "false": False}
_WHOLE = re.compile(rf"[-+]?(0|[1-9][0-9]{{0,{DIGITS_LIMIT}}})")
_DECIMAL = re.compile(r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?")
# What readers of YAML 1.2 take for a number, and those of 1.1 for a text.
_NUMBER_ELSEWHERE = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+|0o[0-7]+")
_MISREAD = {
    "bool": "true or false to one reader of YAML and a text to another; write true or false",
    "int": "a number to one reader of YAML, and another or a text to the next; write it in plain digits",
    "float": "a number to one reader of YAML, and another or a text to the next; write it in plain digits",
    "timestamp": "a date or a time to one reader of YAML and a text to another; write it otherwise",
}


class _Unread(ValueError):
    """A plain scalar that readers of YAML do not agree on. The text is what is wrong."""


def read_yaml(text: str, building: Building) -> None:
    odd = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if odd:
        line = text.count("\n", 0, odd.start()) + 1
        says = f"the character {quote(odd[0])} cannot stand in YAML as it is; write it as an escape in quotes"
        raise refused(line, "characters", says)
    loader = yaml.CSafeLoader(text)
    try:
        _read_events(loader, building)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        what = ", ".join(filter(None, (problem.context, problem.problem)))
        line = mark.line + 1 if mark else 0
        raise FileError(
            [*building.faults, placed_fault(line, "syntax", f"this is not YAML: {shown(what)}")]
        ) from None
    finally:
        loader.dispose()


def _read_events(loader: yaml.CSafeLoader, building: Building) -> None:
    documents = 0
    while loader.check_event():
        event: Any = loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise refused(line, "several", "a second document begins here; put one catalog in a file")
        elif isinstance(event, yaml.AliasEvent):
            says = f"the reference *{shown(str(event.anchor))} is not followed; write out what it stands for"
            building.refuse(line, "anchor", says)
            _put(building, "", line)
        elif isinstance(event, yaml.NodeEvent):
            _refuse_decoration(event, line, building)
            if isinstance(event, yaml.ScalarEvent):
                _put_scalar(loader, event, line, building)
            elif building.wants_key:
                says = "a list or a map cannot be a key; a key must be a text"
                raise refused(line, "unknown_key", says)
            else:
                building.open({} if isinstance(event, yaml.MappingStartEvent) else [], line)
        elif isinstance(event, yaml.CollectionEndEvent):
            building.close()


def _refuse_decoration(event: Any, line: int, building: Building) -> None:
    if event.anchor:
        building.refuse(line, "anchor", f"the anchor &{shown(event.anchor)} is not read; remove it")
    if event.tag:
        tag = event.tag.replace(_TAG, "!!", 1)
        building.refuse(line, "tag", f"the tag {shown(tag)} is not read; remove it")


def _put(building: Building, value: Any, line: int) -> None:
    if not building.wants_key:
        building.put(value, line)
    elif isinstance(value, str):
        building.key(value, line)
    else:
        building.refuse(line, "unknown_key", "keys must be texts; put the key in quotes")
        building.key(str(value), line)


def _put_scalar(loader: yaml.CSafeLoader, event: yaml.ScalarEvent, line: int, building: Building) -> None:
    is_plain = event.implicit[0] and not event.tag
    if building.wants_key and is_plain and event.value == "<<":
        building.refuse(line, "merge", 'the merge key "<<" is not followed; write out the fields')
    kind = ""
    if is_plain:
        tag: Any = loader.resolve(yaml.ScalarNode, event.value, (True, False))  # type: ignore[no-untyped-call]
        kind = tag.removeprefix(_TAG)
    try:
        value = _plain_value(event.value, kind)
    except _Unread as why:
        building.refuse(
            line, "ambiguous", f"{shown(event.value)} is {why}, or put it in quotes if it is a text"
        )
        value = event.value
    _put(building, value, line)


def _plain_value(text: str, kind: str) -> Any:
    """The value of a scalar; `kind` is what YAML 1.1 takes it for, and empty where it is in quotes."""
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in _TRUE_AND_FALSE:
        return _TRUE_AND_FALSE[text.lower()]
    if kind == "int" and _WHOLE.fullmatch(text):
        return int(text)
    if kind == "float" and (_DECIMAL.fullmatch(text) or text.lower().lstrip("+-") in (".nan", ".inf")):
        return float(text.replace(".n", "n").replace(".N", "n").replace(".i", "i").replace(".I", "i"))
    if kind == "str" and _NUMBER_ELSEWHERE.fullmatch(text):
        raise _Unread(_MISREAD["float"])
    if kind in _MISREAD:
        raise _Unread(_MISREAD[kind])
    return text
