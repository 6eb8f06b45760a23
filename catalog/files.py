"""A whole catalog as text: YAML or JSON to plain JSON that knows its lines, and back again without loss.

What a file may cost is bounded before anything is built from it. Nothing in it is expanded or guessed at: no
anchors, no tags, and no text that one reader of YAML takes for a number or a date and another does not. What
the models may be is for the law to say; `CatalogFile.placed` finds the line that its sentence is about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from catalog.differences import MODEL_KEYS, PROFILE_KEYS
from catalog.reading import Fault, quote, shown

FORMATS = ("yaml", "json")
BYTES_LIMIT = 32 * 1024 * 1024
DEPTH_LIMIT = 20  # a catalog needs six
PARTS_LIMIT = 1_000_000  # keys and values; a model with three profiles has about a hundred
DIGITS_LIMIT = 40
FAULTS_LIMIT = 100  # of the writing; a file that has more of them is no catalog
_LINED_DEPTH = 5  # ("models", 3, "profiles", 0, "env"): sentences are about nothing deeper

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A fault, and the line it is about. 0 where no line of the file is."""

    line: int
    fault: Fault

    def __str__(self) -> str:
        return f"line {self.line}: {self.fault.sentence}" if self.line else self.fault.sentence


class FileError(ValueError):
    """A file that cannot be read as a catalog. `placed` lists every reason found; the text is the first."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.placed = tuple(placed)
        super().__init__(self.placed)

    def __str__(self) -> str:
        return str(self.placed[0])


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """The models as the law reads them, and on which line each part of them stands."""

    models: Sequence[object]
    lines: Mapping[Path, int] = field(default_factory=dict, hash=False)
    root: Path = ()

    def placed(self, fault: Fault, number: int | None) -> Placed:
        """The fault at its line; `number` counts the file's models from 0, None is a model not in it."""
        return Placed(0 if number is None else self._line(fault, number), fault)

    def _line(self, fault: Fault, number: int) -> int:
        """Of the field; where that is not there, of what it is missing from."""
        model: Path = (*self.root, number)
        holders = [(*model, "profiles", each) for each in _profiles_of(fault, self.models[number])] or [model]
        if fault.code == "required":
            holders = holders[:1]
        field = fault.field.split(".")
        paths = [tuple(field[:length]) for length in range(len(field), 0, -1)]
        places = [(*holder, *path) for path in [(fault.field,), *paths] for holder in holders]
        return next((self.lines[place] for place in [*places, *holders] if place in self.lines), 0)


def _profiles_of(fault: Fault, model: object) -> list[int]:
    """Which of the model's profiles the fault may be about, the likeliest first."""
    profiles = model.get("profiles") if isinstance(model, Mapping) else None
    lacks_name = fault.model and (fault.field, fault.code) == ("name", "required")
    is_of_profile = fault.profile or lacks_name or fault.field in set(PROFILE_KEYS) - set(MODEL_KEYS)
    if not is_of_profile or not isinstance(profiles, list):
        return []
    names = [profile.get("name", "") if isinstance(profile, Mapping) else None for profile in profiles]
    called = [
        number for number, name in enumerate(names) if isinstance(name, str) and shown(name) == fault.profile
    ]
    return called[::-1] if (fault.field, fault.code) == ("name", "duplicate") else called


# --- reading --------------------------------------------------------------------------------------


def read_catalog_file(content: bytes, name: str = "") -> CatalogFile:
    """`{"models": [...]}`, or the list alone. It is JSON where the name ends so, or where it tells nothing
    and the text begins with a bracket; otherwise YAML. Raises FileError."""
    if len(content) > BYTES_LIMIT:
        raise _refused(0, "too_large", f"the file is larger than {BYTES_LIMIT} bytes; split the catalog")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise _refused(line, "encoding", "the text is not UTF-8; save the file as UTF-8") from None
    ending = name.lower().rpartition(".")[2]
    is_yaml = ending in ("yaml", "yml")
    is_json = ending == "json" or (not is_yaml and text.lstrip()[:1] in ("{", "["))
    building = _Building()
    (_read_json if is_json else _read_yaml)(text, building)
    if building.faults:
        raise FileError(building.faults)
    return _catalog_of(building)


