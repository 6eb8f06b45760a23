"""The law of the catalog: what a model and its profiles may be, and how they are written down.

`Catalog.load` takes plain JSON, normalises it and either answers or raises CatalogError with every reason.
Nothing here knows of the database or of nodes; admin, REST, commands and files all end in these sentences.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from catalog.differences import MODEL_KEYS, PROFILE_KEYS
from catalog.durations import MINUTE, format_duration
from catalog.names import Neighbours, declared_twice, faults_among
from catalog.owned import owner_of
from catalog.parts import (
    LIMIT_KEYS,
    Capabilities,
    Limits,
    Scaling,
    Slo,
    Timeouts,
    Written,
    read_over_max_output,
)
from catalog.reading import CatalogError, Fault, Reader, quote
from catalog.secrets import HOW_TO_REFER, holds_secret, is_reference, name_in

T = TypeVar("T")

ENGINES = ("vllm", "sglang", "llamacpp", "sim")
ENGINES_WITHOUT_CARD = frozenset({"llamacpp"})
ROUTING_PROFILES = ("", "prefix", "least-loaded", "round-robin", "session")

DEFAULT_ENGINE = "vllm"
DEFAULT_STARTUP_TIMEOUT = 20 * MINUTE
SOURCE_LIMIT = 1_000
HIGHEST_WEIGHT = 1_000

_ALONE = Neighbours(is_whole=False)
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """One way to run a model on one GPU class, normalised. startup_timeout is in nanoseconds."""

    name: str
    engine: str = DEFAULT_ENGINE
    gpu_class: str = ""
    tp: int = 1
    pp: int = 0
    gpus_per_node: int = 0
    nodes: int = 1
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    min_memory_gb: int = 0
    min_disk_gb: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict, hash=False)
    weight: float = 1
    priority: int = 0
    startup_timeout: int = DEFAULT_STARTUP_TIMEOUT

    @classmethod
    def load(cls, raw: object, *, model: str = "") -> "ProfileSpec":
        faults: list[Fault] = []
        profile = _read_profile(raw, faults, model=model, number=1, seen=set())
        return _unless(faults, profile)

    @property
    def cpu_only(self) -> bool:
        return not self.gpu_class and self.engine in ENGINES_WITHOUT_CARD

    def as_dict(self) -> dict[str, Any]:
        """Canonical JSON names in canonical order, zero values left out."""
        values = {key: getattr(self, key) for key in PROFILE_KEYS}
        values |= {"args": list(self.args), "env": dict(self.env), "node_selector": dict(self.node_selector)}
        values["weight"] = int(self.weight) if self.weight == int(self.weight) else self.weight
        return {key: value for key, value in values.items() if value}

    def as_text_dict(self) -> dict[str, Any]:
        """as_dict, with durations as people write them."""
        return self.as_dict() | {"startup_timeout": format_duration(self.startup_timeout)}

    def fingerprint(self) -> str:
        """16 hex digits that identify the contents."""
        canonical = json.dumps(self.as_dict(), ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)
        return hashlib.sha256(canonical.encode()).digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A catalog entry, normalised."""

    name: str
    aliases: tuple[str, ...] = ()
    description: str = ""
    source: str = ""
    profiles: tuple[ProfileSpec, ...] = ()
    scaling: Scaling = Scaling()
    fallbacks: tuple[str, ...] = ()
    routing_profile: str = ""
    slo: Slo = Slo()
    context_length: int = 0
    max_output: int = 0
    capabilities: Capabilities = Capabilities()
    limits: Limits = Limits()
    over_max_output: str = ""
    timeouts: Timeouts = Timeouts()

    @classmethod
    def load(cls, raw: object) -> "ModelSpec":
        """One model alone, under every law that needs no other model."""
        faults: list[Fault] = []
        model = _read_model(raw, faults)
        return _unless(faults + faults_among([model], _ALONE), model)

    @classmethod
    def load_edit(cls, raw: object, stored: "ModelSpec") -> "ModelSpec":
        """As `load`, for a model that exists. Where nothing but its scaling is to change, what the law has
        against the rest of it is no reason to refuse: what an older law let in can be scaled and stopped, and
        stays as it is.
        """
        faults: list[Fault] = []
        model = _read_model(raw, faults)
        already: list[Fault] = []
        as_read = _read_model(stored.as_dict(), already)
        if replace(model, scaling=as_read.scaling) == as_read:
            new = [fault for fault in faults if fault not in already or fault.field.startswith("scaling")]
            return _unless(new, replace(stored, scaling=model.scaling))
        return _unless(faults + faults_among([model], _ALONE), model)

    def faults_today(self) -> tuple[Fault, ...]:
        """What the law has against a model that is stored: it may have been written under an older one."""
        try:
            ModelSpec.load(self.as_dict())
        except CatalogError as no:
            return no.faults
        return ()

    @property
    def on_demand(self) -> bool:
        return self.scaling.min == 0 and self.scaling.max > 0

    @property
    def simulated(self) -> bool:
        return bool(self.profiles) and all(profile.engine == "sim" for profile in self.profiles)

    def profile(self, name: str) -> ProfileSpec | None:
        return next((profile for profile in self.profiles if profile.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON names, durations in nanoseconds, zero values left out but `scaling`, `slo`, `capabilities`."""
        return self._written(int, ProfileSpec.as_dict)

    def as_text_dict(self) -> dict[str, Any]:
        """as_dict, with durations as people write them."""
        return self._written(format_duration, ProfileSpec.as_text_dict)

    def _written(self, duration: Written, profile: Callable[[ProfileSpec], dict[str, Any]]) -> dict[str, Any]:
        over = {"over_max_output": self.over_max_output} if self.over_max_output else {}
        values = {
            "name": self.name,
            "aliases": list(self.aliases),
            "description": self.description,
            "source": self.source,
            "profiles": [profile(each) for each in self.profiles],
            "scaling": self.scaling.written(duration),
            "fallbacks": list(self.fallbacks),
            "routing_profile": self.routing_profile,
            "slo": self.slo.written(duration),
            "context_length": self.context_length,
            "max_output": self.max_output,
            "capabilities": self.capabilities.written(),
            "limits": self.limits.written() | over,
            "timeouts": self.timeouts.written(duration),
        }
        kept = ("scaling", "slo", "capabilities")
        return {key: value for key, value in values.items() if value or key in kept}


class Catalog:
    """All models together. Immutable once loaded."""

    def __init__(self, models: Sequence[ModelSpec]) -> None:
        self.models = tuple(models)
        self._by_name = {alias: model for model in models for alias in model.aliases}
        self._by_name |= {model.name: model for model in models}

    @classmethod
    def load(cls, models: object) -> "Catalog":
        """Normalise and judge everything. Raises CatalogError; every door shows its first fault first."""
        faults: list[Fault] = []
        if not isinstance(models, (list, tuple)):
            raise CatalogError([Fault("", "", "models", "type", "the catalog must be a list of models")])
        read: list[ModelSpec] = []
        declared: set[str] = set()
        for number, raw in enumerate(models, 1):
            model = _read_model(raw, faults, number=number)
            if model.name in declared:
                faults.append(declared_twice(model.name))
            if model.name:
                declared.add(model.name)
            read.append(model)
        return cls(_unless(faults + faults_among(read, Neighbours()), read))

    @property
    def names(self) -> list[str]:
        """Canonical names, sorted."""
        return sorted(model.name for model in self.models)

    def resolve(self, name: str) -> ModelSpec | None:
        """The model of a canonical name or an alias."""
        return self._by_name.get(name)

    def aliases_of(self, name: str) -> list[str]:
        model = self.resolve(name)
        return list(model.aliases) if model else []

    def __str__(self) -> str:
        lines = []
        for model in self.models:
            lines.append(f"{model.name} (min {model.scaling.min}, max {model.scaling.max})\n")
            lines += [
                f" {each.name:<20} {each.engine:<10} {each.gpu_class:<12}"
                f" tp={each.tp} nodes={each.nodes} priority={each.priority}\n"
                for each in model.profiles
            ]
        return "".join(lines)


# --- laws of one model ----------------------------------------------------------------------------


def _unless(faults: Sequence[Fault], loaded: T) -> T:
    if faults:
        raise CatalogError(faults)
    return loaded


def _label(raw: object) -> str:
    """The name that sentences use, before anything is known to be right."""
    name = raw.get("name") if isinstance(raw, Mapping) else None
    return name if isinstance(name, str) else ""


def _read_model(raw: object, faults: list[Fault], *, number: int = 0) -> ModelSpec:
    label = _label(raw)
    subject = f"model {quote(label)}" if label else f"model number {number}" if number else "the model"
    reader = Reader(raw, faults, subject=subject, model=label)
    reader.refuse_unknown_keys(MODEL_KEYS)
    name = reader.name("name")
    aliases = reader.texts("aliases", are_names=True)
    description = reader.text("description")
    source = reader.name("source", limit=SOURCE_LIMIT)
    fallbacks = reader.texts("fallbacks", are_names=True)
    routing_profile = reader.name("routing_profile")
    context_length = reader.integer("context_length", negative_allowed=False)
    max_output = reader.integer("max_output", negative_allowed=False)
    slo = Slo.read(reader.inside("slo"))
    capabilities = Capabilities.read(reader.inside("capabilities"))
    limits_reader = reader.inside("limits")
    limits_reader.refuse_unknown_keys((*LIMIT_KEYS, "over_max_output"))
    limits, over_max_output = Limits.read(limits_reader), read_over_max_output(limits_reader)
    timeouts = Timeouts.read(reader.inside("timeouts"))
    raw_profiles = reader.items("profiles", "a list of profiles")
    scaling_reader = reader.inside("scaling")
    scaling = Scaling.read(scaling_reader)

    if routing_profile not in ROUTING_PROFILES:
        known = ", ".join(ROUTING_PROFILES[1:])
        reader.refuse(
            "routing_profile",
            "unknown_choice",
            f"routing_profile {quote(routing_profile)} is not known; choose {known}, or leave it out",
        )
    if not name and "name" not in reader.bad and isinstance(raw, Mapping):
        faults.append(Fault("", "", "name", "required", "a model has no name"))
    if not source and "source" not in reader.bad and isinstance(raw, Mapping):
        reader.refuse("source", "required", "source is required")
    if not raw_profiles and "profiles" not in reader.bad and isinstance(raw, Mapping):
        reader.refuse("profiles", "required", "at least one profile is required")
    if scaling.max < scaling.min and not scaling_reader.bad:
        reader.refuse("scaling.max", "order", f"scaling max {scaling.max} is below min {scaling.min}")
    seen: set[str] = set()
    profiles = tuple(
        _read_profile(each, faults, model=label, model_subject=subject, number=number, seen=seen)
        for number, each in enumerate(raw_profiles, 1)
    )
    return ModelSpec(
        name,
        aliases,
        description,
        source,
        profiles,
        scaling,
        fallbacks,
        routing_profile,
        slo,
        context_length,
        max_output,
        capabilities,
        limits,
        over_max_output,
        timeouts,
    )


def _read_profile(
    raw: object, faults: list[Fault], *, model: str, number: int, seen: set[str], model_subject: str = ""
) -> ProfileSpec:
    model_subject = model_subject or (f"model {quote(model)}" if model else "")
    label = _label(raw)
    subject = f"{model_subject} profile {quote(label) if label else f'number {number}'}".lstrip()
    reader = Reader(raw, faults, subject=subject, model=model, profile=label)
    reader.refuse_unknown_keys(PROFILE_KEYS)
    asked_gpus_per_node = reader.integer("gpus_per_node")
    profile = ProfileSpec(
        name=reader.name("name"),
        engine=reader.name("engine") or DEFAULT_ENGINE,
        gpu_class=reader.name("gpu_class"),
        tp=max(reader.integer("tp"), 1),
        pp=reader.integer("pp", negative_allowed=False),
        nodes=max(reader.integer("nodes"), 1),
        args=reader.texts("args"),
        env=reader.pairs("env"),
        min_memory_gb=reader.integer("min_memory_gb", negative_allowed=False),
        min_disk_gb=reader.integer("min_disk_gb", negative_allowed=False),
        node_selector=reader.pairs("node_selector"),
        weight=reader.number("weight", highest=HIGHEST_WEIGHT) or 1,
        priority=reader.integer("priority"),
        startup_timeout=max(reader.duration("startup_timeout", negative_allowed=True), 0)
        or DEFAULT_STARTUP_TIMEOUT,
    )
    if not profile.cpu_only:
        usual = max(profile.tp // profile.nodes, 1)
        profile = replace(profile, gpus_per_node=asked_gpus_per_node if asked_gpus_per_node > 0 else usual)
    if profile.engine not in ENGINES:
        known = f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
        reader.refuse(
            "engine", "unknown_choice", f"engine {quote(profile.engine)} is not known; choose {known}"
        )
    if isinstance(raw, Mapping):
        _judge_profile(profile, reader, faults, model=model, model_subject=model_subject, seen=seen)
    return profile


def _judge_profile(
    profile: ProfileSpec,
    reader: Reader,
    faults: list[Fault],
    *,
    model: str,
    model_subject: str,
    seen: set[str],
) -> None:
    about_model = Reader({}, faults, subject=model_subject, model=model, profile=profile.name)
    if not profile.name and "name" not in reader.bad:
        about_model.refuse("name", "required", "a profile has no name")
    if profile.name and profile.name in seen:
        about_model.refuse("name", "duplicate", f"profile {quote(profile.name)} is declared twice")
    seen.add(profile.name)
    if not {"engine", "gpu_class"} & reader.bad:
        if not profile.gpu_class and not profile.cpu_only:
            reader.refuse(
                "gpu_class", "required", f"gpu_class is required for engine {quote(profile.engine)}"
            )
        if profile.cpu_only and profile.nodes > 1 and "nodes" not in reader.bad:
            reader.refuse("nodes", "mismatch", f"a CPU profile cannot span {profile.nodes} nodes")
        _judge_gpus(profile, reader)
    for argument in profile.args:
        owner = owner_of(argument, profile.engine)
        if holds_secret(argument):  # and so is not repeated
            says = "an argument looks like a secret, and everybody reads a command line; put it into env,"
            reader.refuse("args", "secret", f"{says} and {HOW_TO_REFER}")
        elif owner:
            reader.refuse(
                "args", "owned", f"argument {quote(argument)} is set by llmgw ({owner}); leave it out"
            )
    for name, value in profile.env.items():
        if is_reference(value) and not name_in(value):
            says = f"env {quote(name)} begins with secret: and is no reference; {HOW_TO_REFER}"
            reader.refuse("env", "reference", says)


def _judge_gpus(profile: ProfileSpec, reader: Reader) -> None:
    have, need = profile.gpus_per_node * profile.nodes, profile.tp * max(profile.pp, 1)
    if profile.cpu_only or have == need or {"tp", "pp", "nodes", "gpus_per_node"} & reader.bad:
        return
    reader.refuse(
        "gpus_per_node",
        "mismatch",
        f"{profile.nodes} nodes x {profile.gpus_per_node} GPUs does not match"
        f" TP {profile.tp} x PP {max(profile.pp, 1)}",
    )
