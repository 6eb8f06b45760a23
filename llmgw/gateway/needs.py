"""What a request needs of the model that answers it, and which models and replicas can give that.

The door asks it of the model that was named, the relay of a fallback before it is tried: both by the same
functions, so that a request is never sent where it was to be refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from catalog.reading import quote
from llmgw.gateway import context, surface
from llmgw.gateway.admission import KeyEntry, ModelEntry, Refused
from llmgw.gateway.context import Span
from llmgw.gateway.routing import Target
from llmgw.gateway.surface import Endpoint

TOOLS, VISION = "tools", "vision"
NAMED_LIMIT = 5
"""How many other models a refusal names."""

_ASKED_FOR = {
    TOOLS: "calls of tools",
    VISION: "images",
    "embeddings": "embeddings",
}


NONE: frozenset[str] = frozenset()


class Needs(NamedTuple):
    """`output_tokens` is what the client asked for at most, 0 where it left that open."""

    endpoint: Endpoint
    capabilities: frozenset[str] = NONE
    prompt: Span = context.UNKNOWN
    output_tokens: int = 0

    @property
    def room_for_output(self) -> int:
        """A prompt that leaves no token for an answer is refused by every engine."""
        return self.output_tokens or (1 if self.endpoint.output_fields else 0)


def opens(key: KeyEntry, model: ModelEntry) -> bool:
    return key.models is None or model.id in key.models


def visible_names(key: KeyEntry, names: Mapping[str, int]) -> Collection[str]:
    """The names, aliases too, that this key may know of."""
    allowed = key.models
    return names.keys() if allowed is None else [name for name, model in names.items() if model in allowed]


def check_model(model: ModelEntry, needs: Needs, others: Iterable[ModelEntry]) -> None:
    """`others` are the models that the key opens: those that can do what this one cannot are named."""
    surface.check_spoken(needs.endpoint, model)
    lacking = _lacking(model, needs)
    if lacking:
        raise _unable(model, lacking, [other for other in others if not _lacking(other, needs)])


def _lacking(model: ModelEntry, needs: Needs) -> list[str]:
    if not needs.capabilities:
        return []
    return sorted(name for name in needs.capabilities if not model.capabilities.get(name))


def _unable(model: ModelEntry, lacking: Sequence[str], able: Sequence[ModelEntry]) -> Refused:
    what = " and ".join(_ASKED_FOR.get(name, name) for name in lacking)
    names = sorted(other.name for other in able)
    if not names:
        step = "No model that this key may use can: ask an operator for one."
    else:
        more = " and others" if len(names) > NAMED_LIMIT else ""
        step = f"Use {' or '.join(quote(name) for name in names[:NAMED_LIMIT])}{more}."
    return Refused(
        400,
        "unsupported_capability",
        f"The model {quote(model.name)} is not set up for {what}. {step}",
        param="model",
    )


# --- context ------------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """What a model's replicas take: `context_length` as `context_of` has it, which the best of them takes;
    `least` is what each of them takes, endless where none says so; `spoken` are the paths of the endpoints
    that the model has and that all of them speak."""

    context_length: int = 0
    least: float = inf
    spoken: frozenset[str] = NONE

    @classmethod
    def of(cls, model: ModelEntry, targets: Sequence[Target]) -> Reach:
        known = [length for target in targets if (length := target.context_length or model.context_length)]
        engines = frozenset(target.engine for target in targets if target.engine)
        return cls(context_of(model, targets), min(known, default=inf), _spoken(model.engines, engines))

    def holds(self, needs: Needs) -> bool:
        """Whether surely every one of them can take such a request, which nearly always is so."""
        endpoint, _, prompt, output_tokens = needs
        return endpoint.path in self.spoken and prompt.least + (output_tokens or 1) <= self.least

    def is_plain(self, model: ModelEntry, needs: Needs) -> bool:
        """Whether there surely is nothing to refuse of a request to this model, nothing to count and nothing
        to cut down, as `check_model`, `check_context` and `allowed_output` would find out one by one."""
        endpoint, capabilities, prompt, output_tokens = needs
        if capabilities or endpoint.path not in self.spoken:
            return False
        if model.max_output and not 0 < output_tokens <= model.max_output:
            return False
        if not self.context_length:
            return True
        return prompt.most is not None and prompt.most + (output_tokens or 1) <= self.context_length


@lru_cache(maxsize=1024)
def _spoken(engines: tuple[str, ...], running: frozenset[str]) -> frozenset[str]:
    return frozenset(
        endpoint.path
        for endpoint in surface.ENDPOINTS.values()
        if surface.is_spoken(endpoint, engines) and running <= endpoint.engines.keys()
    )


def context_of(model: ModelEntry, targets: Iterable[Target]) -> int:
    """What a request to this model may really use, prompt and answer together: the most that one of its
    running engines takes, else what the catalog says. 0 is not known."""
    known = [target.context_length or model.context_length for target in targets]
    if not known:
        return model.context_length
    return 0 if 0 in known else max(known)


def check_context(model: ModelEntry, context_length: int, prompt: Span, room_for_output: int) -> bool:
    """False where only a tokenizer can tell."""
    verdict = context.judge(prompt, room_for_output, context_length)
    if verdict == context.EXCEEDS:
        raise _too_long(model, context_length, prompt, room_for_output)
    return verdict == context.FITS


def _too_long(model: ModelEntry, context_length: int, prompt: Span, output_tokens: int) -> Refused:
    least = "" if prompt.least == prompt.most else "at least "
    needed = prompt.least + output_tokens
    return Refused(
        400,
        "context_length_exceeded",
        f"The request needs {least}{needed} tokens, {prompt.least} for the prompt and {output_tokens} for "
        f"the answer, and the model {quote(model.name)} takes {context_length} in all: shorten the prompt, "
        "or ask for fewer tokens.",
        param="messages",
    )


def fits(model: ModelEntry, targets: Sequence[Target], needs: Needs, key: KeyEntry) -> bool:
    """Whether a request may go to this model in the place of another."""
    if not opens(key, model) or _lacking(model, needs):
        return False
    if model.engines and not any(needs.endpoint.path_on(engine) for engine in model.engines):
        return False
    if 0 < model.max_output < needs.output_tokens:
        return False
    verdict = context.judge(needs.prompt, needs.room_for_output, context_of(model, targets))
    return verdict != context.EXCEEDS


def fitting(model: ModelEntry, targets: Sequence[Target], needs: Needs) -> Sequence[Target]:
    """Those of a model's replicas that can take this request: their engine speaks the endpoint, and its
    context is not surely too short. Where all can, the same sequence."""
    engines, own = needs.endpoint.engines, model.context_length
    needed = needs.prompt.least + needs.room_for_output
    able = [
        target
        for target in targets
        if (not target.engine or target.engine in engines)  # as `path_on` has it
        and (not (length := target.context_length or own) or needed <= length)
    ]
    return targets if len(able) == len(targets) else able


# --- output -------------------------------------------------------------------------------------------------


def allowed_output(model: ModelEntry, asked: int | None) -> int | None:
    """What a request may ask for, where it asks: more than the operator allows is cut down or refused, as the
    operator chose."""
    if asked is None or not 0 < model.max_output < asked:
        return asked
    if model.over_max_output == "clamp":
        return model.max_output
    raise Refused(
        400,
        "max_output_exceeded",
        f"The request asks for {asked} tokens, and the model {quote(model.name)} answers with "
        f"{model.max_output} at most: ask for fewer.",
        param="max_tokens",
    )


def has_room_for_most(model: ModelEntry, context_length: int, prompt: Span) -> bool:
    """Whether a request that asks for no number can be given the model's greatest: an engine refuses one that
    does not fit behind the prompt."""
    if not model.max_output or not context_length:
        return True
    likely = prompt.likely_most
    return likely is not None and likely + model.max_output <= context_length


def default_output(model: ModelEntry, context_length: int, prompt: Span) -> int | None:
    """What a request that asks for no number is given, so that it stays within what the operator allows. None
    where its prompt leaves an unknown rest of the context, which bounds the answer as well."""
    if not model.max_output:
        return None
    if has_room_for_most(model, context_length, prompt):
        return model.max_output
    if prompt.most == prompt.least:
        return max(1, min(model.max_output, context_length - prompt.least))
    return None
