"""The form of one model, and the formset of its profiles beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django import forms
from django.contrib.admin.widgets import AdminTextareaWidget

from catalog.durations import format_duration
from catalog.forms.fields import (
    LinesField,
    TypedField,
    add_notes,
    choice_field,
    duration_field,
    duration_text,
    number_field,
    revision_of,
    take_for_seen,
    why_field,
)
from catalog.hiding import hide
from catalog.models import Event, Model, Profile
from catalog.parts import LIMIT_KEYS, OVER_MAX_OUTPUT, TIMEOUT_KEYS
from catalog.reading import Fault
from catalog.showing import default_timeouts
from catalog.spec import ENGINES, ROUTING_PROFILES
from catalog.typed import (
    read_list,
    read_pairs,
    typed_value,
    write_list,
    write_pairs,
)

# The form's field -> where its value goes in the model's JSON; also where a fault's sentence is shown.
_PLACES = {
    "name": "name",
    "aliases": "aliases",
    "description": "description",
    "source": "source",
    "scaling_min": "scaling.min",
    "scaling_max": "scaling.max",
    "idle_timeout": "scaling.idle_timeout",
    "fallbacks": "fallbacks",
    "routing_profile": "routing_profile",
    "ttft_p99": "slo.TTFTp99",
    "tpot_p99": "slo.TPOTp99",
    "context_length": "context_length",
    "max_output": "max_output",
    "tools": "capabilities.tools",
    "vision": "capabilities.vision",
    "embeddings": "capabilities.embeddings",
    **{key: f"limits.{key}" for key in (*LIMIT_KEYS, "over_max_output")},
    **{key: f"timeouts.{key}" for key in TIMEOUT_KEYS},
}
_FIELD_OF = {place: field for field, place in _PLACES.items()} | {"why": "why"}


_USUAL = default_timeouts()


def _timeout(label: str, help_text: str, usual: int) -> TypedField:
    return duration_field(label, f"{help_text}; empty: {format_duration(usual)}", format_duration(usual))


class ModelForm(forms.ModelForm):
    """One model; its profiles are the formset beside it.

    `revision` is the model's when the page was opened. `seen` are the changes of others that a refused save
    has shown: the next one counts as made with them in sight. `notes` are sentences by field. A form that
    `only_shows` what was typed is never saved.
    """

    faults: ClassVar[Sequence[Fault]] = ()
    seen: ClassVar[Sequence[Event]] = ()
    notes: ClassVar[Mapping[str, Sequence[str]]] = {}
    only_shows: ClassVar[bool] = False

    name = TypedField("name", "what a request asks for", **{"class": "vTextField"})
    aliases = LinesField("aliases", read_list, "further names of this model, one a line", rows=2)
    description = TypedField("description", "", AdminTextareaWidget(attrs={"rows": 2}))
    source = TypedField(
        "source",
        "a Hugging Face id, org/name[@revision][:file-or-glob], or an absolute path on the nodes",
        **{"class": "vTextField"},
    )
    skip_source_check = forms.BooleanField(
        label="Save even if the check refuses the source",
        required=False,
        help_text="then say why, beside the buttons that save",
    )
    scaling_min = number_field("min", "replicas kept running")
    scaling_max = number_field("max", "0 with min 0: off")
    idle_timeout = duration_field("idle timeout", "min 0: unloaded after this long without a request", "15m")
    fallbacks = LinesField(
        "fallbacks", read_list, "who answers when this model cannot: names in order, one a line", 2
    )
    routing_profile = choice_field("routing profile", ROUTING_PROFILES)
    context_length = number_field("context length", "tokens; empty: the model's own")
    max_output = number_field("max output", "tokens; empty: no limit of its own")
    over_max_output = choice_field(
        "over max output", OVER_MAX_OUTPUT, "of a request for more; empty: it is refused"
    )
    requests_per_minute = number_field("requests a minute", "of all keys together; empty: no limit")
    tokens_per_minute = number_field("tokens a minute", "of all keys together; empty: no limit")
    concurrency = number_field("at once", "requests of all keys together; empty: no limit")
    hold = _timeout("hold", "for a replica to be there", _USUAL.hold)
    connect = _timeout("connect", "for the engine to take it", _USUAL.connect)
    first_byte = _timeout("first byte", "for an answer to begin", _USUAL.first_byte)
    idle = _timeout("idle", "for its next byte", _USUAL.idle)
    ttft_p99 = duration_field("TTFT p99", "promised time to the first token", "800ms")
    tpot_p99 = duration_field("TPOT p99", "promised time per further token", "40ms")
    tools = forms.BooleanField(label="Tools", required=False)
    vision = forms.BooleanField(label="Vision", required=False)
    embeddings = forms.BooleanField(label="Embeddings", required=False)
    why = why_field()
    revision = TypedField("revision", widget=forms.HiddenInput())

    class Meta:
        model = Model
        fields: ClassVar[Sequence[str]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model: Model = self.instance
        if model.pk is None:
            return
        add_notes(self, self.notes)
        if self.is_bound and self.seen:
            take_for_seen(self, self.seen)
        spec = model.spec
        self.initial |= {
            "revision": model.revision,
            **{field: getattr(spec, field) for field in ("name", "description", "source", "routing_profile")},
            "aliases": write_list(spec.aliases),
            "fallbacks": write_list(spec.fallbacks),
            "scaling_min": model.scaling_min,
            "scaling_max": model.scaling_max,
            "idle_timeout": duration_text(model.idle_timeout_ns),
            "context_length": model.context_length or "",
            "max_output": model.max_output or "",
            "ttft_p99": duration_text(model.ttft_p99_ns),
            "tpot_p99": duration_text(model.tpot_p99_ns),
            "tools": model.can_tools,
            "vision": model.can_vision,
            "embeddings": model.can_embeddings,
            "over_max_output": model.over_max_output,
            **{key: getattr(model, key) or "" for key in LIMIT_KEYS},
            **{key: duration_text(getattr(spec.timeouts, key)) for key in TIMEOUT_KEYS},
        }

    def _post_clean(self) -> None:
        """The law judges, not the model's fields: every door is to say the same sentence."""

    def is_valid(self) -> bool:
        return not self.only_shows and super().is_valid()

    def clean(self) -> dict[str, Any]:
        for fault in self.faults:
            if not fault.profile:
                self.add_error(_FIELD_OF.get(fault.field), fault.sentence)
        return self.cleaned_data

    @property
    def expected(self) -> int:
        """The revision that was read; of a form that does not say, none that there ever was."""
        return revision_of(self.cleaned_data["revision"])

    def raw(self, profiles: list[dict[str, Any]]) -> dict[str, Any]:
        """The model as the law reads it. What was left empty is left out."""
        raw: dict[str, Any] = {"profiles": profiles}
        for field, place in _PLACES.items():
            value = self.cleaned_data[field]
            if value in ("", [], False):
                continue
            *outer, key = place.split(".")
            inside = raw.setdefault(outer[0], {}) if outer else raw
            inside[key] = typed_value(key, value) if isinstance(value, str) else value
        return raw


