"""Looks up what a profile's `secret:NAME` stands for, on this node: LLMGW_SECRET_NAME in the agent's own
environment, or else a file NAME in the folder of secrets. Nothing else can be reached by a name, and no value
is kept, logged or told to anyone but the engine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from catalog.secrets import HOW_TO_REFER, is_reference, name_in

VARIABLE = "LLMGW_SECRET_"
LIMIT_BYTES = 64 * 1024


class SecretError(Exception):
    """A secret that this node cannot give; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """environment: the agent's own. folder: None where the agent was given none."""

    environment: Mapping[str, str] = field(repr=False)
    folder: Path | None = None

    def resolve(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment with what its references stand for. Raises SecretError."""
        return {name: self._value(name, text) if is_reference(text) else text for name, text in env.items()}

    def _value(self, variable: str, reference: str) -> str:
        name = name_in(reference)
        if not name:
            raise SecretError(f"env {variable} begins with secret: and is no reference; {HOW_TO_REFER}.")
        value = self.environment.get(VARIABLE + name, "") or self._read(name)
        if value:
            return value
        where = f" or as a file in {self.folder}" if self.folder else " or as a file in a folder of --secrets"
        raise SecretError(
            f"env {variable} wants the secret {name}, which this node does not have; give it to the agent as "
            f"{VARIABLE}{name}{where}."
        )

    def _read(self, name: str) -> str:
        """Empty where there is no such file. Not through a link, which may lead anywhere."""
        if self.folder is None:
            return ""
        path = self.folder / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise SecretError(f"The secret {path} cannot be read: {error.strerror}.") from None
        try:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise SecretError(f"The secret {path} is not a file; put its value into one.")
            if stat.S_IMODE(mode) & 0o077:
                raise SecretError(f"Others may read the secret {path}; run `chmod 600 {path}`.")
            content = os.read(handle, LIMIT_BYTES + 1).removesuffix(b"\n").removesuffix(b"\r")
        finally:
            os.close(handle)
        if len(content) > LIMIT_BYTES or b"\0" in content:
            raise SecretError(f"The secret {path} is no text of at most {LIMIT_BYTES} bytes; correct it.")
        return os.fsdecode(content)


def open_folder(path: Path | None) -> Path | None:
    """The folder of --secrets, as it is used. Raises SecretError."""
    if path is None:
        return None
    if not path.is_dir():
        raise SecretError(f"--secrets {path} is not a folder; make it, or leave the option out.")
    return path.resolve()
