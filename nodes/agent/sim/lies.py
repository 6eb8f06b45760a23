"""What the sim engine does not keep to, on command: it accepts what it is asked and does something else, as
engines do that are set up wrongly. An engine check has to find each."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from nodes.agent.sim.asks import Ask, Served

LIES: Mapping[str, str] = {
    "name": "lists itself under another name",
    "stop": "goes on past a stop text",
    "max-tokens": "says three times as many tokens as it may",
    "usage": "streams without the usage that was asked for",
    "calls": "says words where a tool is to be called",
    "arguments": "calls tools with arguments that are no JSON",
    "schema": "says words where a JSON schema is given",
    "context": "takes prompts of any length",
    "cancel": "goes on for clients that have left",
    "vision": "sees the same colour in every picture",
    "embeddings": "has another vector for the same text each time",
}

BOUNDLESS = 2**31


def served_with(served: Served, lies: Set[str]) -> Served:
    return replace(served, context_length=BOUNDLESS) if "context" in lies else served


def asked_with(ask: Ask, lies: Set[str]) -> Ask:
    """What it makes of a request."""
    if "stop" in lies:
        ask = replace(ask, stops=())
    if "max-tokens" in lies:
        ask = replace(ask, max_tokens=3 * ask.max_tokens)
    if "usage" in lies:
        ask = replace(ask, wants_usage=False)
    if "vision" in lies and ask.is_seeing:
        ask = replace(ask, text="red")
    text = ask.text
    if ask.call is not None and "calls" in lies:
        return replace(ask, call=None, text=None, max_tokens=min(ask.max_tokens, 16))
    if ask.call is not None and text is not None and "arguments" in lies:
        return replace(ask, text=text[:-1])
    if ask.call is None and text is not None and not ask.is_seeing and "schema" in lies:
        return replace(ask, text="Of course! Here it is: {")
    return ask
