"""Processes as the agent starts, recognises and ends them.

An engine runs in a session of its own, marked in its environment. It is known by boot, pid, start time and
mark, never by its pid alone, and is signalled through a pidfd. To end it means that no process of its group
or with its mark is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodes.agent.clock import now_s

MARK, NODE_MARK, PORT_MARK = "LLMGW_REPLICA", "LLMGW_NODE", "LLMGW_PORT"
CERTIFICATE_MARK = "LLMGW_CERTIFICATE"

# What of the agent's own environment an engine sees. Secrets come by name only.
INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR|XDG_CACHE_HOME"
    r"|XDG_RUNTIME_DIR|OMP_NUM_THREADS|CUDA_HOME|CUDA_PATH|CUDA_CACHE_PATH|NCCL_\w+|GLOO_\w+|VK_\w+"
)

POLL_S = 0.05
KILLED_S = 20.0  # what the kernel has not ended by then hangs in a driver or on a disk
OOM_SCORE = 500  # above anything the system has: an engine goes before the agent does


@dataclass(frozen=True, slots=True)
class Mark:
    """What stands in a process's environment: whose it is."""

    replica: str
    generation: int
    rank: int

    def __str__(self) -> str:
        return f"{self.replica}:{self.generation}:{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        found = re.fullmatch(r"([0-9a-f-]{36}):(\d{1,9}):(\d{1,9})", text)
        return cls(found[1], int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, slots=True)
class Seen:
    """A marked process that was found running."""

    pid: int
    started: int
    mark: Mark
    port: int | None
    certificate: str
    gpus: tuple[str, ...]
    is_leader: bool


# Looked up before any fork; elsewhere than on Linux an agent that is killed leaves even a trial's engines.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1


def _be_killed_with_the_agent() -> None:
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class Process:
    """A running engine: one that was started here, or one that was taken up again."""

    def __init__(self, pid: int, started: int, mark: Mark, child: subprocess.Popen[bytes] | None) -> None:
        self.pid, self.started, self.mark = pid, started, mark
        self._child = child
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self.exit_code: int | None = None  # of a process that was taken up nobody can tell it
        asyncio.get_running_loop().add_reader(self._pidfd, self._end)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        mark: Mark,
        log: Path,
        folder: Path,
        ends_with_agent: bool = False,
    ) -> Process:
        """ends_with_agent: however the agent ends, kill -9 too. Raises OSError where the program cannot be
        run."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(log, flags, 0o600)
        try:
            child = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
                preexec_fn=_be_killed_with_the_agent if ends_with_agent else None,  # noqa: PLW1509 - one call
            )
        finally:
            os.close(handle)
        _offer_to_the_oom_killer(child.pid)
        # It is our child and not waited for yet, so its pid is its own, even if it has ended already.
        return cls(child.pid, start_time(child.pid) or 0, mark, child)

    @classmethod
    def adopt(cls, pid: int, started: int, mark: Mark) -> Process | None:
        """The process, if it still is the one that was started."""
        try:
            process = cls(pid, started, mark, None)
        except OSError:
            return None
        if start_time(pid) == started and read_mark(pid) == mark:
            return process
        process.close()
        return None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def has_remains(self) -> bool:
        """Whether others of its processes run on without it."""
        return any(True for _ in self._members())

    async def ended(self) -> None:
        await self._ended.wait()

    async def end(
        self, *, grace_s: float, tell: Callable[[str], None], killed_within_s: float = KILLED_S
    ) -> None:
        """TERM to all of it, then KILL; returns when none of it is left, however long that takes. `tell`
        hears what it waits for."""
        tell("its processes are being stopped")
        self._signal_all(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._is_any_left():  # noqa: ASYNC110 - nothing tells of a whole group's end
                    await asyncio.sleep(POLL_S)
        killed_s = now_s()
        while self._is_any_left():
            self._signal_all(signal.SIGKILL)
            await asyncio.sleep(POLL_S)
            if now_s() - killed_s > killed_within_s:
                left = ", ".join(map(str, self._members()))
                tell(f"process {left} was killed and does not end; if it stays, restart the node")

    def close(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._child is not None:
            self.exit_code = self._child.wait()
        self._ended.set()

    def _is_any_left(self) -> bool:
        return not self.has_ended or self.has_remains

    def _members(self) -> Iterator[int]:
        """Pids of the group and of whatever else has the mark, without dead ones that nobody reaped."""
        for pid in pids():
            stat = read_stat(pid)
            if stat is None or stat.is_dead:
                continue
            # By group too: some engines overwrite their environment.
            if (stat.group == self.pid and stat.started >= self.started) or read_mark(pid) == self.mark:
                yield pid

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in list(self._members()):
            with contextlib.suppress(ProcessLookupError), _pidfd(pid) as pidfd:
                stat = read_stat(pid)  # again, now that the pid cannot become another's
                if stat is not None and (stat.group == self.pid or read_mark(pid) == self.mark):
                    signal.pidfd_send_signal(pidfd, number)


def _offer_to_the_oom_killer(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE))


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def marks(mark: Mark, *, node: str, port: int, certificate: str = "") -> dict[str, str]:
    """What tells in an engine's environment whose it is, and how it is asked."""
    certain = {CERTIFICATE_MARK: certificate} if certificate else {}
    return {MARK: str(mark), NODE_MARK: node, PORT_MARK: str(port), **certain}


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """What of the agent's own environment an engine's program may see."""
    return {name: value for name, value in own.items() if INHERITED.fullmatch(name)}


# --- reading /proc --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stat:
    is_dead: bool
    group: int
    started: int


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def read_stat(pid: int) -> Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a process's name may hold spaces and parentheses
    return Stat(fields[0] in "ZX", int(fields[2]), int(fields[19]))


def start_time(pid: int) -> int | None:
    stat = read_stat(pid)
    return stat.started if stat else None


def read_environment(pid: int) -> dict[str, str]:
    """Empty where the process is gone or another user's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode("utf-8", "replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def read_mark(pid: int) -> Mark | None:
    return Mark.parse(read_environment(pid).get(MARK, ""))


def marked_processes(node: str) -> list[Seen]:
    """Every process of this node's engines, the first of each engine first."""
    found = []
    for pid in pids():
        env = read_environment(pid)
        mark = Mark.parse(env.get(MARK, ""))
        stat = read_stat(pid)
        if mark is None or env.get(NODE_MARK) != node or stat is None or stat.is_dead:
            continue
        port = env.get(PORT_MARK, "")
        gpus = tuple(gpu for gpu in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu)
        seen = Seen(
            pid,
            stat.started,
            mark,
            port=int(port) if port.isdecimal() else None,
            certificate=env.get(CERTIFICATE_MARK, ""),
            gpus=gpus,
            is_leader=stat.group == pid,
        )
        found.append(seen)
    return sorted(found, key=lambda seen: (seen.started, seen.pid))
