"""The doors of the catalog as people go through them, each with a model's JSON.

Some doors add a model; the others make a model that is there, BASE if not another, what the JSON says.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from django.contrib.messages import get_messages
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils.html import escape

from catalog.models import Model
from catalog.parts import TIMEOUT_KEYS
from catalog.typed import write_list, write_pairs

BASE = "base"

Form = dict[str, Any]


class Said(NamedTuple):
    """The sentences that somebody is refused with, or warned with. No refusal: it was done."""

    refusals: list[str]
    warnings: list[str]


Door = Callable[..., Said]

# --- the admin ------------------------------------------------------------------------------------

_PLACES = {
    "scaling.min": "scaling_min",
    "scaling.max": "scaling_max",
    "scaling.idle_timeout": "idle_timeout",
    "slo.TTFTp99": "ttft_p99",
    "slo.TPOTp99": "tpot_p99",
}


def admin_add(client: Client, model: Form) -> Said:
    return _admin(client, "/admin/catalog/model/add/", model, {"profiles-INITIAL_FORMS": "0"})


def admin_edit(client: Client, model: Form, name: str = BASE) -> Said:
    row = Model.objects.get(name=name)
    (profile,) = row.profiles.all()
    there = {"revision": row.revision, "profiles-INITIAL_FORMS": "1", "profiles-0-id": profile.pk}
    if not model["profiles"]:
        there |= {"profiles-0-name": profile.name, "profiles-0-DELETE": "on"}
    return _admin(client, f"/admin/catalog/model/{row.pk}/change/", model, there)


def _admin(client: Client, page: str, model: Form, there: Mapping[str, Any]) -> Said:
    sent: dict[str, Any] = {"profiles-TOTAL_FORMS": str(max(len(model["profiles"]), 1)), **there}
    for key, value in model.items():
        if isinstance(value, dict):
            for inner, each in value.items():
                sent[_PLACES.get(f"{key}.{inner}", inner)] = each
        elif key != "profiles":
            sent[key] = write_list(value) if isinstance(value, list) else value
    for number, profile in enumerate(model["profiles"]):
        for key, value in profile.items():
            text = write_list(value) if isinstance(value, list) else value
            sent[f"profiles-{number}-{key}"] = write_pairs(value) if isinstance(value, dict) else text
    answer = client.post(page, sent)
    if answer.status_code == 302:
        return Said([], [str(message) for message in get_messages(answer.wsgi_request)])
    shown, formset = answer.context["adminform"].form, answer.context["inline_admin_formsets"][0].formset
    profiles = [said for errors in formset.errors for said in errors.values()]
    said = [*shown.errors.values(), *profiles, formset.non_form_errors()]
    sentences = [sentence for each in said for sentence in each]
    html = answer.content.decode()
    assert all(escape(sentence) in html for sentence in sentences)
    return Said(sentences, [])


# --- REST -----------------------------------------------------------------------------------------


def rest_post(client: Client, model: Form) -> Said:
    return _rest(client.post, "/api/models", model)


def rest_put(client: Client, model: Form, name: str = BASE) -> Said:
    return _rest(client.put, address_of(name), model)


def rest_patch(client: Client, model: Form, name: str = BASE) -> Said:
    return _rest(client.patch, address_of(name), model)


def address_of(name: str) -> str:
    """One slash at the end of an address is not part of the name."""
    return f"/api/models/{quote(name)}" + "/" * name.endswith("/")


def _rest(send: Callable[..., Any], address: str, model: Form) -> Said:
    answer = send(address, _json(model), content_type="application/json")
    told = answer.json()
    if answer.status_code in (200, 201):
        return Said([], told["status"]["warnings"])
    assert answer.status_code in (400, 409), told
    return Said([error["sentence"] for error in told["errors"]], [])


def _json(value: Any) -> str:
    """JSON knows no infinity, and reads a number that is too large as one."""
    return re.sub(r"\bInfinity\b", "1e999", json.dumps(value))


# --- the shell ------------------------------------------------------------------------------------


def model_add(client: Client, model: Form) -> Said:
    words = ["model_add", model["name"], *_fields(model)]
    words += [f"--{what}={name}" for what, field in _LISTS.items() for name in model.get(field, [])]
    for profile in model["profiles"]:
        words += ["--profile", *_settings(profile)]
    return manage(*words)


def model_edit(client: Client, model: Form, name: str = BASE) -> Said:
    words = ["model_edit", name, f"--name={model['name']}", *_fields(model)]
    for field in _LISTS.values():
        if field in model:
            words += [f"--{field}", *model[field]]
    for there in Model.objects.get(name=name).profiles.all():
        words += ["--remove-profile", there.name]
    for profile in model["profiles"]:
        words += ["--add-profile", *_settings(profile)]
    return manage(*words)


_LISTS = {"alias": "aliases", "fallback": "fallbacks"}
_OPTIONS = {"TTFTp99": "ttft-p99", "TPOTp99": "tpot-p99"} | {
    key: f"timeout-{key.replace('_', '-')}" for key in TIMEOUT_KEYS
}


def _fields(model: Form) -> Iterator[str]:
    for key, value in model.items():
        if key == "capabilities":
            yield from (f"--capability={name}" for name in value)
        elif isinstance(value, dict):
            yield from (f"--{_option(inner)}={each}" for inner, each in value.items())
        elif key not in ("name", "profiles", *_LISTS.values()):
            yield f"--{_option(key)}={value}"


def _option(key: str) -> str:
    return _OPTIONS.get(key, key.replace("_", "-"))


def _settings(profile: Form) -> Iterator[str]:
    yield profile["name"]
    for key, value in profile.items():
        if isinstance(value, list):
            yield from (f"{key}={each}" for each in value)
        elif isinstance(value, dict):
            yield from (f"{key}.{name}={inner}" for name, inner in value.items())
        elif key != "name":
            yield f"{key}={value}"


def catalog_import(client: Client, model: Form) -> Said:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(_json({"models": [model]}))
        file.flush()
        said = manage("catalog_import", file.name)
    assert all(re.match(r"line \d+: ", sentence) for sentence in said.refusals), said
    return Said([sentence.partition(": ")[2] for sentence in said.refusals], said.warnings)


def manage(*words: str) -> Said:
    """Of a refusal, without the hint what else could be done."""
    warned = io.StringIO()
    try:
        call_command(*words, stdout=io.StringIO(), stderr=warned)
    except CommandError as no:
        return Said([line for line in str(no).splitlines() if not line.startswith("Nothing was saved;")], [])
    return Said([], [line.removeprefix("warning: ") for line in warned.getvalue().splitlines()])


# --- all of them ----------------------------------------------------------------------------------

ADDING: dict[str, Door] = {
    "the admin adds": admin_add,
    "POST": rest_post,
    "model_add": model_add,
    "catalog_import": catalog_import,
}
EDITING: dict[str, Door] = {
    "the admin edits": admin_edit,
    "PUT": rest_put,
    "PATCH": rest_patch,
    "model_edit": model_edit,
}
DOORS = ADDING | EDITING
