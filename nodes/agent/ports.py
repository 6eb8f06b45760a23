"""Ports for engines: bound for real before one is given, never ephemeral, never one given shortly before."""

from __future__ import annotations

import errno
import itertools
import socket
from pathlib import Path


class PortError(Exception):
    """No port can be given; the text is the sentence."""


def check_port_range(first: int, last: int) -> None:
    """Raises PortError where the kernel gives away ports of this range itself."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first <= high and last >= low:
        raise PortError(
            f"--port-range {first}-{last} overlaps the ephemeral ports {low}-{high}, which any program may "
            f"be given; choose one below or above."
        )


def find_port(host: str, first: int, last: int, *, start: int, taken: set[int]) -> int:
    """A port that could be bound just now, going round from `start`, so that none is used again soon."""
    ports = range(first, last + 1)
    start = start if start in ports else first
    for port in itertools.chain(range(start, last + 1), range(first, start)):
        if port not in taken and _can_bind(host, port):
            return port
    raise PortError(
        f"No port from {first} to {last} is free on {host}; give the agent a larger --port-range."
    )


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise PortError(f"Engines cannot listen on {host}: {error.strerror}; correct --listen.") from None
    return True
