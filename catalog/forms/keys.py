"""The forms of a key to be made, and of what one that is there opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django import forms

from catalog.forms.fields import (
    LinesField,
    SpanField,
    TypedField,
    number_field,
    revision_of,
    take_for_seen,
    why_field,
)
from catalog.models import Event, Key
from catalog.parts import LIMIT_KEYS
from catalog.reading import Fault
from catalog.typed import (
    read_list,
    typed_value,
    write_list,
)


class ReachForm(forms.ModelForm):
    """What a key opens. Whether it opens all is apart from the list, so that an empty one never means all."""

    faults: ClassVar[Sequence[Fault]] = ()

    only_these = forms.BooleanField(
        label="These models alone", required=False, help_text="otherwise every model, those to come as well"
    )
    models = LinesField("models", read_list, "names or aliases, one a line", rows=3)
    requests_per_minute = number_field("requests a minute", "empty: no limit")
    tokens_per_minute = number_field("tokens a minute", "empty: no limit")
    concurrency = number_field("at once", "requests; empty: no limit")
    cache_scope = TypedField(
        "cache scope",
        "keys of one scope may share what engines have cached of a prompt; empty: shared by all without one",
        **{"class": "vTextField short"},
    )
    why = why_field()

    def reach(self) -> dict[str, Any]:
        """As JSON; what was left empty is none."""
        asked = self.cleaned_data
        told = {key: typed_value(key, asked[key]) if asked[key] else None for key in LIMIT_KEYS}
        models = asked["models"] if asked["only_these"] else None
        return {"models": models, "cache_scope": asked["cache_scope"] or None, **told}

    def _get_validation_exclusions(self) -> set[str]:
        """The law judges these, not the columns: every door is to say the same sentence."""
        return {*super()._get_validation_exclusions(), *LIMIT_KEYS, "cache_scope"}

    def clean(self) -> dict[str, Any]:
        asked = self.cleaned_data
        if asked.get("models") and not asked["only_these"]:
            says = "models are named, and the key is to open every model; tick the box above, or name none"
            self.add_error("models", says)
        for fault in self.faults:
            self.add_error(fault.field or None, fault.sentence)
        return asked


class KeyForm(ReachForm):
    """A key to be made."""

    expires_in = SpanField("expires_in", "empty: it lasts until it is revoked", "720h")

    class Meta:
        model = Key
        fields = ("name", "user", "scope")
        help_texts: ClassVar[Mapping[str, str]] = {"name": "what it is for"}


class KeyEditForm(ReachForm):
    """A key that is there; `revision` and `seen` are as in ModelForm."""

    seen: ClassVar[Sequence[Event]] = ()

    revision = TypedField("revision", widget=forms.HiddenInput())

    class Meta:
        model = Key
        fields: ClassVar[Sequence[str]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        key: Key = self.instance
        if self.is_bound and self.seen:
            take_for_seen(self, self.seen)
        reach = key.reach
        self.initial |= {
            "revision": key.revision,
            "only_these": reach.models is not None,
            "models": write_list(reach.models or ()),
            "cache_scope": reach.cache_scope,
            **{each: getattr(key, each) or "" for each in LIMIT_KEYS},
        }

    def _post_clean(self) -> None:
        """As in ModelForm."""

    @property
    def expected(self) -> int:
        """As in ModelForm."""
        return revision_of(self.cleaned_data["revision"])
