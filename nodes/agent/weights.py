"""Brings a launch's weights onto the node, or says why not.

A path is where it says. A Hugging Face source is downloaded at its pinned revision into the store, only the
files the engine reads, by a child process: it can be stopped at any moment and dies with the agent. Files
that are whole are kept; one that was cut is removed and fetched anew. HF_ENDPOINT and HF_TOKEN are those of
the agent's own environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.arguments import is_given
from catalog.source import HubSource, PathSource, SourceError, parse_source
from catalog.weights import GGUF_ENGINES, choose_weights
from nodes.agent.paths import is_outside
from nodes.engines.causes import Cause
from nodes.protocol import CONFIGURATION, DISK, NODE, TRANSIENT, Launch

# What belongs to weights other than GGUF, which has it all in one file.
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
CODE = (".py",)  # only where the profile trusts its author
COMPANION_LIMIT_BYTES = 200 * 1024 * 1024
REPORT_S = 0.5
ROOT = Path(__file__).resolve().parents[2]  # from where this module is found by its name
LISTED = 5  # files that one sentence lists


class FetchError(Exception):
    """The weights cannot be had."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.sentence)
        self.cause = cause


def _failure(cause: str, sentence: str, kind: str) -> FetchError:
    return FetchError(Cause(cause, sentence, kind))


async def fetch(
    launch: Launch, store: Path, progress: Callable[[int, int], None], *, roots: Sequence[str] = ()
) -> str:
    """The path to give to the engine. progress is told bytes done and bytes in all. roots: the folders that a
    source's path may lead into, none for anywhere. Raises FetchError."""
    try:
        source = parse_source(launch.source)
    except SourceError as error:
        raise _failure("bad_source", f'model "{launch.model}": {error}.', CONFIGURATION) from None
    if isinstance(source, PathSource):
        return await asyncio.to_thread(_local, launch, source.path, roots)
    return await _download(launch, source, store, progress)


# --- a path ---------------------------------------------------------------------------------------------


def _local(launch: Launch, path: str, roots: Sequence[str]) -> str:
    if is_outside(path, roots):
        sentence = (
            f'The path {path} of model "{launch.model}" leads out of the folders that this node allows; put '
            f"the weights into one of them, or start its agent with another --root."
        )
        raise _failure("path_refused", sentence, NODE)
    if not os.path.exists(path):
        sentence = f'The path {path} of model "{launch.model}" is not on this node; put the weights there.'
        raise _failure("model_path_missing", sentence, NODE)
    if launch.engine not in GGUF_ENGINES or not os.path.isdir(path):
        return path
    return str(Path(path, _gguf_of(launch, path, os.listdir(path))))


def _gguf_of(launch: Launch, where: str, names: Sequence[str]) -> str:
    """The one file by which the engine finds all shards of the model."""
    choice = choose_weights([launch.engine], list(names), "")
    if choice.level == "refuse":
        listed = ", ".join(choice.listed[:LISTED])
        said = choice.says.replace("{names}", listed)
        raise _failure("no_weights", f'model "{launch.model}": {where} {said}.', CONFIGURATION)
    return min(choice.files)


# --- a hub ----------------------------------------------------------------------------------------------


async def _download(
    launch: Launch, source: HubSource, store: Path, progress: Callable[[int, int], None]
) -> str:
    revision = launch.revision or source.revision
    order = {
        "repo": source.repo,
        "revision": revision,
        "selector": source.selector,
        "engine": launch.engine,
        "store": str(store),
        "trusts_code": is_given(launch.profile.get("args", ()), ("--trust-remote-code",)),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "nodes.agent.weights",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(order).encode() + b"\n")  # and left open: its end tells of ours
        said = await _hear(child.stdout, progress)
        await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await asyncio.to_thread(_sweep, store, source.repo)
    if "path" in said:
        return str(said["path"])
    if "cause" in said:
        raise _failure(said["cause"], f'model "{launch.model}": {said["sentence"]}', said["kind"])
    sentence = f'model "{launch.model}": the download of {source.repo} ended with code {child.returncode}.'
    raise _failure("fetch_failed", sentence, TRANSIENT)


async def _hear(lines: AsyncIterable[bytes], progress: Callable[[int, int], None]) -> dict[str, Any]:
    """How the child says it ended; how far it is may be told once more after that."""
    end: dict[str, Any] = {}
    async for line in lines:
        said = json.loads(line)
        if "done" in said:
            progress(said["done"], said["total"])
        else:
            end = said
    return end


# --- the child ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Told:
    done: int = 0
    total: int = 0


def _say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")  # in one piece: two threads speak
    sys.stdout.flush()


def main() -> None:
    """Reads one order from stdin, downloads, and says how far it is, a line each."""
    order = json.loads(sys.stdin.readline())
    store = Path(order["store"])
    threading.Thread(target=_end_with_agent, args=(store, order["repo"]), daemon=True).start()
    try:
        with _locked(store, order["repo"], is_waiting=True):  # another replica may want the same
            _say(path=_fetch_from_hub(order, store))
    except FetchError as failure:
        cause = failure.cause
        _say(cause=cause.cause, sentence=cause.sentence, kind=cause.kind)