# --- its profiles ---------------------------------------------------------------------------------


class ProfileForm(forms.ModelForm):
    """One profile. What is hidden from who looks, and stays so, stays what it was. `notes` are sentences by
    profile and field."""

    name = TypedField("name", **{"class": "vTextField short"})
    engine = choice_field("engine", ENGINES)
    gpu_class = TypedField("GPU class", "empty: without a card (llamacpp)", **{"class": "vTextField short"})
    tp = number_field("TP", "GPUs that share each layer")
    pp = number_field("PP", "groups of layers")
    nodes = number_field("nodes")
    gpus_per_node = number_field("GPUs per node", "empty: TP / nodes")
    min_memory_gb = number_field("host memory, GB")
    min_disk_gb = number_field("disk, GB")
    weight = number_field("weight", "share of requests")
    priority = number_field("priority", "highest that fits wins")
    startup_timeout = duration_field("startup timeout")
    args = LinesField("args", read_list, "one argument a line")
    env = LinesField("environment", read_pairs, "NAME=value a line; secret:NAME is looked up by the agent")
    node_selector = LinesField("node selector", read_pairs, "label=value a line; a node must have all")

    class Meta:
        model = Profile
        fields: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        *args: Any,
        sees_env: bool = False,
        notes: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk is None:
            self.initial |= {"engine": ENGINES[0]}
            return
        spec = self.instance.spec
        add_notes(self, (notes or {}).get(spec.name, {}))
        is_usual = spec.gpus_per_node == max(spec.tp // spec.nodes, 1)
        self.initial |= {
            **{field: getattr(spec, field) or "" for field in self.fields},
            "gpus_per_node": "" if is_usual else spec.gpus_per_node or "",
            "weight": int(spec.weight) if spec.weight == int(spec.weight) else spec.weight,
            "startup_timeout": format_duration(spec.startup_timeout),
            "args": write_list(spec.args),
            "env": write_pairs(hide(spec.env, sees_env=sees_env)),
            "node_selector": write_pairs(spec.node_selector),
        }

    def _post_clean(self) -> None:
        """As in ModelForm."""

    def raw(self) -> dict[str, Any]:
        values = {field: self.cleaned_data[field] for field in self.base_fields}
        return {
            key: typed_value(key, value) if isinstance(value, str) else value
            for key, value in values.items()
            if value not in ("", [], {})
        }


class ProfileFormSet(forms.BaseInlineFormSet):
    """All profiles of a model, in the order of the page. A new model's first has a name, as at the shell."""

    def __init__(self, *args: Any, faults: Sequence[Fault] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk is None:
            self.initial_extra = [{"name": "default"}]
        self.faults = faults

    def add_fields(self, form: Any, index: int | None) -> None:
        """A row that another has removed since is no error of the form: the verb tells what changed, and
        finds profiles by their names."""
        super().add_fields(form, index)
        known = form.fields["id"].initial
        form.fields["id"] = forms.CharField(required=False, widget=forms.HiddenInput, initial=known)

    def clean(self) -> None:
        """Puts each fault to the profile that it names. What Django would judge here, the law does."""
        for fault in self.faults:
            if fault.profile:
                named = [form for form in self._kept() if form.cleaned_data.get("name") == fault.profile]
                known = named and fault.field in named[-1].fields
                if named:
                    named[-1].add_error(fault.field if known else None, fault.sentence)
                else:
                    self._non_form_errors.append(fault.sentence)

    def raws(self) -> list[dict[str, Any]]:
        return [form.raw() for form in self._kept()]

    def _kept(self) -> list[ProfileForm]:
        """Those that are to be: neither marked for removal nor an empty form at the end."""
        return [
            form
            for number, form in enumerate(self.forms)
            if (number < max(self.initial_form_count(), self.min_num) or form.has_changed())
            and not self._should_delete_form(form)
        ]
