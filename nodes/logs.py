"""What an engine wrote, asked of its node's agent: the end of its log, and what it writes from now on.

An engine is believed about nothing, its log included: lines are bounded, and `visible` makes them fit to be
shown anywhere.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import closing

from django.conf import settings

from catalog.reading import shown
from nodes import conversation
from nodes.conversation import AgentProblem
from nodes.models import Node

TAIL_LINES_LIMIT = 5_000  # as agents have it
TAIL_LIMIT_BYTES = 4 << 20
LINE_LIMIT = 4_000
PIECE_LIMIT_BYTES = 64 * 1024  # without an end of a line; then it is told as it is


class NoLog(AgentProblem):
    """Its agent answers, and has no such log."""


def read_log(node: Node, replica: str, *, tail: int = 200, attempt: int | None = None) -> str:
    """The last lines of its last process, or of that attempt's. Raises AgentProblem."""
    return asyncio.run(_read_log(node, replica, tail, attempt))


async def _read_log(node: Node, replica: str, tail: int, attempt: int | None) -> str:
    async with conversation.open_session() as session:
        path, params = _address(replica, tail, attempt)
        answer = await conversation.ask(session, node, "GET", path, params=params, limit=TAIL_LIMIT_BYTES)
    if answer.status != 200:
        raise _problem(node, answer)
    return answer.body.decode("utf-8", "replace")


async def follow_log(
    node: Node, replica: str, *, tail: int = 200, attempt: int | None = None
) -> AsyncGenerator[str, None]:
    """The same, and what comes after it until the process is over; whole lines. Raises AgentProblem."""
    path, params = _address(replica, tail, attempt)
    async with conversation.open_session() as session:
        with conversation.problems(node):
            async with asyncio.timeout(settings.LLMGW_AGENT_TIMEOUT_S):
                response = await conversation.opened(
                    session, node, "GET", path, params=params | {"follow": "1"}
                )
            with closing(response):
                if response.status != 200:
                    raise _problem(node, await conversation.read_answer(response))
                held = b""
                async for chunk in response.content.iter_any():
                    held += chunk
                    end = len(held) if len(held) > PIECE_LIMIT_BYTES else held.rfind(b"\n") + 1
                    if end:
                        yield held[:end].decode("utf-8", "replace")
                        held = held[end:]
                if held:
                    yield held.decode("utf-8", "replace")


def visible(log: str) -> str:
    """With what cannot be seen, or moves a terminal, made visible; line ends and tabs stay what they do."""
    return "\n".join(shown(line.expandtabs(), LINE_LIMIT) for line in log.split("\n"))


def _address(replica: str, tail: int, attempt: int | None) -> tuple[str, dict[str, str]]:
    params = {"tail": str(tail)} | ({} if attempt is None else {"attempt": str(attempt)})
    return f"/v1/replicas/{uuid.UUID(replica)}/log", params


def _problem(node: Node, answer: conversation.Answer) -> AgentProblem:
    kind = NoLog if answer.status == 404 else AgentProblem
    return kind(conversation.refusal(node, answer))
