"""A whole catalog as text: YAML or JSON to plain JSON that knows its lines, and back again without loss.

What a file may cost is bounded before anything is built from it. Nothing in it is expanded or guessed at: no
anchors, no tags, and no text that one reader of YAML takes for a number or a date and another does not. What
the models may be is for the law to say; `CatalogFile.placed` finds the line that its sentence is about.
"""

from catalog.files.places import CatalogFile, FileError, Placed
from catalog.files.reading import BYTES_LIMIT, read_catalog_file
from catalog.files.writing import FORMATS, write_catalog_file

__all__ = [
    "BYTES_LIMIT",
    "FORMATS",
    "CatalogFile",
    "FileError",
    "Placed",
    "read_catalog_file",
    "write_catalog_file",
]
