"""The admin's pages as a browser has them: what they show, and what it would send."""

from __future__ import annotations

import re
from typing import Any

from django.test import Client

from catalog.models import Model

MODELS, ADD = "/admin/catalog/model/", "/admin/catalog/model/add/"


def page(client: Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer
    return answer.content.decode()


def change(model: Model) -> str:
    return f"/admin/catalog/model/{model.pk}/change/"


def form_of(client: Client, path: str) -> dict[str, Any]:
    return as_shown(client.get(path))


def as_shown(answer: Any) -> dict[str, Any]:
    """What a browser would send if this page were saved as it is."""
    form, formset = answer.context["adminform"].form, answer.context["inline_admin_formsets"][0].formset
    values = {
        bound.html_name: bound.value()
        for each in (form, formset.management_form, *formset.forms)
        for bound in each
    }
    return {name: value for name, value in values.items() if value is not None and value is not False}


def faults_in(answer: Any) -> Any:
    formset = answer.context["inline_admin_formsets"][0].formset
    return answer.context["adminform"].form.errors, formset.errors, formset.non_form_errors()


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