def _catalog_of(building: _Building) -> CatalogFile:
    root = building.root
    if isinstance(root, list):
        return CatalogFile(root, building.lines)
    if not isinstance(root, Mapping) or not root:
        says = 'there is no catalog in the file; write the key "models" and a list of models under it'
        raise _refused(0, "required", says)
    faults = [
        _placed(
            building.lines[(key,)], "unknown_key", f'unknown key {quote(key)}; the only key here is "models"'
        )
        for key in root
        if key != "models"
    ]
    models = root.get("models")
    if not isinstance(models, list) and "models" in root:
        faults.append(_placed(building.lines[("models",)], "type", "the catalog must be a list of models"))
    if faults or not isinstance(models, list):
        raise FileError(faults)
    return CatalogFile(models, building.lines, ("models",))


def _placed(line: int, code: str, sentence: str) -> Placed:
    return Placed(line, Fault("", "", "", code, sentence))


def _refused(line: int, code: str, sentence: str) -> FileError:
    return FileError([_placed(line, code, sentence)])


@dataclass(slots=True)
class _Open:
    """A map or a list that is being read. A map's `key` waits for its value."""

    value: dict[str, Any] | list[Any]
    path: Path
    key: str | None = None
    keys: dict[str, int] = field(default_factory=dict)


class _Building:
    """Puts together what a parser reads, bounded, with the line of each part. A key that is there twice and
    what cannot be read are noted, and reading goes on."""

    def __init__(self) -> None:
        self.root: Any = None
        self.lines: dict[Path, int] = {}
        self.faults: list[Placed] = []
        self._open: list[_Open] = []
        self._parts = 0

    def refuse(self, line: int, code: str, sentence: str) -> None:
        self.faults.append(_placed(line, code, sentence))
        if len(self.faults) >= FAULTS_LIMIT:
            raise FileError(self.faults)

    @property
    def wants_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def count(self, line: int) -> None:
        self._parts += 1
        if self._parts > PARTS_LIMIT:
            says = f"the file has more than {PARTS_LIMIT} keys and values; split the catalog"
            raise _refused(line, "too_large", says)

    def key(self, key: str, line: int) -> None:
        self.count(line)
        top = self._open[-1]
        if key in top.keys:
            where = f"the key {quote(key)} is there twice, on lines {top.keys[key]} and {line}"
            self.refuse(line, "duplicate", f"{where}; keep one of the two")
        top.keys[key] = line
        top.key = key
        if len(top.path) < _LINED_DEPTH:
            self.lines[(*top.path, key)] = line

    def put(self, value: Any, line: int) -> None:
        self.count(line)
        self._place(value, line)

    def open(self, value: dict[str, Any] | list[Any], line: int) -> None:
        self.count(line)
        if len(self._open) >= DEPTH_LIMIT:
            says = f"the file is nested more than {DEPTH_LIMIT} deep, and a catalog is not; write it flat"
            raise _refused(line, "too_deep", says)
        self._open.append(_Open(value, self._place(value, line)))

    def close(self) -> None:
        self._open.pop()

    def _place(self, value: Any, line: int) -> Path:
        if not self._open:
            self.root = value
            return ()
        top = self._open[-1]
        if isinstance(top.value, list):
            path: Path = (*top.path, len(top.value))
            if len(path) <= _LINED_DEPTH:
                self.lines[path] = line
            top.value.append(value)
        else:
            assert top.key is not None
            path = (*top.path, top.key)
            top.value[top.key] = value
            top.key = None
        return path


# --- YAML -----------------------------------------------------------------------------------------

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


def _read_yaml(text: str, building: _Building) -> None:
    odd = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if odd:
        line = text.count("\n", 0, odd.start()) + 1
        says = f"the character {quote(odd[0])} cannot stand in YAML as it is; write it as an escape in quotes"
        raise _refused(line, "characters", says)
    loader = yaml.CSafeLoader(text)
    try:
        _read_events(loader, building)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        what = ", ".join(filter(None, (problem.context, problem.problem)))
        line = mark.line + 1 if mark else 0
        raise FileError(
            [*building.faults, _placed(line, "syntax", f"this is not YAML: {shown(what)}")]
        ) from None
    finally:
        loader.dispose()


