"""A folder of wheels, made of what is installed here: so pip installs for real, and asks no index."""

from __future__ import annotations

import importlib.metadata
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement


def wheelhouse(folder: Path, requirements: Path) -> Path:
    """Of everything in that file, and what it needs in turn."""
    folder.mkdir(exist_ok=True)
    for distribution in _all_of(re.findall(r"^([\w-]+)==", requirements.read_text(), re.MULTILINE)):
        _pack(distribution, folder)
    return folder


def _all_of(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    seen: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        yield distribution
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                names.append(needed.name)


def _pack(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    tags = re.findall(r"^Tag: (.+)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
    name = re.sub(r"[-_.]+", "_", distribution.name)
    path = folder / f"{name}-{distribution.version}-{tags[0]}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc" and file.locate().is_file():  # type: ignore[attr-defined]
                wheel.write(str(file.locate()), file.as_posix())
