"""From an engine's answers to findings: what it can do, what it cannot, and the sentence that says why.

A judge that cannot tell says so, and never guesses: `works` is None then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from catalog.reading import quote
from nodes.checks.answers import Reply
from nodes.checks.asking import COLOURS, MAX_TOKENS, SCHEMA, TOOL
from nodes.checks.findings import Finding

SAME = 0.999  # how alike two vectors of the same text are, where nothing but rounding differs
FREED_S = 5.0
FASTER = 0.7  # what a prompt that was cached may take of what it took before
LITTLE_S = 0.02  # below this a first token's time says nothing


def judge_health(reply: Reply) -> Finding:
    return Finding("health", reply.status == 200, "it answers" if reply.status == 200 else _no(reply))


def judge_name(listed: Reply, chat: Reply | None, name: str) -> Finding:
    if not listed.is_answered:
        return _unanswered("name", listed)
    if name not in listed.names:
        told = ", ".join(map(quote, listed.names[:5])) or "nothing"
        return Finding("name", False, f"it lists {told}, and not {quote(name)}")
    if chat is not None and chat.model and chat.model != name:
        return Finding("name", False, f"its answers say that they are of {quote(chat.model)}")
    return Finding("name", True, f"it calls itself {quote(name)}")


def judge_chat(reply: Reply) -> Finding:
    if not reply.is_answered:
        return _unanswered("chat", reply)
    if flaw := _flaw_of_answer(reply):
        return Finding("chat", False, flaw)
    return Finding("chat", True, f"it said {quote(reply.words.strip(), 60)}")


def judge_stream(reply: Reply) -> Finding:
    if not reply.is_answered:
        return _unanswered("stream", reply)
    if not reply.pieces:
        return Finding("stream", False, "no piece of its stream says anything")
    if not reply.is_closed:
        return Finding("stream", False, "its stream ends without [DONE]")
    if reply.prompt_tokens is None or reply.completion_tokens is None:
        return Finding("stream", False, "its stream ends without the usage that was asked for")
    if flaw := _flaw_of_answer(reply):
        return Finding("stream", False, flaw)
    count = "1 piece" if reply.pieces == 1 else f"{reply.pieces} pieces"
    return Finding("stream", True, f"{count}, and {reply.completion_tokens} tokens by its usage")


def _flaw_of_answer(reply: Reply) -> str:
    if not reply.words.strip():
        return "its answer holds no text"
    if reply.finish not in ("stop", "length"):
        return f"its answer ended by {quote(reply.finish)} instead of stop or length"
    if not reply.prompt_tokens or not reply.completion_tokens:
        return "it does not tell how many tokens prompt and answer have"
    return ""


def judge_stop(said: Reply, stop: str, reply: Reply | None) -> Finding:
    """said: the answer that the stop text was chosen from."""
    if not said.is_answered:
        return _unanswered("stop", said)
    if reply is None:
        return Finding("stop", None, "it said nothing from which a stop text could be taken")
    if not reply.is_answered:
        return _unanswered("stop", reply)
    if stop in reply.words:
        return Finding("stop", False, f"it went on past the stop text {quote(stop)}")
    if reply.finish != "stop":
        return Finding("stop", None, f"it never came to the stop text {quote(stop)}")
    return Finding("stop", True, f"it ended ahead of {quote(stop)}")


def judge_max_tokens(reply: Reply) -> Finding:
    if not reply.is_answered:
        return _unanswered("max_tokens", reply)
    if reply.completion_tokens is None:
        return Finding("max_tokens", None, "it does not tell how many tokens it said")
    if reply.completion_tokens > MAX_TOKENS:
        says = f"it said {reply.completion_tokens} tokens where {MAX_TOKENS} were allowed"
        return Finding("max_tokens", False, says)
    if reply.completion_tokens == MAX_TOKENS and reply.finish != "length":
        says = f"it was cut after {MAX_TOKENS} tokens, and says {quote(reply.finish)} instead of length"
        return Finding("max_tokens", False, says)
    return Finding("max_tokens", True, f"it said {reply.completion_tokens} of {MAX_TOKENS} tokens")


def judge_context(claimed: int, own: int, taken: Reply | None, refused: Reply | None) -> Finding:
    """taken, refused: what came of a prompt just below the limit and of one above it; None where none could
    be made. claimed, own: the limit by the catalog and by the engine's own word, 0 where unknown."""
    limit = own or claimed
    if not limit:
        return Finding("context", None, "neither the catalog nor the engine tells how long its context is")
    if own and claimed > own:
        says = f"the catalog promises {claimed} tokens, and it has {own}"
        return Finding("context", False, says)
    if taken is None or refused is None:
        return Finding("context", None, "it does not tell how many tokens a prompt has")
    if refused.is_answered:
        count = "more tokens" if refused.prompt_tokens is None else f"{refused.prompt_tokens} tokens"
        return Finding("context", False, f"it took a prompt of {count} where {limit} is its limit")
    if not 400 <= refused.status < 500:
        return Finding("context", False if refused.status else None, f"above its limit it {refused.refusal}")
    if not taken.status:
        return Finding("context", None, f"it refuses what is above {limit} tokens; just below, {_no(taken)}")
    if not taken.is_answered:
        return Finding("context", False, f"just below its limit of {limit} tokens it {taken.refusal}")
    told = f"{taken.prompt_tokens} of {limit} tokens" if taken.prompt_tokens else "a prompt just below"
    return Finding("context", True, f"it takes {told}, and refuses what is above")


