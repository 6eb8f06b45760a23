"""Reads untyped JSON into typed values, and says in one sentence each what could not be read.

A Reader never converts in silence: a value of the wrong type, out of range or with characters that no door
could show becomes a Fault, and its field reads as zero from there on. It raises only where there are more
faults than anybody would read.
"""

import difflib
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.durations import parse_duration

NAME_LIMIT = 200  # characters; names and labels are indexed columns
TEXT_LIMIT = 10_000  # characters of a description, an argument or an environment value
ENTRIES_LIMIT = 4_096  # entries of one list or map
FAULTS_LIMIT = 1_000  # of one model, or of all in one file; reading ends there
INT_LIMIT = 2**31 - 1  # an integer column on every database

# Control and format characters, line and paragraph separators: two names that differ by these look the same.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason why a catalog is refused. `model` and `profile` are empty where it is not about one."""

    model: str
    profile: str
    field: str
    code: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class CatalogError(ValueError):
    """A catalog, model or profile was refused. `faults` lists every reason; the text is the first."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        return self.faults[0].sentence


def too_many() -> Fault:
    """What the last fault says, where reading ended at the limit of them."""
    sentence = f"there are {FAULTS_LIMIT} faults already, and it was read no further; mend these first"
    return Fault("", "", "", "too_many", sentence)


def shown(text: str, limit: int = NAME_LIMIT) -> str:
    """A text that any door can show: bounded, with what cannot be seen or sent made visible."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in cut
    )


def quote(text: str, limit: int = 80) -> str:
    """`shown`, in double quotes."""
    return '"' + shown(text.replace("\\", "\\\\").replace('"', '\\"'), limit) + '"'


def storable(text: str) -> str:
    """What somebody said, as any database keeps it: no NUL, and halves of surrogate pairs made visible."""
    return text.replace("\0", "").encode("utf-8", "backslashreplace").decode()


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds = (
        (str, "a text"),
        (int, "a number"),
        (float, "a decimal number"),
        (Mapping, "a map"),
        (Sequence, "a list"),
    )
    return next((kind for type_, kind in kinds if isinstance(value, type_)), f"a {type(value).__name__}")


