"""The weights on this node's disk: what is there, whether it is still whole, and what can be given back.

Files lie as huggingface_hub lays them out, so that its tools can look at the same folder. What llmgw knows of
them is in `.llmgw/`: a record a repository and commit, and a mark for each that a node's engines use. Nothing
without a record is touched. Removing never follows a link, and never leaves the store.

    models--org--name/blobs/<checksum>                 a file, or what there is of it: <checksum>.incomplete
    models--org--name/snapshots/<commit>/<name>        a link to it
    .llmgw/<key>.json, .llmgw/<key>.used-<node>, .llmgw/<repository>.lock
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nodes.agent.files import DRAFT, read_file, write_file
from nodes.agent.weights.sources import is_plain
from nodes.protocol import ListedFile, ProtocolError, read, to_json
from nodes.tickets import is_commit, is_key, weights_key

PART = ".incomplete"
READ_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class StoreError(Exception):
    """It cannot be done with this store; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole file, checked as it came. blob: its name among the blobs. mtime_ns: since then, nobody has
    written to it."""

    size: int
    sha256: str
    blob: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What is known of a repository at one commit. wanted: what was asked for so far. used: a larger number
    is of later use; no clock is asked."""

    repo: str
    revision: str
    listing: Mapping[str, ListedFile] = field(default_factory=dict)
    files: Mapping[str, Kept] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    used: int = 0

    @property
    def key(self) -> str:
        return weights_key(self.repo, self.revision)

    @property
    def is_whole(self) -> bool:
        return bool(self.wanted) and all(name in self.files for name in self.wanted)

    @property
    def size_bytes(self) -> int:
        return sum(kept.size for kept in self.files.values())

    def blob_of(self, name: str) -> str:
        """What the file is called among the blobs."""
        listed = self.listing[name]
        told = listed.sha256 or listed.blob_id
        return told or hashlib.sha256(f"{self.key}\n{name}".encode()).hexdigest()

    def is_of(self, repo: str, revision: str) -> bool:
        """A revision that is no commit may mean this one."""
        return repo == self.repo and (not is_commit(revision) or revision == self.revision)


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._notes = path / ".llmgw"
        self._read: dict[str, tuple[int, Holding]] = {}  # by key, as of that change of the file

    # --- what is known

    def holding(self, key: str) -> Holding | None:
        """None where there is none, or its record cannot be read: it is put together anew then."""
        if not is_key(key):
            return None
        path = self._notes / f"{key}.json"
        try:
            changed_ns = path.stat().st_mtime_ns
            known = self._read.get(key)
            if known is None or known[0] != changed_ns:
                known = self._read[key] = (changed_ns, read(Holding, read_file(path)))
        except (OSError, ValueError, RecursionError, ProtocolError):
            return None
        holding = known[1]
        return holding if holding.key == key and is_commit(holding.revision) else None

    def holdings(self) -> list[Holding]:
        found = (self.holding(path.stem) for path in sorted(self._notes.glob("*.json")))
        return [holding for holding in found if holding is not None]

    def save(self, holding: Holding) -> None:
        self._notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(self._notes / f"{holding.key}.json", to_json(holding))

    def use(self, key: str) -> None:
        """It is what was used last."""
        holding, latest = self.holding(key), max((each.used for each in self.holdings()), default=0)
        if holding is not None and (holding.used < latest or not latest):
            self.save(replace(holding, used=latest + 1))

    def blobs(self, repo: str) -> Path:
        return self.path / f"models--{repo.replace('/', '--')}" / "blobs"

    def snapshot(self, holding: Holding, name: str) -> Path:
        return self.blobs(holding.repo).parent / "snapshots" / holding.revision / name

    def part(self, holding: Holding, name: str) -> Path:
        return self.blobs(holding.repo) / (holding.blob_of(name) + PART)

    def parts_bytes(self, holding: Holding) -> int:
        """Of its files that are under way, or were."""
        parts = {self.part(holding, name) for name in holding.wanted if name not in holding.files}
        return sum(size_of(path) for path in parts)

    def held_bytes(self) -> int:
        """What all of it takes; a blob that several commits share counts once."""
        blobs = {
            (holding.repo, kept.blob): kept.size
            for holding in self.holdings()
            for kept in holding.files.values()
        }
        return sum(blobs.values()) + sum(map(self.parts_bytes, self.holdings()))

    # --- whether it is whole

    def verified(self, holding: Holding) -> Holding:
        """The holding with those files alone that are still what they were. Reads what was written to."""
        files = {name: kept for name, kept in holding.files.items() if self._is_sound(holding, name, kept)}
        for name, kept in files.items():
            self.link(holding, name, kept.blob)
        if len(files) < len(holding.files):
            holding = replace(holding, files=files)
            self.save(holding)
        return holding

    def _is_sound(self, holding: Holding, name: str, kept: Kept) -> bool:
        if not is_plain(name):
            return False
        path = self.blobs(holding.repo) / kept.blob
        try:
            found = path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != kept.size:
            return False
        return found.st_mtime_ns == kept.mtime_ns or sha256_of(path) == kept.sha256

    def link(self, holding: Holding, name: str, blob: str) -> None:
        """As huggingface_hub does, so that engines find the file by its name."""
        link = self.snapshot(holding, name)
        to = os.path.relpath(self.blobs(holding.repo) / blob, link.parent)
        if not (link.is_symlink() and os.readlink(link) == to):
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(to)

    def open_file(self, key: str, name: str) -> int | None:
        """A descriptor of a whole file, found by its record and not through a link. None: it is not here."""
        holding = self.holding(key)
        kept = holding.files.get(name) if holding else None
        if holding is None or kept is None:
            return None
        try:
            with self._folder(self.blobs(holding.repo).parent.name, "blobs") as blobs:
                handle = os.open(kept.blob, _FILE, dir_fd=blobs)
        except OSError:
            return None
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != kept.size:
            os.close(handle)
            return None
        return handle

    # --- who uses it

    def mark(self, node: str, keys: Collection[str]) -> None:
        """These are in use on this node, and no others. Nodes may share a store, and heed each other's."""
        if not self._notes.is_dir():
            return
        wanted = {f"{key}.used-{node}" for key in keys}
        present = {path.name for path in self._notes.glob(f"*.used-{node}")}
        for name in present - wanted:
            (self._notes / name).unlink(missing_ok=True)
        for name in wanted - present:
            (self._notes / name).touch(0o600)

    def is_marked(self, key: str, *, besides: str = "") -> bool:
        """besides: a node whose own mark does not count."""
        return any(not path.name.endswith(f".used-{besides}") for path in self._notes.glob(f"{key}.used-*"))

    # --- giving back

    def sweep(self, repo: str) -> None:
        """Remove what was cut of it, unless somebody is at it."""
        with contextlib.suppress(OSError, StoreError), self.locked(repo, is_waiting=False):
            with self._folder(self.blobs(repo).parent.name, "blobs") as blobs:
                for name in os.listdir(blobs):
                    if name.endswith(PART):
                        os.unlink(name, dir_fd=blobs)
            for holding in self.holdings():
                if holding.repo == repo and not holding.files:
                    self._forget(holding)

    def remove(self, key: str) -> int:
        """The bytes that it gave back. Raises StoreError where it is being fetched, or is not as it should
        be."""
        holding = self.holding(key)
        if holding is None:
            raise StoreError(f"The store {self.path} has no weights {key}; look again.")
        at = f"{holding.repo}@{holding.revision[:8]}"
        try:
            with self.locked(holding.repo, is_waiting=False):
                return self._remove(holding)
        except BlockingIOError:
            raise StoreError(f"{at} is being fetched here; stop that first.") from None
        except OSError as error:
            raise StoreError(
                f"{at} cannot be removed from {self.path} ({error.strerror}); look there by hand."
            ) from None

    def _remove(self, holding: Holding) -> int:
        others = [each for each in self.holdings() if each.repo == holding.repo and each.key != holding.key]
        shared = {kept.blob for each in others for kept in each.files.values()}
        shared |= {each.blob_of(name) + PART for each in others for name in each.wanted}
        mine = {kept.blob for kept in holding.files.values()}
        mine |= {holding.blob_of(name) + PART for name in holding.wanted}
        folder = self.blobs(holding.repo).parent.name
        given_back = 0
        with contextlib.suppress(FileNotFoundError), self._folder(folder, "snapshots") as snapshots:
            shutil.rmtree(holding.revision, dir_fd=snapshots)  # links, and folders of them
        with contextlib.suppress(FileNotFoundError), self._folder(folder, "blobs") as blobs:
            for name in mine - shared:
                with contextlib.suppress(FileNotFoundError):
                    size = os.stat(name, dir_fd=blobs, follow_symlinks=False).st_size
                    os.unlink(name, dir_fd=blobs)
                    given_back += size
        self._forget(holding)
        if not others:
            with contextlib.suppress(OSError):  # what is not ours stays, and the folders around it
                with self._folder(folder) as top:
                    for name in ("blobs", "snapshots"):
                        os.rmdir(name, dir_fd=top)
                os.rmdir(self.path / folder)
        return given_back

    def _forget(self, holding: Holding) -> None:
        (self._notes / f"{holding.key}.json").unlink(missing_ok=True)
        self._read.pop(holding.key, None)

    # --- the folder itself

    @contextlib.contextmanager
    def locked(self, repo: str, *, is_waiting: bool) -> Iterator[None]:
        """One at a time changes a repository's files in a store, which nodes may share. Raises
        BlockingIOError."""
        self._notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._notes / f"{repo.replace('/', '--')}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
            yield

    def tidy(self) -> None:
        """Remove drafts of records that an agent left which was killed while it wrote."""
        for draft in self._notes.glob(f"{DRAFT}*"):
            draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _folder(self, *names: str) -> Iterator[int]:
        """A folder below the store's, each step opened without following a link."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in names:
                below = os.open(name, _FOLDER, dir_fd=handle)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)


def size_of(path: Path) -> int:
    """0 where there is none: it was given its final name just now."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def sha256_of(path: Path) -> str:
    """Empty where it cannot be read."""
    try:
        with open(os.open(path, _FILE), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def total_bytes(holding: Holding, names: Iterable[str]) -> int:
    return sum(holding.listing[name].size for name in names)
