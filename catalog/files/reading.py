"""Bytes to a catalog's models: which form they are in, and whether there is a catalog in them."""

from __future__ import annotations

from collections.abc import Mapping

from catalog.files.building import Building
from catalog.files.from_json import read_json
from catalog.files.from_yaml import read_yaml
from catalog.files.places import CatalogFile, FileError, placed_fault, refused
from catalog.reading import quote

BYTES_LIMIT = 32 * 1024 * 1024


def read_catalog_file(content: bytes, name: str = "") -> CatalogFile:
    """`{"models": [...]}`, or the list alone. It is JSON where the name ends so, or where it tells nothing
    and the text begins with a bracket; otherwise YAML. Raises FileError."""
    if len(content) > BYTES_LIMIT:
        raise refused(0, "too_large", f"the file is larger than {BYTES_LIMIT} bytes; split the catalog")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise refused(line, "encoding", "the text is not UTF-8; save the file as UTF-8") from None
    ending = name.lower().rpartition(".")[2]
    is_yaml = ending in ("yaml", "yml")
    is_json = ending == "json" or (not is_yaml and text.lstrip()[:1] in ("{", "["))
    building = Building()
    (read_json if is_json else read_yaml)(text, building)
    if building.faults:
        raise FileError(building.faults)
    return _catalog_of(building)


def _catalog_of(building: Building) -> CatalogFile:
    root = building.root
    if isinstance(root, list):
        return CatalogFile(root, building.lines)
    if not isinstance(root, Mapping) or not root:
        says = 'there is no catalog in the file; write the key "models" and a list of models under it'
        raise refused(0, "required", says)
    faults = [
        placed_fault(
            building.lines[(key,)], "unknown_key", f'unknown key {quote(key)}; the only key here is "models"'
        )
        for key in root
        if key != "models"
    ]
    models = root.get("models")
    if not isinstance(models, list) and "models" in root:
        faults.append(
            placed_fault(building.lines[("models",)], "type", "the catalog must be a list of models")
        )
    if faults or not isinstance(models, list):
        raise FileError(faults)
    return CatalogFile(models, building.lines, ("models",))
