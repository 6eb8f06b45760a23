"""What is shown of a profile's environment, and to whom.

Secrets are written and never shown: neither to superusers nor in exports. The other values are for whoever
has the permission SEE_ENV; names are for all who may look. Each function hides everything unless it is told
otherwise. A hidden value that comes back from a form or a REST client stands for what is stored: hiding never
destroys.
"""

import re
from collections.abc import Mapping
from typing import Any

from catalog.reading import CatalogError, Fault, quote, shown
from catalog.secrets import holds_secret, name_in
from catalog.spec import ModelSpec

HIDDEN = "(hidden)"
SEE_ENV = "catalog.see_env"

_SECRET_NAME = re.compile(
    r"(?i)(^|[^a-z])(api_?key|auth|credentials?|key|pass|passphrase|passwd|password|pwd|secret|token)"
    r"($|[^a-z])"
)


def looks_secret(name: str, value: str) -> bool:
    """A reference to a secret is none: it is there to be read."""
    if not value or name_in(value):
        return False
    return bool(_SECRET_NAME.search(name) or holds_secret(value))


def hide(env: Mapping[str, Any], *, sees_env: bool = False) -> dict[str, Any]:
    """The environment as one may see it."""
    return {
        name: HIDDEN if not sees_env or looks_secret(name, str(value)) else value
        for name, value in env.items()
    }


def hide_model(model: Mapping[str, Any], *, sees_env: bool = False) -> dict[str, Any]:
    """The model's JSON form as one may see it, fit to be sent back to `unhide_model`."""
    profiles = [
        {**profile, "env": hide(profile["env"], sees_env=sees_env)} if profile.get("env") else profile
        for profile in model.get("profiles", ())
    ]
    return {**model, "profiles": profiles}


def hide_all(value: Any, *, sees_env: bool = False) -> Any:
    """JSON that is only shown (a launch, an event's detail, differences) as one may see it: environments at
    any depth, also as what a difference in them was and is, and what looks secret anywhere."""
    if isinstance(value, Mapping):
        of_env = ("was", "now") if value.get("field") == "env" else ("env",)
        return {name: _hide_entry(name, inner, name in of_env, sees_env) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_all(inner, sees_env=sees_env) for inner in value]
    return HIDDEN if isinstance(value, str) and looks_secret("", value) else value


def _hide_entry(name: object, value: Any, is_env: bool, sees_env: bool) -> Any:
    if is_env and isinstance(value, Mapping):
        return hide(value, sees_env=sees_env)
    if isinstance(value, str):
        return HIDDEN if looks_secret(str(name), value) else value
    return hide_all(value, sees_env=sees_env)


def unhide_model(raw: Any, stored: ModelSpec | None) -> Any:
    """What somebody sent, with hidden values replaced by what is stored under the same profile and name.

    What is no model at all stays as it is, for the law to refuse. Raises CatalogError, naming each of them,
    where nothing is stored that a hidden value could stand for.
    """
    profiles = raw.get("profiles") if isinstance(raw, Mapping) else None
    if not isinstance(profiles, list):
        return raw
    faults: list[Fault] = []
    whole = {**raw, "profiles": [_unhide_profile(profile, raw, stored, faults) for profile in profiles]}
    if faults:
        raise CatalogError(faults)
    return whole


def _unhide_profile(profile: Any, raw: Any, stored: ModelSpec | None, faults: list[Fault]) -> Any:
    env = profile.get("env") if isinstance(profile, Mapping) else None
    if not isinstance(env, Mapping) or HIDDEN not in env.values():
        return profile
    known = stored.profile(profile.get("name")) if stored else None
    unhidden: dict[Any, Any] = {}
    for name, value in env.items():
        if value != HIDDEN:
            unhidden[name] = value
        elif known and name in known.env:
            unhidden[name] = known.env[name]
        else:
            model, where = str(raw.get("name", "")), str(profile.get("name", ""))
            says = f"env {quote(str(name))} is {HIDDEN}, which stands for nothing stored; type its value"
            sentence = f"model {quote(model)} profile {quote(where)}: {says}"
            faults.append(Fault(shown(model), shown(where), "env", "hidden", sentence))
    return {**profile, "env": unhidden}