class Reader:
    """Takes typed values out of one JSON map, collecting faults on the way.

    `subject` is what the sentences are about (`model "m"`); `bad` holds the fields that could not be read, so
    that a law about such a field does not add a second, misleading sentence.
    """

    def __init__(
        self, raw: object, faults: list[Fault], *, subject: str, model: str, profile: str = "", path: str = ""
    ) -> None:
        self.faults = faults
        self.subject = subject
        self.bad: set[str] = set()
        self._model, self._profile, self._path = shown(model), shown(profile), path
        self._raw: Mapping[Any, Any] = raw if isinstance(raw, Mapping) else {}
        if not isinstance(raw, Mapping):
            what = path.rstrip(".") or "it"
            self.refuse(path.rstrip("."), "type", f"{what} must be a map of fields, not {_kind(raw)}")

    def refuse(self, field: str, code: str, says: str) -> None:
        """Record a fault. `says` completes `model "m": ...`. Raises CatalogError with all of them, where this
        is one more than the limit."""
        if len(self.faults) >= FAULTS_LIMIT:
            raise CatalogError([*self.faults, too_many()])
        self.bad.add(field.split(".")[-1])
        sentence = f"{self.subject}: {says}" if self.subject else says
        self.faults.append(Fault(self._model, self._profile, field, code, sentence))

    def refuse_unknown_keys(self, known: Sequence[str]) -> None:
        for key in self._raw:
            if key in known:
                continue
            if not isinstance(key, str):
                self.refuse(
                    self._path.rstrip("."), "unknown_key", "keys must be texts; put the key in quotes"
                )
                continue
            near = difflib.get_close_matches(key[:NAME_LIMIT], known, n=1)
            advice = f"did you mean {near[0]}?" if near else "the keys are " + ", ".join(known)
            where = f" in {self._path.rstrip('.')}" if self._path else ""
            self.refuse(
                f"{self._path}{shown(key)}", "unknown_key", f"unknown key {quote(key)}{where}; {advice}"
            )

    def _take(self, key: str, type_: type | tuple[type, ...], wanted: str) -> Any:
        """The value of a key if it has the type, otherwise None (with a fault unless it is just absent)."""
        if key not in self._raw:
            return None
        value = self._raw[key]
        # A bool is an int to Python, and never to an operator.
        if isinstance(value, type_) and (type_ is bool or not isinstance(value, bool)):
            return value
        field = self._path + key
        advice = "; leave the key out instead" if value is None else ""
        self.refuse(field, "type", f"{field} must be {wanted}, not {_kind(value)}{advice}")
        return None

    def _is_sound(self, field: str, text: str, limit: int) -> bool:
        if len(text) > limit:
            self.refuse(field, "too_long", f"{field} is longer than {limit} characters; shorten it")
        elif "\0" in text:
            self.refuse(field, "characters", f"{field} holds a NUL character; remove it")
        elif any("\ud800" <= character <= "\udfff" for character in text):
            self.refuse(
                field, "characters", f"{field} holds half of a surrogate pair, which is no text; remove it"
            )
        else:
            return True
        return False

    def _is_sound_name(self, field: str, text: str, limit: int) -> bool:
        if not self._is_sound(field, text, limit):
            return False
        if any(unicodedata.category(character) in _INVISIBLE for character in text):
            self.refuse(
                field,
                "characters",
                f"{field} {quote(text)} holds control or invisible characters; remove them",
            )
        elif text != text.strip():
            self.refuse(field, "characters", f"{field} {quote(text)} begins or ends with a space; remove it")
        else:
            return True
        return False

    def has(self, key: str) -> bool:
        return key in self._raw

    def text(self, key: str) -> str:
        value = self._take(key, str, "a text")
        return value if value is not None and self._is_sound(self._path + key, value, TEXT_LIMIT) else ""

    def name(self, key: str, limit: int = NAME_LIMIT) -> str:
        """A text that people compare by eye: no control characters, no outer spaces."""
        value = self._take(key, str, "a text")
        return value if value is not None and self._is_sound_name(self._path + key, value, limit) else ""

    def integer(self, key: str, *, negative_allowed: bool = True) -> int:
        value = self._take(key, int, "a whole number")
        if value is None:
            return 0
        field = self._path + key
        if not -INT_LIMIT <= value <= INT_LIMIT:
            self.refuse(field, "range", f"{field} is out of range; at most {INT_LIMIT} is possible")
        elif value < 0 and not negative_allowed:
            self.refuse(field, "range", f"{field} cannot be below 0, and is {value}; use 0 for none")
        else:
            return int(value)
        return 0

    def number(self, key: str, *, highest: int) -> float:
        value = self._take(key, (int, float), "a number")
        if value is None:
            return 0.0
        field = self._path + key
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(field, "range", f"{field} must be a finite number; give one of at most {highest}")
        elif value > highest:
            self.refuse(field, "range", f"{field} is above {highest}; give a smaller number")
        else:
            return float(max(value, 0))
        return 0.0

    def is_true(self, key: str) -> bool:
        return bool(self._take(key, bool, "true or false"))

    def duration(self, key: str, *, negative_allowed: bool = False) -> int:
        if key not in self._raw:
            return 0
        field = self._path + key
        try:
            value = parse_duration(self._raw[key])
        except ValueError as why_not:
            self.refuse(field, "duration", f"{field} {why_not}")
            return 0
        if value < 0 and not negative_allowed:
            self.refuse(field, "range", f"{field} cannot be below 0; leave it out, or give 0")
            return 0
        return value

    def texts(self, key: str, *, are_names: bool = False) -> tuple[str, ...]:
        entries = self.items(key, "a list of texts")
        field = self._path + key
        for entry in entries:
            if not isinstance(entry, str):
                self.refuse(
                    field, "type", f"{field} must be a list of texts, and one entry is {_kind(entry)}"
                )
            elif are_names and not entry:
                self.refuse(field, "required", f"{field} holds an empty name; remove it")
            elif are_names:
                self._is_sound_name(field, entry, NAME_LIMIT)
            else:
                self._is_sound(field, entry, TEXT_LIMIT)
        return () if key in self.bad else tuple(entries)

    def pairs(self, key: str) -> dict[str, str]:
        """A map of texts, sorted by key."""
        entries = self._take(key, Mapping, "a map of texts") or {}
        field = self._path + key
        if len(entries) > ENTRIES_LIMIT:
            self.refuse(field, "range", f"{field} has more than {ENTRIES_LIMIT} entries; remove some")
            return {}
        for name, value in entries.items():
            if not isinstance(name, str) or not name:
                self.refuse(
                    field, "type", f"{field} has an entry whose name is not a text, or is empty; name it"
                )
            elif self._is_sound_name(field, name, NAME_LIMIT):
                if "=" in name:
                    self.refuse(
                        field, "characters", f"{field} has an entry {quote(name)}; a name cannot hold ="
                    )
                elif not isinstance(value, str):
                    kind = _kind(value)
                    self.refuse(
                        field, "type", f"{field} {quote(name)} must be a text, not {kind}; put it in quotes"
                    )
                else:
                    self._is_sound(field, value, TEXT_LIMIT)
        return {} if key in self.bad else dict(sorted(entries.items()))

    def items(self, key: str, wanted: str) -> Sequence[Any]:
        """A list whose entries are read elsewhere."""
        entries = self._take(key, (list, tuple), wanted) or ()
        if len(entries) > ENTRIES_LIMIT:
            self.refuse(
                self._path + key, "range", f"{key} has more than {ENTRIES_LIMIT} entries; remove some"
            )
            return ()
        return entries

    def inside(self, key: str) -> "Reader":
        """A reader of the map under a key, whose fields are called `key.field`."""
        return Reader(
            self._raw.get(key, {}),
            self.faults,
            subject=self.subject,
            model=self._model,
            profile=self._profile,
            path=f"{self._path}{key}.",
        )
