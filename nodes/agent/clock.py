"""The agent's clock: seconds since the node booted, sleep included, and which boot that was.

Wall clocks jump; nothing here reads one. A moment that is kept in a file is a pair of both, and is of no use
after a reboot.
"""

from __future__ import annotations

import time
from pathlib import Path


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
