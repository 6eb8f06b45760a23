"""The agent's options, and what was given of each: flags, environment and one TOML file, in this order of
strength.

An option `--port-range` is `LLMGW_AGENT_PORT_RANGE` in the environment and `port_range` in the file. What can
be given several times adds up over all three; in the environment `;` stands between. Whether a text makes
sense is for `configuration.py` to judge.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "LLMGW_AGENT_"
DEFAULT_LISTEN = "127.0.0.1:8378"
DEFAULT_PORT_RANGE = "18000-18999"


class ConfigurationError(Exception):
    """The agent cannot start like this; the text is the sentence."""


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
    _Option(
        "plain-http",
        "allow addresses that are not loopback: without --engine-tls engines answer gateways in the clear",
        kind=YES,
    ),
    _Option("tls-certificate", "what the agent's own door shows; PEM", "FILE"),
    _Option("tls-key", "the key of --tls-certificate, mode 0600", "FILE"),
    _Option(
        "engine-tls",
        "have engines answer over TLS alone, with --tls-certificate and its key; those that run stay as they "
        "are",
        kind=YES,
    ),
    _Option("control-plane", "tell this llmgw at once when something has changed", "URL"),
    _Option("store", "where weights go; weights/ in the state folder if left out", "FOLDER"),
    _Option("store-limit", "what the store may take, such as 500GB; the whole disk if left out", "SIZE"),
    _Option("fetches", "weights that are fetched at the same time", "N", default="2"),
    _Option("fetch-rate", "bytes a second for all fetches, such as 100MB; any if left out", "SIZE"),
    _Option(
        "peer-patience",
        "how long another node's fetch may stand still before the hub is asked",
        "TIME",
        default="20s",
    ),
    _Option(
        "engine",
        "where an engine is, if not on PATH, or the words to start it by, such as "
        '"vllm=podman run --rm {env} IMAGE"; {env}, {gpus}, {model}, {name} and {checkout} are filled in, '
        "with --engine-tls {tls_certificate} and {tls_key} too",
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
    add_options(found)
    return found


def add_options(found: argparse.ArgumentParser) -> None:
    for option in OPTIONS:
        told = f"{option.help}; default {option.default}" if option.default else option.help
        told = told.replace("%", "%%")
        if option.kind == YES:
            found.add_argument(option.flag, action="store_true", default=None, help=told)
        else:
            action = "append" if option.kind in (LIST, TABLE) else "store"
            found.add_argument(option.flag, action=action, metavar=option.metavar, help=told)


def merged(flags: Mapping[str, Any], environment: Mapping[str, str], file: str) -> dict[str, Any]:
    """The strongest text of each option, and all that was given of those that add up."""
    told = (_from_file(file) if file else {}, _from_environment(environment), from_flags(flags))
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


def from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a parser found, the options that were given."""
    options = {option.key: option for option in OPTIONS}
    return {
        key: parse_pairs(options[key].flag, value) if options[key].kind == TABLE else value
        for key, value in flags.items()
        if value is not None and key in options
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


def parse_pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Raises ConfigurationError."""
    pairs = {}
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.strip() or not value.strip():
            raise ConfigurationError(f"{option} {text}: write NAME=VALUE.")
        pairs[name.strip()] = value.strip()
    return pairs
