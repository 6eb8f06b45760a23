"""Which tool an answer calls, if any: vllm's rules and refusals.

Where the model would choose, the last message gets the tool that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nodes.agent.sim.refusals import Refused, invalid

TOOLS_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: object  # its schema


@dataclass(frozen=True, slots=True)
class Call:
    """is_named: whether the request left no choice. Such a call is finished with "stop", as in vllm."""

    tool: Tool
    is_named: bool = False


def choose_call(body: Mapping[str, Any], *, has_parser: bool, is_choosing: bool) -> Call | None:
    """Raises Refused as vllm does."""
    tools = _tools(body.get("tools"))
    choice = body.get("tool_choice")
    if not tools:
        if choice not in (None, "none"):
            raise Refused(400, "When using `tool_choice`, `tools` must be set.")
        return None
    if choice == "none":
        return None
    if choice in (None, "auto"):
        if not (has_parser and is_choosing):
            raise Refused(
                400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        named = _named_last(body.get("messages"), tools)
        return Call(named) if named else None
    if choice == "required":
        if not has_parser:
            raise Refused(400, 'tool_choice="required" requires --tool-call-parser to be set')
        return Call(_named_last(body.get("messages"), tools) or tools[0])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid("body.tool_choice", "literal_error", "Input should be a valid tool choice", choice)
    if not has_parser:
        raise Refused(400, f'tool_choice=function "{name}" requires --tool-call-parser to be set')
    chosen = next((tool for tool in tools if tool.name == name), None)
    if chosen is None:
        raise Refused(400, "The tool specified in `tool_choice` does not match any of the specified `tools`")
    return Call(chosen, is_named=True)


def _tools(given: object) -> list[Tool]:
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > TOOLS_LIMIT:
        raise invalid("body.tools", "list_type", "Input should be a valid list", given)
    tools = []
    for index, each in enumerate(given):
        function = each.get("function") if isinstance(each, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise invalid(f"body.tools.{index}.function", "missing", "Field required", each)
        tools.append(Tool(name, function.get("parameters") or {"type": "object"}))
    return tools


def _named_last(messages: object, tools: list[Tool]) -> Tool | None:
    """What the user names is called once: what follows a tool's result is an answer."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") == "tool":
        return None
    said = str(last.get("content"))
    return next((tool for tool in tools if tool.name in said), None)
