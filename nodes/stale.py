"""Where a replica differs from the catalog as it is now, field by field, and the words for it.

A replica keeps the launch it was started from: nobody rewrites the record, and nothing asks for a restart. An
empty fingerprint is unknown, never stale. A difference in what takes effect without a restart is mild.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.differences import RESTART_FREE, Difference, differences
from catalog.reading import quote
from catalog.spec import ModelSpec, ProfileSpec
from nodes.protocol import Launch, read


@dataclass(frozen=True, slots=True)
class Staleness:
    """What `judge` found. `stale_profile` is None where it cannot be known.

    restart_needed: it would change what runs. stale_fields: of the profile; launch_fields: of the model.
    word is for a badge, empty when all is as the catalog has it; sentence is for people, empty with it.
    """

    stale_profile: bool | None
    restart_needed: bool
    stale_fields: tuple[Difference, ...]
    stale_launch: bool
    launch_fields: tuple[Difference, ...]
    word: str
    sentence: str


AS_IT_IS = Staleness(False, False, (), False, (), "", "")
"""What `judge` finds where there is nothing to find."""


def launch_from(raw: Mapping[str, Any]) -> Launch:
    """The launch as the database holds it. An adopted replica's may lack what an older agent did not tell."""
    return read(Launch, {"model": "", "source": "", "profile": {}, **raw})


def judge(
    fingerprint: str,
    launch: Launch,
    profile: ProfileSpec | None,
    model: ModelSpec | None,
    *,
    source_revision: str = "",
) -> Staleness:
    """How a replica's record compares with the catalog now.

    profile and model are None when they have left the catalog. source_revision is the commit that a launch
    would pin today; empty is unknown.
    """
    stale_profile, fields, profile_word, profile_says = _judge_profile(fingerprint, launch, profile, model)
    launch_fields = _launch_differences(launch, model, source_revision) if model else ()
    is_mild = bool(fields) and all(each.field in RESTART_FREE for each in fields)
    is_amber = stale_profile is True and not is_mild
    words, sentences = [], []
    if profile_word:
        words.append(profile_word)
        sentences.append(profile_says)
    if launch_fields:
        words = [word for word in words if is_amber or stale_profile is None] + ["stale launch"]
        sentences.append(
            f"Model {quote(launch.model)} has changed since it started ({_names(launch_fields)}); "
            "it keeps running as started until it is stopped and started again."
        )
    return Staleness(
        stale_profile=stale_profile,
        restart_needed=is_amber or bool(launch_fields),
        stale_fields=fields,
        stale_launch=bool(launch_fields),
        launch_fields=launch_fields,
        word=", ".join(words),
        sentence=" ".join(sentences),
    )


def is_as_the_catalog(
    fingerprint: str, launch: Mapping[str, Any], profile: str, model: Mapping[str, Any], source_revision: str
) -> bool:
    """Whether `judge` would find nothing at all, told without reading the launch: most of thousands are so.

    launch: as the database holds it; profile: the fingerprint that its profile has now; model: its name,
    source, context_length, and the names of the capabilities that it has.
    """
    if not fingerprint or fingerprint != profile:
        return False
    pinned = str(launch.get("revision") or "")
    if pinned and source_revision and pinned != source_revision:
        return False
    capabilities = launch.get("capabilities") or {}
    return bool(
        launch.get("model") == model["name"]
        and launch.get("source") == model["source"]
        and (launch.get("context_length") or 0) == model["context_length"]
        and {name for name, is_on in capabilities.items() if is_on} == model["capabilities"]
    )


def _judge_profile(
    fingerprint: str, launch: Launch, profile: ProfileSpec | None, model: ModelSpec | None
) -> tuple[bool | None, tuple[Difference, ...], str, str]:
    name = str(launch.profile.get("name", ""))
    if model is None:
        says = f"Model {quote(launch.model)} is no longer in the catalog; this replica is on its way out."
        return (True if fingerprint else None), (), "model removed", says
    if profile is None:
        says = (
            f"Profile {quote(name)} is no longer in the catalog; the replica keeps running as started, "
            "and its replacement will use another profile."
        )
        return (True if fingerprint else None), (), "profile removed", says
    if not fingerprint:
        says = (
            "Its agent did not tell which profile it was started from, so it cannot be compared; "
            "stop it to have it started from the catalog."
        )
        return None, (), "unknown profile", says
    if fingerprint == profile.fingerprint():
        return False, (), "", ""
    fields = differences(launch.profile, profile.as_dict())
    if fields and all(each.field in RESTART_FREE for each in fields):
        says = f"Profile {quote(name)} has changed since it started ({_names(fields)}); no restart is needed."
        return True, fields, "stale profile, no restart needed", says
    what = f" ({_names(fields)})" if fields else ""
    says = (
        f"Profile {quote(name)} has changed since it started{what}; "
        "it keeps running as started until it is stopped and started again."
    )
    return True, fields, "stale profile", says


def _launch_differences(launch: Launch, model: ModelSpec, source_revision: str) -> tuple[Difference, ...]:
    """What of the model shapes the command and is otherwise now; nothing where the record is empty."""
    if not launch.model:
        return ()
    was = {
        "name": launch.model,
        "source": launch.source,
        "context_length": launch.context_length,
        "capabilities": {key: True for key, is_on in launch.capabilities.items() if is_on},
    }
    now = {
        "name": model.name,
        "source": model.source,
        "context_length": model.context_length,
        "capabilities": model.capabilities.written(),
    }
    found = differences(_nonzero(was), _nonzero(now))
    if launch.revision and source_revision and launch.revision != source_revision:
        found += (Difference("revision", launch.revision, source_revision),)
    return found


def _nonzero(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


def _names(fields: tuple[Difference, ...]) -> str:
    return ", ".join(each.field for each in fields)
