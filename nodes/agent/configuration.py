"""What an agent is told of its node: flags, environment and one TOML file, in this order of strength.

An option `--port-range` is `LLMGW_AGENT_PORT_RANGE` in the environment and `port_range` in the file. What can
be given several times adds up over all three; in the environment `;` stands between. Everything is judged
before anything is started, and each fault is one sentence that names where it was given.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import json
import re
import shlex
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.durations import SECOND, parse_duration
from nodes.agent.gpus import check_gpu_classes, parse_sim_gpus
from nodes.agent.ports import check_port_range
from nodes.agent.secrets import Secrets, open_folder
from nodes.agent.state import is_uuid
from nodes.protocol import GpuReport

VARIABLE = "LLMGW_AGENT_"
DEFAULT_LISTEN = "127.0.0.1:8378"
DEFAULT_PORT_RANGE = "18000-18999"


class ConfigurationError(Exception):
    """The agent cannot start like this; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is, and whom it obeys."""

    cluster: str
    node: str
    name: str
    token: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """engines: by name, the words that stand in front of its arguments. roots: folders that sources and
    questions about paths may lead into, none for anywhere. meeting_address: where other nodes' ranks reach
    this one, empty where none does."""

    identity: Identity
    state: Path
    address: str
    port: int
    store: Path
    engines: Mapping[str, tuple[str, ...]]
    allowed_args: frozenset[str]
    roots: tuple[str, ...]
    sim_gpus: tuple[GpuReport, ...]
    gpu_classes: Mapping[str, str]
    labels: Mapping[str, str]
    fabric: str
    meeting_address: str
    secrets: Secrets
    ports: tuple[int, int]
    stop_grace_s: float
    stuck_after_s: float
    engines_end_with_agent: bool

    @property
    def runs_gangs(self) -> bool:
        return bool(self.fabric and self.meeting_address)


# --- the options ------------------------------------------------------------------------------------------

TEXT, YES, LIST, TABLE = "text", "yes", "list", "table"


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    help: str
    metavar: str = ""
    kind: str = TEXT
    default: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return VARIABLE + self.name.replace("-", "_").upper()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


OPTIONS = (
    _Option("identity", "who this node is: JSON, mode 0600", "FILE"),
    _Option("state", "what the agent keeps; one agent a folder", "FOLDER"),
    _Option("listen", "where it and its engines listen", "ADDRESS:PORT", default=DEFAULT_LISTEN),
    _Option("plain-http", "allow an address that is not loopback", kind=YES),
    _Option("store", "where weights go; weights/ in the state folder if left out", "FOLDER"),
    _Option(
        "engine",
        "where an engine is, if not on PATH, or the words to start it by, such as "
        '"vllm=podman run --rm {env} IMAGE"; {env}, {gpus}, {model}, {name} and {checkout} are filled in',
        "NAME=WORDS",
        TABLE,
    ),
    _Option("allow-arg", "let profiles give this engine option", "OPTION", LIST),
    _Option("root", "let sources that are paths lead into this folder; anywhere if left out", "FOLDER", LIST),
    _Option("secrets", "files, mode 0600, that secret:NAME in a profile's env stands for", "FOLDER"),
    _Option("sim-gpus", "make up cards, such as 2:sim or 8:h100-80g", "N:CLASS"),
    _Option(
        "gpu-class",
        'class of a product, such as "NVIDIA H100 80GB HBM3=h100"; else made of its name and memory',
        "NAME=CLASS",
        TABLE,
    ),
    _Option("label", "what node selectors look for", "NAME=VALUE", TABLE),
    _Option("fabric", "the fast interconnect this node is on", "NAME"),
    _Option(
        "fabric-address",
        "its address there, for replicas over several nodes; that of --listen if left out",
        "IP",
    ),
    _Option("port-range", "for engines", "A-B", default=DEFAULT_PORT_RANGE),
    _Option("stop-grace", "between TERM and KILL", "TIME", default="30s"),
    _Option(
        "stuck-after",
        "an engine that gets nothing done for so long is ended; more where kernels are compiled on first use",
        "TIME",
        default="15s",
    ),
    _Option("engines-stop-with-agent", "for trials: leave nothing running", kind=YES),
)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m nodes.agent",
        description="Runs engines on this node, as llmgw tells it.",
        epilog=f"Each may also stand in the environment, as {VARIABLE}PORT_RANGE, and in the file, as "
        "port_range.",
        allow_abbrev=False,
    )
    found.add_argument("--config", metavar="FILE", help="a TOML file of these options")
    found.add_argument("--check", action="store_true", help="judge all this, print what would be told, end")
    for option in OPTIONS:
        told = f"{option.help}; default {option.default}" if option.default else option.help
        told = told.replace("%", "%%")
        if option.kind == YES:
            found.add_argument(option.flag, action="store_true", default=None, help=told)
        else:
            action = "append" if option.kind in (LIST, TABLE) else "store"
            found.add_argument(option.flag, action=action, metavar=option.metavar, help=told)
    return found


def configure(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Configuration, bool]:
    """The configuration, and whether it is only to be checked. Raises ConfigurationError, PortError,
    SecretError or InventoryError."""
    given = vars(parser().parse_args(argv))
    file = given.pop("config") or environment.get(VARIABLE + "CONFIG", "")
    is_check = bool(given.pop("check"))
    return _judged(_merged(given, environment, file), environment), is_check


def _merged(flags: Mapping[str, Any], environment: Mapping[str, str], file: str) -> dict[str, Any]:
    """The strongest text of each option, and all that was given of those that add up."""
    told = (_from_file(file) if file else {}, _from_environment(environment), _from_flags(flags))
    merged: dict[str, Any] = {}
    for option in OPTIONS:
        values = [each[option.key] for each in told if option.key in each]
        if option.kind == TABLE:
            merged[option.key] = {name: text for value in values for name, text in value.items()}
        elif option.kind == LIST:
            merged[option.key] = [text for value in values for text in value]
        else:
            merged[option.key] = values[-1] if values else (False if option.kind == YES else option.default)
    return merged


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    options = {option.key: option for option in OPTIONS}
    return {
        key: parse_pairs(options[key].flag, value) if options[key].kind == TABLE else value
        for key, value in flags.items()
        if value is not None
    }


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    options = {option.variable: option for option in OPTIONS}
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(VARIABLE) or variable == VARIABLE + "CONFIG":
            continue
        option = options.get(variable)
        if option is None:
            raise ConfigurationError(f"{variable} stands for no option{_meant(variable, options)}.")
        parts = [part.strip() for part in text.split(";") if part.strip()]
        if option.kind == YES:
            if text not in ("0", "1"):
                raise ConfigurationError(f"{variable}={text}: write 1 or 0.")
            found[option.key] = text == "1"
        elif option.kind == TABLE:
            found[option.key] = parse_pairs(variable, parts)
        else:
            found[option.key] = parts if option.kind == LIST else text
    return found


def _from_file(path: str) -> dict[str, Any]:
    try:
        raw = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} is not TOML ({error}); correct it.") from None
    options = {option.key: option for option in OPTIONS}
    for key, value in raw.items():
        if key not in options:
            raise ConfigurationError(f"{path}: there is no option {key}{_meant(key, options)}.")
        kind = options[key].kind
        if kind == TABLE and isinstance(value, dict):
            raw[key] = {name: _words(path, f"{key}.{name}", text) for name, text in value.items()}
        elif not (
            (kind == TEXT and isinstance(value, str))
            or (kind == YES and isinstance(value, bool))
            or (kind == LIST and isinstance(value, list) and all(isinstance(each, str) for each in value))
        ):
            raise ConfigurationError(f"{path}: {key} must be {_TOML[kind]}.")
    return raw


_TOML = {TEXT: "a text", YES: "true or false", LIST: "a list of texts", TABLE: "a table of texts"}


def _words(path: str, key: str, value: object) -> str:
    """A command may be given as its words, too."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return shlex.join(value)
    if not isinstance(value, str):
        raise ConfigurationError(f"{path}: {key} must be a text.")
    return value


