"""Tells the control plane at once that something has changed here: it looks again by itself, only later.

A hint says nothing but that: what has changed, the next report tells. So one that is lost does no harm, is
not sent again, and several at once are one.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from nodes.agent.configuration import Identity

log = logging.getLogger("llmgw.agent")

GAP_S = 0.2  # between two: ranks often change together
PATIENCE_S = 5.0


class HintError(Exception):
    """The control plane did not take a hint; the text is the sentence."""


class Hints:
    """Sends while `send` runs. Without a control plane nothing is sent, and nobody need ask."""

    def __init__(self, url: str, identity: Identity, session: aiohttp.ClientSession) -> None:
        self._url, self._identity, self._session = url, identity, session
        self._has_changed = asyncio.Event()

    def tell(self) -> None:
        """Something has changed. Returns at once."""
        self._has_changed.set()

    async def send(self) -> None:
        """Until it is cancelled. The log tells of the first of several failures."""
        is_heard = True
        while self._url:
            await self._has_changed.wait()
            self._has_changed.clear()
            try:
                await hint(self._url, self._identity, self._session)
                is_heard = True
            except HintError as error:
                if is_heard:
                    log.warning("%s It looks by itself meanwhile, somewhat later.", error)
                is_heard = False
            await asyncio.sleep(GAP_S)


async def hint(url: str, identity: Identity, session: aiohttp.ClientSession) -> None:
    """Raises HintError."""
    headers = {"Authorization": f"Bearer {identity.token}"}
    address = f"{url}/api/nodes/{identity.node}/hint"
    patience = aiohttp.ClientTimeout(total=PATIENCE_S)
    try:
        async with session.post(address, headers=headers, timeout=patience, allow_redirects=False) as answer:
            status = answer.status
    except TimeoutError:
        raise HintError(f"llmgw at {url} did not answer within {PATIENCE_S:g} s.") from None
    except (aiohttp.ClientError, OSError, ValueError) as fault:
        raise HintError(f"llmgw at {url} cannot be reached ({fault}).") from None
    if status in (401, 403):
        raise HintError(
            f"llmgw at {url} does not know this node's token: the node was removed, or joined elsewhere; "
            f"join it again."
        )
    if status != 204:
        raise HintError(f"llmgw at {url} answered a hint with status {status}; is that its address?")
