"""What a launch asks for: a path that is checked, or files of a repository at a revision."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from catalog.arguments import is_given
from catalog.source import PathSource, SourceError, parse_source
from catalog.weights import GGUF_ENGINES, choose_weights
from nodes.agent.paths import is_outside
from nodes.engines.causes import Cause
from nodes.protocol import CONFIGURATION, NODE, Launch

# What belongs to weights other than GGUF, which has it all in one file.
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
CODE = (".py",)  # only where the profile trusts its author
COMPANION_LIMIT_BYTES = 200 * 1024 * 1024
LISTED = 5  # files that one sentence lists
NAME_LIMIT = 1000
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class FetchError(Exception):
    """The weights cannot be had."""

    def __init__(self, cause: str, sentence: str, kind: str) -> None:
        super().__init__(sentence)
        self.cause = Cause(cause, sentence, kind)


@dataclass(frozen=True, slots=True)
class Order:
    """Files of a repository, as one engine reads them. revision: as the launch or else its source has it;
    empty for the newest."""

    repo: str
    revision: str
    selector: str
    engine: str
    trusts_code: bool

    @property
    def is_gguf(self) -> bool:
        return self.engine in GGUF_ENGINES

    @property
    def at(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    def choose(self, sizes: Mapping[str, int]) -> list[str]:
        """The weights first, in order, then what belongs to them. Raises FetchError."""
        choice = choose_weights([self.engine], list(sizes), self.selector)
        if not choice.files:
            said = choice.says.replace("{names}", ", ".join(choice.listed[:LISTED]))
            raise FetchError("no_weights", f"{self.at} {said}.", CONFIGURATION)
        wanted = sorted(choice.files)
        if not self.is_gguf:
            companions = COMPANIONS + CODE if self.trusts_code else COMPANIONS
            wanted += sorted(
                name
                for name, size in sizes.items()
                if name.endswith(companions) and size <= COMPANION_LIMIT_BYTES and name not in wanted
            )
        return wanted


def order_of(launch: Launch) -> Order | None:
    """None for a path on the node. Raises FetchError."""
    try:
        source = parse_source(launch.source)
    except SourceError as error:
        raise FetchError("bad_source", f'model "{launch.model}": {error}.', CONFIGURATION) from None
    if isinstance(source, PathSource):
        return None
    return Order(
        repo=source.repo,
        revision=launch.revision or source.revision,
        selector=source.selector,
        engine=launch.engine,
        trusts_code=is_given(launch.profile.get("args", ()), ("--trust-remote-code",)),
    )


def is_plain(name: str) -> bool:
    """Whether a file of a repository may have this name here: a way down, and never up or elsewhere."""
    parts = name.split("/")
    return (
        0 < len(name) <= NAME_LIMIT
        and name.isprintable()
        and not any(part in ("", ".", "..") for part in parts)
        and PurePosixPath(name).as_posix() == name
    )


def is_checksum(text: str) -> bool:
    """In hex: git's, or SHA-256."""
    return _CHECKSUM.fullmatch(text) is not None


def folder_of(first: str, names: Iterable[str], *, is_gguf: bool) -> str:
    """What an engine is given: the first file of a GGUF model, or the folder of all files. `first` is where
    the first of the names lies."""
    if is_gguf:
        return first
    folder = Path(first)
    for _ in Path(next(iter(names))).parts:
        folder = folder.parent
    return str(folder)


def local_path(launch: Launch, roots: Sequence[str]) -> str:
    """roots: the folders that a path may lead into, none for anywhere. Raises FetchError."""
    path = launch.source
    if is_outside(path, roots):
        sentence = (
            f'The path {path} of model "{launch.model}" leads out of the folders that this node allows; put '
            f"the weights into one of them, or start its agent with another --root."
        )
        raise FetchError("path_refused", sentence, NODE)
    if not os.path.exists(path):
        sentence = f'The path {path} of model "{launch.model}" is not on this node; put the weights there.'
        raise FetchError("model_path_missing", sentence, NODE)
    if launch.engine not in GGUF_ENGINES or not os.path.isdir(path):
        return path
    choice = choose_weights([launch.engine], os.listdir(path), "")
    if choice.level == "refuse":
        said = choice.says.replace("{names}", ", ".join(choice.listed[:LISTED]))
        raise FetchError("no_weights", f'model "{launch.model}": {path} {said}.', CONFIGURATION)
    return str(Path(path, min(choice.files)))  # by which the engine finds all shards
