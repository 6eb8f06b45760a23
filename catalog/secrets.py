"""Secrets, and references to them: an environment value `secret:NAME` stands for what only agents know.

The reference is what the catalog, its files, a launch and every screen hold. An agent looks the value up
where its own operator put it, for the engine's environment alone.
"""

import re

BEGINNING = "secret:"
HOW_TO_REFER = "write secret:NAME, the name of 1 to 64 letters, digits or _"

_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_SECRET = re.compile(r"(hf_|sk-|llmgw_)[0-9A-Za-z_-]{16}|://[^/@\s]*:[^/@\s]+@|-----BEGIN ")


def is_reference(value: str) -> bool:
    """Whether it means to be one, well formed or not."""
    return value.startswith(BEGINNING)


def name_in(value: str) -> str:
    """The name in a well-formed reference; empty for everything else."""
    name = value.removeprefix(BEGINNING)
    return name if is_reference(value) and _NAME.fullmatch(name) else ""


def holds_secret(value: str) -> bool:
    """Whether it looks like a token, a key or an address with a password, whatever it is called."""
    return bool(_SECRET.search(value))