def judge_tools(check: str, replies: Mapping[str, Reply]) -> Finding:
    """replies: by how they were asked for, such as "streamed"."""
    for how, reply in replies.items():
        if not reply.is_answered:
            finding = _unanswered(check, reply)
            return Finding(check, finding.works, f"{how}: {finding.says}")
        if flaw := _flaw_of_call(reply):
            return Finding(check, False, f"{how}: {flaw}")
    return Finding(check, True, f"it called {TOOL['function']['name']} ({', '.join(replies)})")


def _flaw_of_call(reply: Reply) -> str:
    wanted = TOOL["function"]
    if not reply.calls:
        return "it called no tool" + (f", and said {quote(reply.words.strip(), 60)}" if reply.words else "")
    for call in reply.calls:
        if call.name != wanted["name"]:
            return f"it called {quote(call.name)} instead of {wanted['name']}"
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return f"its arguments are no JSON: {quote(call.arguments)}"
        if flaw := flaw_of(arguments, wanted["parameters"]):
            return f"its arguments do not fit the tool's schema: {flaw}"
    if reply.finish not in ("tool_calls", "stop"):
        return f"its call ended by {quote(reply.finish)}"
    return ""


def judge_schema(reply: Reply) -> Finding:
    if not reply.is_answered:
        return _unanswered("json_schema", reply)
    try:
        value = json.loads(reply.text)
    except (ValueError, RecursionError):
        if reply.finish == "length":
            return Finding("json_schema", None, "its answer was cut before its JSON was whole")
        return Finding("json_schema", False, f"its answer is no JSON: {quote(reply.text.strip())}")
    if flaw := flaw_of(value, SCHEMA):
        return Finding("json_schema", False, f"its answer does not fit the schema: {flaw}")
    return Finding("json_schema", True, "its answer fits the schema")


def flaw_of(value: object, schema: Mapping[str, Any], where: str = "it") -> str:
    """What of the value is not as the schema has it; it knows what our own schemas are made of."""
    match schema["type"], value:
        case "object", dict():
            return _flaw_of_object(value, schema, where)
        case "string", str():
            if value not in schema.get("enum", [value]):
                return f"{where} is {quote(value)}"
            return f"{where} is too long" if len(value) > schema.get("maxLength", math.inf) else ""
        case "integer", int() if not isinstance(value, bool):
            return "" if schema["minimum"] <= value <= schema["maximum"] else f"{where} is {value}"
        case kind, _:
            return f"{where} is no {kind}"


