"""Where the agent of a machine that has joined lives: its files, how they are written, and who may read them.

<home>/agent.toml       what the agent is told; written once, then the operator's
<home>/identity.json    who the node is, mode 0600
<home>/claim            tells the control plane that a repeated join is the same one, mode 0600
<home>/tls.crt, tls.key what the agent's door shows beyond loopback, and engines with --engine-tls, unless
                        another certificate is given
<home>/state            what the agent keeps
<home>/run, uninstall   start the agent; take all of it off again
<home>/releases         the agent's code (install.py)
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodes.agent.configuration import Identity, read_identity
from nodes.agent.files import write_text
from nodes.agent.install import NAME
from nodes.agent.inventory import ROOT
from nodes.agent.options import OPTIONS, TABLE
from nodes.certificates import checksum_of


class HomeError(Exception):
    """Something that belongs there cannot be made; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where everything is."""

    path: Path

    @property
    def toml(self) -> Path:
        return self.path / "agent.toml"

    @property
    def identity(self) -> Path:
        return self.path / "identity.json"

    @property
    def claim(self) -> Path:
        return self.path / "claim"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def certificate(self) -> Path:
        return self.path / "tls.crt"

    @property
    def key(self) -> Path:
        return self.path / "tls.key"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def uninstall(self) -> Path:
        return self.path / "uninstall"

    def known(self) -> Identity | None:
        """Who the node is already. Raises ConfigurationError."""
        return read_identity(self.identity) if self.identity.exists() else None

    def is_agent_running(self) -> bool:
        """Whether one holds the state folder."""
        try:
            lock = os.open(self.state / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def agent_number(self) -> int | None:
        """Of the process that holds it, where this machine tells."""
        try:
            inode = (self.state / "lock").stat().st_ino
            told = Path("/proc/locks").read_text()
        except OSError:
            return None
        for line in told.splitlines():  # such as "1: FLOCK  ADVISORY  WRITE 4242 08:01:131 0 EOF"
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                return int(words[4])
        return None

    def has_certificate(self) -> bool:
        """Whether there is one of our own, made now if possible. The control plane knows it by its
        checksum, so that nobody need sign it."""
        if self.certificate.exists() and self.key.exists():
            return True
        openssl = shutil.which("openssl")
        if openssl is None:
            print("There is no openssl here, so the agent's own door has no TLS either.", flush=True)
            return False
        with tempfile.TemporaryDirectory(dir=self.path) as folder:  # mode 0700
            certificate, key = Path(folder, "crt"), Path(folder, "key")
            done = subprocess.run(
                [
                    *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                    *("-nodes", "-keyout", str(key), "-out", str(certificate)),
                    *("-days", "36500", "-subj", f"/CN={NAME}"),
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise HomeError(
                    f"openssl made no certificate ({done.stderr.strip()[-200:]}); give one with "
                    f"--tls-certificate and --tls-key."
                )
            key.chmod(0o600)
            key.replace(self.key)
            certificate.replace(self.certificate)
        return True

    def checksum(self) -> str:
        """SHA-256 of what a TLS client is shown, in hex."""
        return checksum_of(self.certificate.read_text())

    def write_scripts(self) -> None:
        """They lead to this release, and trust whom this join trusted."""
        python = shlex.quote(sys.executable)
        trust = os.environ.get("SSL_CERT_FILE", "")
        head = ["#!/bin/sh", f"cd {shlex.quote(str(ROOT))} || exit"]
        head += [f"export SSL_CERT_FILE={shlex.quote(trust)}"] if trust else []
        start = f'exec {python} -m nodes.agent --config {shlex.quote(str(self.toml))} "$@"'
        end = f'exec {python} -m nodes.agent.join --uninstall --home {shlex.quote(str(self.path))} "$@"'
        for path, line in ((self.run, start), (self.uninstall, end)):
            write_text(path, "\n".join([*head, line]) + "\n", 0o700)


_HEAD = """\
# What this node's agent is told. {run} --help lists the options, {run} --check judges them.
# A change takes effect when the agent is restarted; its engines run on meanwhile.
"""


def as_toml(told: Mapping[str, Any]) -> str:
    tables = {option.key for option in OPTIONS if option.kind == TABLE}
    run = shlex.quote(str(Path(told["state"]).with_name("run")))
    lines = [_HEAD.format(run=run)]
    lines += [f"{name} = {toml_value(value)}" for name, value in told.items() if name not in tables]
    for name in tables & told.keys():
        lines += ["", f"[{name}]"]
        lines += [f"{toml_value(key)} = {toml_value(value)}" for key, value in told[name].items()]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A text, a yes, or a list or a table of texts. JSON's texts are TOML's, but for one character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