def _end_with_agent(store: Path, repo: str) -> None:
    sys.stdin.read()
    _remove_cut_files(store, repo)
    os._exit(0)


def _fetch_from_hub(order: dict[str, Any], store: Path) -> str:
    # Here and not above: the agent itself never needs them.
    from huggingface_hub import HfApi, constants, hf_hub_download

    repo, revision = order["repo"], order["revision"] or None
    _remove_cut_files(store, repo)  # left by a child that was killed
    at = f"{repo}@{revision}" if revision else repo
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
        wanted = _wanted(order, at, sizes)
        told = _Told(total=sum(sizes[name] for name in wanted))
        free = shutil.disk_usage(store).free
        if told.total > free + _held_bytes(store, repo):
            sentence = (
                f"{at} needs {_gb(told.total)} and the store {store} has {_gb(free)} free; "
                f"make room or give the agent another --store."
            )
            raise _failure("disk_full", sentence, DISK)
        threading.Thread(target=_report, args=(store, repo, told), daemon=True).start()
        paths = [
            hf_hub_download(repo, name, revision=info.sha or revision, cache_dir=store) for name in wanted
        ]
        _say(done=told.total, total=told.total)
    except FetchError:
        raise
    except Exception as error:
        raise _hub_failure(at, error, constants.ENDPOINT, store) from None
    if order["engine"] in GGUF_ENGINES:
        return paths[0]
    snapshot = Path(paths[0])
    for _ in Path(wanted[0]).parts:
        snapshot = snapshot.parent
    return str(snapshot)


def _wanted(order: dict[str, Any], at: str, sizes: dict[str, int]) -> list[str]:
    """The weights first, in order, then what belongs to them."""
    choice = choose_weights([order["engine"]], list(sizes), order["selector"])
    if not choice.files:
        said = choice.says.replace("{names}", ", ".join(choice.listed[:LISTED]))
        raise _failure("no_weights", f"{at} {said}.", CONFIGURATION)
    wanted = sorted(choice.files)
    if order["engine"] not in GGUF_ENGINES:
        companions = COMPANIONS + CODE if order["trusts_code"] else COMPANIONS
        wanted += sorted(
            name
            for name, size in sizes.items()
            if name.endswith(companions) and size <= COMPANION_LIMIT_BYTES and name not in wanted
        )
    return wanted


def _report(store: Path, repo: str, told: _Told) -> None:
    while True:
        told.done = max(told.done, min(_held_bytes(store, repo), told.total))
        _say(done=told.done, total=told.total)
        time.sleep(REPORT_S)


def _held_bytes(store: Path, repo: str) -> int:
    """What of the repository is on the disk, files that are under way included."""
    total = 0
    for path in _blobs(store, repo).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was given its final name just now
            total += path.stat().st_blocks * 512
    return total


def _blobs(store: Path, repo: str) -> Path:
    return store / f"models--{repo.replace('/', '--')}" / "blobs"


@contextlib.contextmanager
def _locked(store: Path, repo: str, *, is_waiting: bool) -> Iterator[None]:
    """One at a time fetches a repository into a store, which nodes may share. Raises BlockingIOError."""
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (store / f".{repo.replace('/', '--')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
        yield


def _sweep(store: Path, repo: str) -> None:
    """Remove what was cut, unless somebody else is at it."""
    with contextlib.suppress(OSError), _locked(store, repo, is_waiting=False):
        _remove_cut_files(store, repo)


def _remove_cut_files(store: Path, repo: str) -> None:
    for path in _blobs(store, repo).glob("*.incomplete"):
        path.unlink(missing_ok=True)


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def _hub_failure(at: str, error: Exception, endpoint: str, store: Path) -> FetchError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):  # is a RepositoryNotFoundError, too
        sentence = (
            f"{at} is gated: accept its licence on the hub, and start the agent with the HF_TOKEN of an "
            f"account that has."
        )
        return _failure("gated_repo", sentence, CONFIGURATION)
    if isinstance(error, errors.RevisionNotFoundError):
        return _failure("repo_not_found", f"{at}: the hub has no such revision; correct it.", CONFIGURATION)
    if isinstance(error, errors.RepositoryNotFoundError):
        sentence = f"{at} was not found at {endpoint}, or is private; correct the source or set HF_TOKEN."
        return _failure("repo_not_found", sentence, CONFIGURATION)
    is_local = isinstance(error, errors.LocalEntryNotFoundError)  # says that the hub could not be asked
    if isinstance(error, errors.EntryNotFoundError) and not is_local:
        return _failure("repo_not_found", f"{at}: the hub lacks a file it lists; try again.", TRANSIENT)
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        sentence = f"The store {store} is full; make room or give the agent another --store."
        return _failure("disk_full", sentence, DISK)
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    sentence = f"Could not fetch {at} from {endpoint} ({cause}); it is tried again."
    return _failure("hub_unreachable", sentence, TRANSIENT)


if __name__ == "__main__":
    main()
