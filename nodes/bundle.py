"""The agent's code as one file, which a machine fetches to join, and the one line that fetches it.

The file is a zip that Python runs (`python3 FILE`). Only what the agent imports is in it, found by reading
imports, so that no list can forget a module. Equal code gives equal bytes on every machine, as nothing is
compressed and no clock is asked: so the line tells its checksum in advance, and whoever pastes the line runs
what this control plane has, and nothing that came from elsewhere on the way.

The line holds no secret. Whoever runs it types the join token, or gives it on standard input; it travels as a
bearer, so that no list of processes, no history and no log of addresses has it, and it does not follow a
redirect. The code is no secret either, and is given out for the token all the same: no route is open that
need not be, and a machine that may not join learns nothing here.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import shlex
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AGENT = Path("nodes", "agent")
BESIDE = (AGENT / "requirements.txt", Path(".constraints.txt"))
ROOMS = ("catalog", "nodes")
FIRST_MOMENT = (1980, 1, 1, 0, 0, 0)  # of a zip's
PYTHON = (3, 11)

# Must be readable by any Python 3: it says so when this one is too old.
_MAIN = f"""\
import sys
if sys.version_info < {PYTHON}:
    sys.exit("The agent needs Python {PYTHON[0]}.{PYTHON[1]} or newer, and this is %d.%d; run the line with "
             "a newer one, such as python{PYTHON[0]}.{PYTHON[1]}." % sys.version_info[:2])
from pathlib import Path
from nodes.agent.install import main
main(Path(sys.argv[0]))
"""

# A refusal is JSON with a sentence; whatever else goes wrong has one of its own.
_LINE = (
    "import getpass, hashlib, json, subprocess, sys, tempfile, urllib.request as web; "
    'said = lambda error: getattr(error, "read", bytes)(); '
    "sentence = lambda error, text: "
    'json.loads(text)["errors"][0]["sentence"] if text[:1] == b"{" else error; '
    "sys.excepthook = lambda kind, error, trace: print(sentence(error, said(error)), file=sys.stderr); "
    'token = (getpass.getpass("Join token: ") if sys.stdin.isatty() else sys.stdin.readline()).strip(); '
    'ask = web.Request(sys.argv[2] + "/api/nodes/join"); '
    'ask.add_unredirected_header("Authorization", "Bearer " + token); '
    "code = web.urlopen(ask, timeout=60).read(); "
    "hashlib.sha256(code).hexdigest() == sys.argv[1] or "
    'sys.exit("The code is another one than this line tells of; have the line printed again."); '
    'file = tempfile.NamedTemporaryFile(suffix=".pyz"); file.write(code); file.flush(); '
    'sys.exit(subprocess.run([sys.executable, file.name, "--control-plane", *sys.argv[2:]], '
    "input=token.encode()).returncode)"
)


@dataclass(frozen=True, slots=True)
class Bundle:
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def bundle() -> Bundle:
    """Of the code as it is here."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_entry("__main__.py"), _MAIN)
        for path in sorted(_files(), key=str):
            archive.writestr(_entry(path.as_posix()), (ROOT / path).read_bytes())
    return Bundle(written.getvalue())


def join_line(url: str, options: Sequence[str] = ()) -> str:
    """What to run on the machine. url: scheme and host of this control plane, as the machine reaches it."""
    return f"python3 -c {shlex.quote(_LINE)} {bundle().sha256} {shlex.join([url, *options])}"


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, FIRST_MOMENT)
    entry.create_system = 3  # Unix, wherever it is made
    entry.external_attr = 0o644 << 16
    return entry


def _files() -> set[Path]:
    """Relative to the root: the agent's own files, and all modules that these lead to."""
    own = {path.relative_to(ROOT) for path in (ROOT / AGENT).rglob("*") if path.suffix in (".py", ".log")}
    found, waiting = set(), [path for path in own if path.suffix == ".py"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path, (ROOT / path).stat().st_mtime_ns)
    return own | found | set(BESIDE)


@functools.lru_cache(maxsize=1_000)
def _imported(path: Path, changed_ns: int) -> tuple[Path, ...]:
    """The files of our own that a file imports, and of the packages they are in. changed_ns: of the file."""
    return tuple(_files_of_imports(path))


def _files_of_imports(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] in ROOMS:
                for length in range(1, len(parts) + 1):
                    yield from _files_of(Path(*parts[:length]))


def _files_of(module: Path) -> Iterator[Path]:
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if (ROOT / path).is_file():
            yield path
