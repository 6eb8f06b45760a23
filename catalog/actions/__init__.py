"""What may be done to the catalog, one function each: every door calls these and shows their sentences.

A verb judges, asks about the source before its transaction opens, and then writes rows, the Event and the
revision together. `by` is who did it, `door` where from; `ask_paths` asks the nodes about a path and
`after_change` wakes whoever acts on the catalog, once the change is committed.
"""

from catalog.actions.checks import check_model, recheck_sources
from catalog.actions.events import ChangedSince, record
from catalog.actions.files import Imported, SourcesRefused, import_catalog
from catalog.actions.keys import edit_key, mint_key, renew_playground_key, revoke_key
from catalog.actions.models import (
    Outcome,
    add_model,
    edit_model,
    find_model,
    patch_model,
    read_catalog,
    remove_model,
    remove_models,
)
from catalog.actions.sources import AfterChange, AskPaths, SourceRefused, check_source

__all__ = [
    "AfterChange",
    "AskPaths",
    "ChangedSince",
    "Imported",
    "Outcome",
    "SourceRefused",
    "SourcesRefused",
    "add_model",
    "check_model",
    "check_source",
    "edit_key",
    "edit_model",
    "find_model",
    "import_catalog",
    "mint_key",
    "patch_model",
    "read_catalog",
    "recheck_sources",
    "record",
    "remove_model",
    "remove_models",
    "renew_playground_key",
    "revoke_key",
]
