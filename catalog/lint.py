"""What the law lets through and is seldom meant: each time one sentence with its reason and the next step.

Judges a model as it is written, and what its source is known to hold. Nothing here refuses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.arguments import LLAMA_SLOTS, is_given, last_given
from catalog.durations import HOUR, MINUTE, format_duration
from catalog.hiding import looks_secret
from catalog.owned import OWNED_ENV
from catalog.proposals import known_number
from catalog.reading import quote
from catalog.spec import ModelSpec, ProfileSpec

_GB = 1_000_000_000
LONG_HOLD = HOUR

# Where an engine is told the length of its context.
_CONTEXT = {"vllm": ("--max-model-len",), "sglang": ("--context-length",)}
_LLAMA_CONTEXT, _LLAMA_SLOTS = ("-c", "--ctx-size"), ("-np", "--parallel")
_LLAMA_SHARED = ("-kvu", "--kv-unified")
_LLAMA_SHARED_OR_NOT = (*_LLAMA_SHARED, "-no-kvu", "--no-kv-unified")
_LLAMA_EACH = ("--kv-unified-per-slot",)

# What becomes of tool calls without a parser for them.
_WITHOUT_PARSER = {
    "vllm": "so vllm refuses requests that bring tools",
    "sglang": "so sglang answers calls as plain text",
}


@dataclass(frozen=True, slots=True)
class Lint:
    """One thing to look at. profile is empty where it is about the model; field is the law's name for it."""

    profile: str
    field: str
    code: str
    sentence: str


def lint(model: ModelSpec, facts: Mapping[str, Any]) -> tuple[Lint, ...]:
    """`facts` are those of a source check, as found or as a row has kept them; any may be absent."""
    found = list(_of_model(model, facts))
    for profile in model.profiles:
        where = f"model {quote(model.name)} profile {quote(profile.name)}"
        for field, code, says in _of_profile(model, profile, facts):
            found.append(Lint(profile.name, field, code, f"{where}: {says}"))
    return tuple(found)


def _of_model(model: ModelSpec, facts: Mapping[str, Any]) -> Iterator[Lint]:
    on = f"model {quote(model.name)}"
    idle_timeout = model.scaling.idle_timeout
    if 0 < idle_timeout < MINUTE:
        says = (
            f"idle_timeout {format_duration(idle_timeout)} is under a minute; each unloading throws away the"
            " KV cache that routing filled, so give it longer"
        )
        yield Lint("", "scaling.idle_timeout", "idle_timeout_short", f"{on}: {says}")
    own = known_number(facts, "context_length")
    if own and model.context_length > own:
        says = (
            f"context_length {model.context_length} is above the {own} that the model was made for, beyond"
            " which engines refuse to start or answers turn to noise; lower it, unless args extend it"
        )
        yield Lint("", "context_length", "context_above", f"{on}: {says}")
    for field, code, says in _of_bounds(model):
        yield Lint("", field, code, f"{on}: {says}")
    profiles = len(model.profiles)
    if profiles > 1 and all(profile.weight == 1 for profile in model.profiles):
        says = (
            f"none of its {profiles} profiles has a weight, so requests take them for equally fast; measure"
            " them, and give each its weight"
        )
        yield Lint("", "weight", "weight_unmeasured", f"{on}: {says}")


def _of_bounds(model: ModelSpec) -> Iterator[tuple[str, str, str]]:
    """Where one setting of what bounds a model's requests keeps another from ever mattering."""
    context, output, timeouts = model.context_length, model.max_output, model.timeouts
    if 0 < context < output:
        says = (
            f"max_output {output} is above the context_length {context}, which ends every answer before;"
            " lower it, or leave it out"
        )
        yield "max_output", "output_above", says
    if model.over_max_output and not output:
        says = (
            f"over_max_output {model.over_max_output} is for requests that ask for more than max_output, and"
            " there is none; set max_output, or leave it out"
        )
        yield "limits.over_max_output", "output_unlimited", says
    largest, whose = (context, "context_length") if context else (output, "max_output")
    if 0 < model.limits.tokens_per_minute < largest:
        says = (
            f"tokens_per_minute {model.limits.tokens_per_minute} is below the {whose} {largest}, so that one"
            " request may need more than a minute has; raise it"
        )
        yield "limits.tokens_per_minute", "tokens_below", says
    if timeouts.hold > LONG_HOLD:
        says = (
            f"hold {format_duration(timeouts.hold)} is longer than clients and what stands between keep a"
            f" connection without a word; {format_duration(LONG_HOLD)} is plenty"
        )
        yield "timeouts.hold", "hold_long", says
    promises = (
        ("first_byte", timeouts.first_byte, "TTFTp99", model.slo.ttft_p99),
        ("idle", timeouts.idle, "TPOTp99", model.slo.tpot_p99),
    )
    for key, waits, promise, promised in promises:
        if 0 < waits < promised:
            says = (
                f"{key} {format_duration(waits)} gives up before the {promise} of"
                f" {format_duration(promised)} that is promised; raise it"
            )
            yield f"timeouts.{key}", "promise_cut", says


