"""Asks an engine over HTTP how it is: whether it is ready, and how many requests it has.

Ready means that it serves this very launch: it is healthy, lists the model under our key, refuses another
key, and generates. So another process that took the port is never taken for the engine. Answers are bounded
in time and size; nothing here raises for what an engine does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from nodes.engines import Adapter
from nodes.protocol import Launch

QUICK_S = 2.0
GENERATION_S = 120.0  # the first token of a large model compiles and warms up
BODY_LIMIT_BYTES = 4 * 1024 * 1024
WORDS_LIMIT = 200  # characters of an engine's own words
LONGEST_CONTEXT = 10**9  # tokens; more is a slip of whoever says so
WRONG_KEY = "llmgw-probe-with-a-wrong-key"


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests the engine runs and has waiting; None where it did not say. progress: numbers of
    which one at least changes while it works. told: the whole answer, for those who want other numbers."""

    running: int | None = None
    waiting: int | None = None
    progress: tuple[int | None, ...] = ()
    told: str = field(default="", compare=False, repr=False)

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self.waiting == 0

    @property
    def requests(self) -> int:
        return (self.running or 0) + (self.waiting or 0)

    @property
    def tells_progress(self) -> bool:
        return any(count is not None for count in self.progress)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes

    @property
    def words(self) -> str:
        text = self.body[: 4 * WORDS_LIMIT].decode("utf-8", "replace").strip()
        return "".join(each if each.isprintable() else " " for each in text)[:WORDS_LIMIT]


class _Silent(Exception):
    """It did not answer; the text is a phrase."""


class Probe:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        adapter: Adapter,
        launch: Launch,
        *,
        base_url: str,
        key: str,
        certificate: str = "",
        is_own: Callable[[str], bool] = lambda certificate: False,
    ) -> None:
        """certificate: the checksum of the one that the engine must show, where base_url is https. is_own:
        asked about another one that it shows, which it must show from then on where that is True."""
        self._session, self._adapter, self._launch = session, adapter, launch
        self._base_url, self._key = base_url, key
        self._trust = aiohttp.Fingerprint(bytes.fromhex(certificate)) if certificate else True
        self._is_own = is_own

    async def obstacle(self) -> str:
        """What stands between the engine and being ready, as a phrase; empty when it is ready."""
        try:
            return await self._obstacle()
        except _Silent as silent:
            return str(silent)

    async def _obstacle(self) -> str:
        health = await self._ask("GET", self._adapter.health_path)
        if health.status != 200:
            return f"{self._adapter.health_path} answers {health.status}: {health.words}"
        models = await self._ask("GET", "/v1/models")
        if models.status != 200:
            return f"/v1/models answers {models.status} to this replica's key: {models.words}"
        if self._launch.model not in _names(models.body):
            return f"/v1/models does not list {self._launch.model}: another engine answers on this port"
        path, asked = "/v1/completions", dict[str, Any](prompt="hello", max_tokens=1)
        if self._launch.capabilities.get("embeddings"):
            path, asked = "/v1/embeddings", {"input": "hello"}
        asked["model"] = self._launch.model
        # Here and not at /v1/models, which some builds of llama-server leave open.
        stranger = await self._ask("POST", path, body=asked, key=WRONG_KEY, timeout_s=GENERATION_S)
        if stranger.status != 401:
            return f"{path} answers {stranger.status} to a wrong key instead of 401"
        generated = await self._ask("POST", path, body=asked, timeout_s=GENERATION_S)
        if generated.status != 200:
            return f"{path} answers {generated.status} to a first request: {generated.words}"
        return ""

    async def is_healthy(self) -> bool:
        try:
            return (await self._ask("GET", self._adapter.health_path)).status == 200
        except _Silent:
            return False

    async def load(self) -> Load:
        try:
            metrics = await self._ask("GET", self._adapter.metrics_path)
        except _Silent:
            return Load()
        if metrics.status != 200:
            return Load()
        text = metrics.body.decode("utf-8", "replace")
        return Load(
            total_of(text, self._adapter.running),
            total_of(text, self._adapter.waiting),
            tuple(total_of(text, name) for name in self._adapter.progress),
            told=text,
        )

    async def context_length(self) -> int | None:
        """What one request may have, in tokens; None where it does not say."""
        try:
            answer = await self._ask("GET", self._adapter.context_path)
        except _Silent:
            return None
        return _number_at(answer.body, self._adapter.context_keys) if answer.status == 200 else None

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        key: str = "",
        body: dict[str, Any] | None = None,
        timeout_s: float = QUICK_S,
    ) -> _Answer:
        try:
            async with self._session.request(
                method,
                self._base_url + path,
                headers={"Authorization": f"Bearer {key or self._key}"},
                json=body,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                ssl=self._trust,
            ) as response:
                taken = bytearray()
                async for chunk in response.content.iter_any():
                    taken += chunk
                    if len(taken) > BODY_LIMIT_BYTES:
                        raise _Silent(f"{path} answers without end")
                return _Answer(response.status, bytes(taken))
        except TimeoutError:
            raise _Silent(f"{path} did not answer within {timeout_s:g} s") from None
        except aiohttp.ServerFingerprintMismatch as other:
            if self._is_own(other.got.hex()):
                self._trust = aiohttp.Fingerprint(other.got)
                raise _Silent("its certificate was renewed") from None
            raise _Silent("what listens there shows another certificate than it was started with") from None
        except aiohttp.ClientSSLError:
            raise _Silent("what listens there does not speak TLS") from None
        except aiohttp.ClientConnectorError:
            raise _Silent("it does not listen yet") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Silent(f"{path} broke off ({type(error).__name__})") from None


def _names(body: bytes) -> list[str]:
    try:
        return [entry["id"] for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _number_at(body: bytes, keys: Sequence[str | int]) -> int | None:
    try:
        found: Any = json.loads(body)
        for key in keys:
            found = found[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if type(found) is int and 0 < found <= LONGEST_CONTEXT else None


def total_of(metrics: str, name: str) -> int | None:
    """The sum of one metric over its labels."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? ([0-9.eE+]+)$", metrics, re.MULTILINE)
    try:
        return round(sum(map(float, found))) if found else None
    except (ValueError, OverflowError):
        return None
