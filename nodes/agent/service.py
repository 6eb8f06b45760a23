"""The agent under systemd: of the machine where root joins, else of the user.

An agent that is stopped or upgraded leaves its engines running, and systemd is told so (KillMode=process).
Engines inherit the sandbox; it leaves out what would take devices, containers or caches from them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from nodes.agent.clock import now_s
from nodes.agent.install import NAME, default_home

POLL_S = 0.1

_UNIT = """\
[Unit]
Description=llmgw agent: runs engines on this node
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh {run}
Restart=always
RestartSec=2
# Engines outlive their agent, and one that dies for want of memory does not take it along.
KillMode=process
OOMPolicy=continue
TasksMax=infinity
LimitNOFILE=1048576
LimitMEMLOCK=infinity
UMask=0077
{sandbox}
[Install]
WantedBy={target}
"""

# PrivateDevices, ProtectClock and the like would hide GPUs, PrivateTmp would empty what engines share, and
# ProtectHome would take their caches. A user's manager may set up none of it.
_SANDBOX = """\
NoNewPrivileges=yes
ProtectSystem=full
ProtectKernelTunables=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
"""


class ServiceError(Exception):
    """systemd did not do what was asked; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Service:
    is_of_user: bool
    name: str

    @classmethod
    def here(cls, home: Path, *, is_wanted: bool) -> Service | None:
        """None where systemd does not run, or not for this user. A home of its own has a unit of its own."""
        is_of_user = os.geteuid() != 0
        name = NAME if home == default_home() else f"{NAME}-{home.name}"
        service = cls(is_of_user, f"{name}.service")
        is_there = Path("/run/systemd/system").is_dir() and shutil.which("systemctl") is not None
        if not is_wanted or not is_there or (is_of_user and service._ask("show-environment").returncode):
            return None
        return service

    @property
    def tells(self) -> str:
        return f"journalctl {'--user ' * self.is_of_user}-u {self.name}"

    @property
    def file(self) -> Path:
        if not self.is_of_user:
            return Path("/etc/systemd/system", self.name)
        given = os.environ.get("XDG_CONFIG_HOME", "")
        return (
            (Path(given) if given.startswith("/") else Path.home() / ".config") / "systemd/user" / self.name
        )

    def unit(self, run: Path) -> str:
        return _UNIT.format(
            run=_escaped(run),
            sandbox="" if self.is_of_user else _SANDBOX,
            target="default.target" if self.is_of_user else "multi-user.target",
        )

    def start(self, run: Path) -> None:
        """Now and with the machine; one that runs is started anew. Raises ServiceError."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.unit(run))
        except OSError as error:
            raise ServiceError(
                f"{self.file} cannot be written ({error.strerror}); run the line with --no-service, and have "
                f"{run} started."
            ) from None
        if self.is_of_user:  # else it ends with the login
            with contextlib.suppress(OSError):
                subprocess.run(["loginctl", "enable-linger"], capture_output=True, check=False)
        for words in (("daemon-reload",), ("enable", self.name), ("restart", self.name)):
            self._do(*words)

    def remove(self) -> None:
        """Raises ServiceError."""
        if self.file.exists():
            self._do("disable", "--now", self.name)
            self.file.unlink()
            self._do("daemon-reload")

    def is_up(self, address: str, port: int, patience_s: float) -> bool:
        """Whether something listens where the agent should, soon, and its service runs."""
        until_s = now_s() + patience_s
        while now_s() < until_s:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=patience_s):
                return not self._ask("is-active", self.name).returncode
            time.sleep(POLL_S)
        return False

    def _do(self, *words: str) -> None:
        done = self._ask(*words)
        if done.returncode:
            said = done.stderr.strip()[-300:] or f"exit code {done.returncode}"
            raise ServiceError(
                f"systemctl {' '.join(words)} failed ({said}); see to it, then run the line again."
            )

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        user = ("--user",) if self.is_of_user else ()
        return subprocess.run(["systemctl", *user, *words], capture_output=True, text=True, check=False)


def _escaped(path: Path) -> str:
    """As systemd reads one word of a command; it takes no quote in a program's name."""
    return "".join(_DOUBLED.get(each) or (each if _is_plain(each) else _in_hex(each)) for each in str(path))


_DOUBLED = {"%": "%%", "$": "$$"}


def _is_plain(character: str) -> bool:
    return character.isalnum() or character in "/._-"


def _in_hex(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())