def _of_profile(
    model: ModelSpec, profile: ProfileSpec, facts: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    yield from _of_env(profile)
    yield from _of_context(model.context_length, profile)
    why = _WITHOUT_PARSER.get(profile.engine)
    if why and model.capabilities.tools and not is_given(profile.args, ("--tool-call-parser",)):
        says = f"the model declares tools and there is no --tool-call-parser, {why}; add one that fits it"
        yield "args", "tool_parser", says
    if is_given(profile.args, ("--trust-remote-code",)):
        says = (
            "--trust-remote-code runs code from the repository on the node; leave it out unless the engine"
            " cannot do without it and you trust its author"
        )
        yield "args", "remote_code", says
    heads = known_number(facts, "attention_heads")
    if heads and heads % profile.tp and profile.engine in _CONTEXT:
        says = f"tp {profile.tp} does not divide the model's {heads} attention heads; choose one that does"
        yield "tp", "tp_indivisible", says
    size_bytes = known_number(facts, "bytes") if facts.get("commit") else 0  # a path is not fetched
    if profile.engine != "sim" and 0 < profile.min_disk_gb * _GB < size_bytes:
        says = (
            f"min_disk_gb {profile.min_disk_gb} is below the {size_bytes / _GB:.1f} GB that the weights take;"
            f" set it to {-(-size_bytes // _GB)}, or leave it out"
        )
        yield "min_disk_gb", "disk_small", says


def _of_env(profile: ProfileSpec) -> Iterator[tuple[str, str, str]]:
    for name, value in profile.env.items():
        if name in OWNED_ENV:
            says = f"{name} is set by the node, whose value wins; remove it from env"
            yield "env", "env_owned", says
        elif looks_secret(name, value):
            says = (
                f"the value of {quote(name)} is kept in the catalog as plain text; write secret:NAME and give"
                " NAME to the agents"
            )
            yield "env", "plain_secret", says


def _of_context(declared: int, profile: ProfileSpec) -> Iterator[tuple[str, str, str]]:
    """Requests are let in by the context_length that is declared; the engine has the one that it is told."""
    if not declared:
        return
    if profile.engine == "llamacpp":
        yield from _of_llama_context(declared, profile)
    told = last_given(profile.args, _CONTEXT.get(profile.engine, ()))
    if told and 0 < _number(told[1]) < declared:
        says = f"{told[0]} {told[1]} is below the context_length {declared}; give one of the two alone"
        yield "args", "context_below", says


def _of_llama_context(declared: int, profile: ProfileSpec) -> Iterator[tuple[str, str, str]]:
    """Slots divide the context; with a unified cache each takes from all of it, and they may overrun it."""
    slots = _number((last_given(profile.args, _LLAMA_SLOTS) or ("", str(LLAMA_SLOTS)))[1])
    total = _number((last_given(profile.args, _LLAMA_CONTEXT) or ("", ""))[1])
    each = _number((last_given(profile.args, _LLAMA_EACH) or ("", ""))[1])
    shared = last_given(profile.args, _LLAMA_SHARED_OR_NOT)
    enough = f"give --ctx-size {slots * declared}, or leave it out"
    if each:
        if each < declared:
            says = f"--kv-unified-per-slot {each} is below the context_length {declared}; raise it"
            yield "args", "context_below", says
    elif not slots or not total:
        return
    elif shared and shared[0] in _LLAMA_SHARED:
        if total < slots * declared:
            says = (
                f"{slots} requests at once share --ctx-size {total}, and each may fill the context_length"
                f" {declared}: when they overrun it together all of them end; {enough}"
            )
            yield "args", "context_shared", says
    elif total // slots < declared:
        says = (
            f"--ctx-size {total} over {slots} parallel slots leaves each request {total // slots} tokens,"
            f" below the context_length {declared}; {enough}"
        )
        yield "args", "context_divided", says


def _number(text: str) -> int:
    """0 where it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