def _read_events(loader: yaml.CSafeLoader, building: _Building) -> None:
    documents = 0
    while loader.check_event():
        event: Any = loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _refused(line, "several", "a second document begins here; put one catalog in a file")
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
                raise _refused(line, "unknown_key", says)
            else:
                building.open({} if isinstance(event, yaml.MappingStartEvent) else [], line)
        elif isinstance(event, yaml.CollectionEndEvent):
            building.close()


def _refuse_decoration(event: Any, line: int, building: _Building) -> None:
    if event.anchor:
        building.refuse(line, "anchor", f"the anchor &{shown(event.anchor)} is not read; remove it")
    if event.tag:
        tag = event.tag.replace(_TAG, "!!", 1)
        building.refuse(line, "tag", f"the tag {shown(tag)} is not read; remove it")


def _put(building: _Building, value: Any, line: int) -> None:
    if not building.wants_key:
        building.put(value, line)
    elif isinstance(value, str):
        building.key(value, line)
    else:
        building.refuse(line, "unknown_key", "keys must be texts; put the key in quotes")
        building.key(str(value), line)


def _put_scalar(loader: yaml.CSafeLoader, event: yaml.ScalarEvent, line: int, building: _Building) -> None:
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


# --- JSON -----------------------------------------------------------------------------------------

_SIGN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\n')


def _read_json(text: str, building: _Building) -> None:
    _bound_json(text)
    try:
        json.loads(text, parse_int=str)
    except json.JSONDecodeError as problem:
        raise _refused(problem.lineno, "syntax", f"this is not JSON: {problem.msg}") from None
    for sign, line in _signs(text):
        match sign[0]:
            case "{" | "[":
                building.open({} if sign == "{" else [], line)
            case "}" | "]":
                building.close()
            case "," | ":":
                pass
            case '"' if building.wants_key:
                building.key(json.loads(sign), line)
            case _:
                building.put(_json_value(sign, line, building), line)


def _bound_json(text: str) -> None:
    """What the text would cost, before a parser that builds as it reads."""
    counting, depth = _Building(), 0
    for sign, line in _signs(text):
        depth += (sign in "{[") - (sign in "}]")
        if depth > DEPTH_LIMIT:
            says = f"the file is nested more than {DEPTH_LIMIT} deep, and a catalog is not; write it flat"
            raise _refused(line, "too_deep", says)
        if sign not in "{}[],:":
            counting.count(line)


def _signs(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in _SIGN.finditer(text):
        if match[0] == "\n":
            line += 1
        else:
            yield match[0], line


def _json_value(sign: str, line: int, building: _Building) -> Any:
    if len(sign) > DIGITS_LIMIT and sign.lstrip("-").isdigit():
        building.refuse(line, "range", f"a number of {len(sign)} digits is out of range; write a smaller one")
        return 0
    return json.loads(sign)


# --- writing --------------------------------------------------------------------------------------

_NO_WIDTH = 1_000_000  # lines are not folded, so that an edit changes one of them
_WORDS = frozenset({"", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_NUMBER_LIKE = re.compile(r"[-+.]*[0-9][0-9a-fA-FxXoO_.:+TZ -]*|[-+]?\.(inf|nan)", re.IGNORECASE)


def write_catalog_file(models: Iterable[Mapping[str, Any]], format: str) -> str:
    """Models in the form of `ModelSpec.as_text_dict()`, as a file that `read_catalog_file` reads."""
    content = {"models": [_without_empty(model) for model in models]}
    if format == "json":
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NO_WIDTH))


def _without_empty(model: Mapping[str, Any]) -> dict[str, Any]:
    slo = {key: duration for key, duration in model["slo"].items() if duration != "0s"}
    return {key: value for key, value in {**model, "slo": slo}.items() if value}


class _Dumper(yaml.CSafeDumper):
    """One entry a line, and in quotes whatever some reader of YAML might not take for a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> Any:
    return dumper.represent_scalar(_TAG + "str", text, style=_style(text))


def _style(text: str) -> str | None:
    if "\n" in text:
        is_readable = all(line.isprintable() and line == line.rstrip() for line in text.split("\n"))
        return "|" if is_readable and not text[0].isspace() else '"'
    return '"' if text.lower() in _WORDS or _NUMBER_LIKE.fullmatch(text) else None


_Dumper.add_representer(str, _represent_text)
