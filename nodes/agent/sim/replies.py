"""One answer on the wire, whole or in pieces, in vllm's shapes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from nodes.agent.sim.answers import Answer
from nodes.agent.sim.asks import Ask


class Reply:
    def __init__(self, reply_id: str, model: str, ask: Ask, answers: Sequence[Answer]) -> None:
        self.ask, self.answers = ask, answers
        self._head: dict[str, Any] = {
            "id": reply_id,
            "created": int(time.clock_gettime(time.CLOCK_REALTIME)),
            "model": model,
        }
        self._cached_tokens: tuple[int, int] | None = None
        kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        self._chunk_head = json.dumps({**self._head, "object": kind})[:-1]
        said, end = '"text": ', ""
        if ask.call is not None:
            said = '"delta": {"content": null, "tool_calls": [{"index": 0, "function": {"arguments": '
            end = "}}]}"
        elif ask.is_chat:
            said, end = '"delta": {"content": ', "}"
        self._before = [
            f'data: {self._chunk_head}, "choices": [{{"index": {index}, {said}'.encode()
            for index in range(len(answers))
        ]
        self._after = f'{end}, "logprobs": null, "finish_reason": null}}]}}\n\n'.encode()

    def tell_cached(self, found: int, kept: int) -> None:
        """How many of the prompt's tokens were cached, and how many are now that were not."""
        self._cached_tokens = (found, kept)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            said: dict[str, Any] = {"text": answer.text}
            if self.ask.is_chat:
                said = {"message": self._message(index, answer)}
            ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            choices.append({"index": index, **said, "logprobs": None, **ending})
        kind = "chat.completion" if self.ask.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def pieces(self, told: int, due: int) -> bytes:
        opening = self._opening() if self.ask.is_chat and told == 0 else b""
        # Put together from parts: this is what a benchmark of everything around the engine waits for.
        return opening + b"".join(
            before + json.dumps(piece).encode() + self._after
            for position in range(told, due)
            for before, answer in zip(self._before, self.answers, strict=True)
            for piece in answer.pieces[position : position + 1]
        )

    def closing(self) -> bytes:
        chunks = [self._chunk(self._ending(index, answer)) for index, answer in enumerate(self.answers)]
        if self.ask.wants_usage:
            usage = json.dumps(self._usage())
            chunks.append(f'data: {self._chunk_head}, "choices": [], "usage": {usage}}}\n\n'.encode())
        return b"".join(chunks) + b"data: [DONE]\n\n"

    def _message(self, index: int, answer: Answer) -> dict[str, Any]:
        if self.ask.call is None:
            return {"role": "assistant", "content": answer.text}
        function = {"name": self.ask.call.tool.name, "arguments": answer.text}
        call = {"id": self._call_id(index), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _opening(self) -> bytes:
        """Who speaks, and which tool is called: as with vllm it comes with the first token, not before."""
        rest = {"logprobs": None, "finish_reason": None}
        deltas: list[dict[str, Any]] = []
        for index in range(len(self.answers)):
            deltas.append({"index": index, "delta": {"role": "assistant", "content": ""}, **rest})
            if self.ask.call is not None:
                function = {"name": self.ask.call.tool.name}
                call = {"id": self._call_id(index), "type": "function", "index": 0, "function": function}
                deltas.append({"index": index, "delta": {"content": None, "tool_calls": [call]}, **rest})
        return b"".join(map(self._chunk, deltas))

    def _ending(self, index: int, answer: Answer) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {}} if self.ask.is_chat else {"text": ""}
        ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        return {"index": index, **said, "logprobs": None, **ending}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return f'data: {self._chunk_head}, "choices": [{json.dumps(choice)}]}}\n\n'.encode()

    def _call_id(self, index: int) -> str:
        return f"chatcmpl-tool-{self._head['id'].partition('-')[2]}-{index}"

    def _usage(self) -> dict[str, Any]:
        said = sum(answer.tokens for answer in self.answers)
        prompt = self.ask.prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + said,
            "completion_tokens": said,
        }
        if self._cached_tokens is not None:
            found, kept = self._cached_tokens
            usage["prompt_tokens_details"] = {
                "cached_tokens": found,
                "created_cache_tokens": kept,
                "multimodal_tokens": None,
            }
        return usage