def _flaw_of_object(value: Mapping[str, object], schema: Mapping[str, Any], where: str) -> str:
    for name in schema["required"]:
        if name not in value:
            return f"{where} lacks {name}"
    for name, inner in value.items():
        if name not in schema["properties"]:
            return f"{where} has {quote(name)} besides"
        if flaw := flaw_of(inner, schema["properties"][name], name):
            return flaw
    return ""


def judge_vision(replies: Mapping[str, Reply]) -> Finding:
    """replies: by the colour that was shown."""
    for colour, reply in replies.items():
        if not reply.is_answered:
            return _unanswered("vision", reply)
        said = reply.text.lower()
        if not said.strip() and reply.finish == "length":
            return Finding("vision", None, "it thought for so long that it never came to an answer")
        if colour not in said or any(other in said for other in COLOURS if other != colour):
            return Finding("vision", False, f"shown {colour}, it said {quote(reply.text.strip(), 60)}")
    return Finding("vision", True, f"it told {' from '.join(replies)}")


def judge_embeddings(once: Reply, again: Reply, other: Reply) -> Finding:
    """Of one text, of the same again, and of another."""
    for reply in (once, again, other):
        if not reply.is_answered:
            return _unanswered("embeddings", reply)
        if len(reply.vectors) != 1 or not reply.vectors[0]:
            return Finding("embeddings", False, "its answer holds no vector")
        if not all(map(math.isfinite, reply.vectors[0])) or not any(reply.vectors[0]):
            return Finding("embeddings", False, "its vector holds what is no number, or only zeros")
    first, second, third = (reply.vectors[0] for reply in (once, again, other))
    if not len(first) == len(second) == len(third):
        told = ", ".join(str(len(each)) for each in (first, second, third))
        return Finding("embeddings", False, f"its vectors differ in length ({told})")
    if alike(first, second) < SAME:
        return Finding("embeddings", False, "the same text has another vector each time")
    if alike(first, third) >= SAME:
        return Finding("embeddings", False, "different texts have the same vector")
    return Finding("embeddings", True, f"{len(first)} dimensions, the same each time")


def alike(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between them."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


def judge_cancel(
    reply: Reply, during: int | None, freed_s: float | None, limit_s: float = FREED_S
) -> Finding:
    """reply: as far as it was read. during: requests that ran meanwhile, None where the engine does not tell;
    freed_s: after how long there were fewer, None where that did not come."""
    if not reply.is_answered:
        return _unanswered("cancel", reply)
    if during is None:
        return Finding("cancel", None, "it does not tell how many requests it works on")
    if not during:
        return Finding("cancel", None, "its answer was over before its client could leave")
    if freed_s is None:
        return Finding("cancel", False, f"it still works on an answer {limit_s:g} s after its client left")
    return Finding("cancel", True, f"it stopped {max(freed_s, 0.1):.1f} s after its client left")


def judge_prefix(pairs: Sequence[tuple[Reply, Reply]], counted: int | None) -> Finding:
    """pairs: of the same prompt, asked for the first time and again. counted: how many tokens the engine says
    it found cached meanwhile, None where it does not tell."""
    for reply in (each for pair in pairs for each in pair):
        if not reply.is_answered:
            return _unanswered("prefix", reply)
    told = [again.cached_tokens for _, again in pairs if again.cached_tokens is not None]
    if any(told):
        return Finding("prefix", True, f"asked again, {max(told)} tokens were cached")
    if counted:
        return Finding("prefix", True, f"it counts {counted} tokens as cached")
    ratios = [
        again.first_s / once.first_s
        for once, again in pairs
        if once.first_s is not None and again.first_s is not None and once.first_s > LITTLE_S
    ]
    if ratios and max(ratios) <= FASTER:
        return Finding("prefix", True, f"asked again, its first token takes {max(ratios):.0%} of the time")
    if told or counted == 0:
        return Finding("prefix", False, "asked again, nothing was cached")
    return Finding("prefix", None, "it tells nothing of its cache, and is no faster when asked again")


def _unanswered(check: str, reply: Reply) -> Finding:
    """Where no answer came it cannot be told; a refusal is one."""
    return Finding(check, False if reply.status else None, f"it {reply.refusal}")


def _no(reply: Reply) -> str:
    return f"it {reply.refusal}"