def _meant(given: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(given, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


# --- the judging ------------------------------------------------------------------------------------------


def _judged(told: Mapping[str, Any], environment: Mapping[str, str]) -> Configuration:
    for needed in ("identity", "state"):
        if not told[needed]:
            raise ConfigurationError(f"The agent needs --{needed}; see --help.")
    identity = read_identity(Path(told["identity"]))
    state = Path(told["state"]).resolve()
    address, port = parse_listen(told["listen"], is_plain_allowed=told["plain_http"])
    return Configuration(
        identity=identity,
        state=state,
        address=address,
        port=port,
        store=Path(told["store"] or state / "weights").resolve(),
        engines={name: parse_words(name, text) for name, text in told["engine"].items()},
        allowed_args=frozenset(told["allow_arg"]),
        roots=tuple(map(open_root, told["root"])),
        sim_gpus=parse_sim_gpus(told["sim_gpus"]),
        gpu_classes=check_gpu_classes(told["gpu_class"]),
        labels=told["label"],
        fabric=told["fabric"],
        meeting_address=meeting_address(told["fabric_address"], address),
        secrets=Secrets(environment, open_folder(Path(told["secrets"]) if told["secrets"] else None)),
        ports=parse_port_range(told["port_range"]),
        stop_grace_s=parse_time_s("--stop-grace", told["stop_grace"]),
        stuck_after_s=parse_time_s("--stuck-after", told["stuck_after"], least_s=5),
        engines_end_with_agent=told["engines_stop_with_agent"],
    )


def read_identity(path: Path) -> Identity:
    """Raises ConfigurationError."""
    try:
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigurationError(
                f"{path} holds this node's token and others may read it; run `chmod 600 {path}`."
            )
        raw = json.loads(path.read_bytes())
        identity = Identity(*(str(raw[name]) for name in ("cluster", "node", "name", "token")))
    except OSError as error:
        raise ConfigurationError(f"--identity {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"--identity {path} is not a JSON object with cluster, node, name and token; have it written "
            f"again by `manage.py node_add`."
        ) from None
    if not is_uuid(identity.cluster) or not is_uuid(identity.node) or not identity.token:
        raise ConfigurationError(f"--identity {path}: cluster and node must be UUIDs, and token not empty.")
    return identity


def parse_listen(text: str, *, is_plain_allowed: bool) -> tuple[str, int]:
    """Raises ConfigurationError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigurationError(
            f"--listen {text}: write an address and a port, such as {DEFAULT_LISTEN}."
        ) from None
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigurationError(f"--listen {text}: the port must be a number from 1 to 65535.")
    if not address.is_loopback and not is_plain_allowed:
        raise ConfigurationError(
            f"--listen {text} would send tokens over the network unencrypted; listen on a loopback address, "
            f"or add --plain-http where the network is trusted or encrypted."
        )
    return str(address), int(port)


def meeting_address(text: str, listen: str) -> str:
    """Where rank 0 lets the others in; empty where only every address of the node is known. Raises
    ConfigurationError."""
    try:
        address = ipaddress.ip_address(text or listen)
    except ValueError:
        raise ConfigurationError(f"--fabric-address {text}: write an IP address of this node.") from None
    if address.is_unspecified and text:
        raise ConfigurationError(f"--fabric-address {text} is no place to meet; write one address.")
    return "" if address.is_unspecified else str(address)


def parse_port_range(text: str) -> tuple[int, int]:
    """Raises ConfigurationError or PortError."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 1024 <= int(found[1]) <= int(found[2]) <= 65_535:
        raise ConfigurationError(f"--port-range {text}: write two ports, such as {DEFAULT_PORT_RANGE}.")
    first, last = int(found[1]), int(found[2])
    check_port_range(first, last)
    return first, last


def parse_pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Raises ConfigurationError."""
    pairs = {}
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.strip() or not value.strip():
            raise ConfigurationError(f"{option} {text}: write NAME=VALUE.")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_words(engine: str, text: str) -> tuple[str, ...]:
    """Raises ConfigurationError."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"--engine {engine}={text}: {error}; correct the quotes.") from None
    if not words:
        raise ConfigurationError(f"--engine {engine}={text} names no program; write one.")
    return words


def parse_time_s(option: str, text: str, *, least_s: int = 0) -> float:
    """Raises ConfigurationError."""
    try:
        time_ns = parse_duration(text)
    except ValueError as error:
        raise ConfigurationError(f"{option} {text} {error}.") from None
    if time_ns < least_s * SECOND:
        raise ConfigurationError(f"{option} {text} is too short; give {least_s}s or more.")
    return time_ns / SECOND


def open_root(text: str) -> str:
    """The folder itself, without links. Raises ConfigurationError."""
    path = Path(text)
    if not path.is_absolute() or not path.is_dir():
        raise ConfigurationError(
            f"--root {text} is not a folder with an absolute path; make it, or correct it."
        )
    return str(path.resolve())
