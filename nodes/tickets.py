"""What lets one node read weights from another: a ticket that the control plane signs with the token of the
node that is read from. So that node alone can tell whether it is real, and there is no secret to hand around.

It is good for one key, one reader and some minutes, by the control plane's clock, which tells agents its time
whenever it asks for their state.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

TICKET_S = 600
_KEY = re.compile(r"[0-9a-f]{32}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TICKET = re.compile(r"(\d{1,12})\.([0-9a-f-]{36})\.([0-9a-f]{64}(?:-[0-9a-f]{64}){0,3})")


def weights_key(repo: str, revision: str) -> str:
    """What a repository is called between nodes, at one commit."""
    return hashlib.sha256(f"{repo}\n{revision}".encode()).hexdigest()[:32]


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def is_commit(revision: str) -> bool:
    """Whether it can only ever mean one content."""
    return _COMMIT.fullmatch(revision) is not None


def sign(tokens: Sequence[str], *, key: str, reader: str, until_s: int) -> str:
    """tokens: those that the node which is read from may hold; several while a cluster key is rotated."""
    signatures = "-".join(_signature(token, key, reader, until_s) for token in tokens)
    return f"{until_s}.{reader}.{signatures}"


def opens(ticket: str, *, token: str, key: str, now_s: float) -> bool:
    """Whether it opens the weights of this key at the node with this token."""
    found = _TICKET.fullmatch(ticket)
    if found is None or int(found[1]) <= now_s:
        return False
    wanted = _signature(token, key, found[2], int(found[1]))
    return any(hmac.compare_digest(each, wanted) for each in found[3].split("-"))


def _signature(token: str, key: str, reader: str, until_s: int) -> str:
    text = "\n".join(("llmgw", "weights", key, reader, str(until_s)))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
