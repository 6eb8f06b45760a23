"""What an agent is told of its node, judged before anything is started: each fault is one sentence that
names the option. How options are given is in `options.py`.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from catalog.durations import SECOND, parse_duration
from nodes.agent.gpus import check_gpu_classes, parse_sim_gpus
from nodes.agent.options import (
    DEFAULT_LISTEN,
    DEFAULT_PORT_RANGE,
    VARIABLE,
    ConfigurationError,
    merged,
    parser,
)
from nodes.agent.ports import check_port_range
from nodes.agent.secrets import Secrets, open_folder
from nodes.agent.state import is_uuid
from nodes.certificates import checksum_of
from nodes.protocol import GpuReport


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is, and whom it obeys."""

    cluster: str
    node: str
    name: str
    token: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """tls: the certificate and the key that the agent's door shows, None for plain HTTP. engine_tls: whether
    engines are started with these too. control_plane: where it tells that something has changed, empty for
    nowhere. engines: by name, the words that stand in front of its arguments. roots: folders that sources and
    questions about paths may lead into, none for anywhere. meeting_address: where other nodes' ranks reach
    this one, empty where none does. store_limit_bytes, fetch_bytes_per_s: 0 for none. fetches: at the same
    time."""

    identity: Identity
    state: Path
    address: str
    port: int
    tls: tuple[Path, Path] | None
    engine_tls: bool
    control_plane: str
    store: Path
    store_limit_bytes: int
    fetches: int
    fetch_bytes_per_s: int
    peer_patience_s: float
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

    @property
    def url(self) -> str:
        """Of the agent's own door."""
        scheme = "https" if self.tls else "http"
        shown = f"[{self.address}]" if ":" in self.address else self.address
        return f"{scheme}://{shown}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Raises ConfigurationError."""
        return open_tls(*self.tls) if self.tls else None


def configure(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Configuration, bool]:
    """The configuration, and whether it is only to be checked. Raises ConfigurationError, PortError,
    SecretError or InventoryError."""
    given = vars(parser().parse_args(argv))
    file = given.pop("config") or environment.get(VARIABLE + "CONFIG", "")
    is_check = bool(given.pop("check"))
    return _judged(merged(given, environment, file), environment), is_check


def _judged(told: Mapping[str, Any], environment: Mapping[str, str]) -> Configuration:
    for needed in ("identity", "state"):
        if not told[needed]:
            raise ConfigurationError(f"The agent needs --{needed}; see --help.")
    identity = read_identity(Path(told["identity"]))
    state = Path(told["state"]).resolve()
    is_plain_allowed, engine_tls = told["plain_http"], told["engine_tls"]
    address, port = parse_listen(told["listen"], is_plain_allowed=is_plain_allowed or engine_tls)
    tls = parse_tls(told["tls_certificate"], told["tls_key"])
    if engine_tls:
        check_engine_tls(tls)
    return Configuration(
        identity=identity,
        state=state,
        address=address,
        port=port,
        tls=tls,
        engine_tls=engine_tls,
        control_plane=parse_control_plane(told["control_plane"], is_plain_allowed=is_plain_allowed),
        store=Path(told["store"] or state / "weights").resolve(),
        store_limit_bytes=parse_size("--store-limit", told["store_limit"]),
        fetches=parse_count("--fetches", told["fetches"], 100),
        fetch_bytes_per_s=parse_size("--fetch-rate", told["fetch_rate"]),
        peer_patience_s=parse_time_s("--peer-patience", told["peer_patience"]),
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
            f"--identity {path} is not a JSON object with cluster, node, name and token; join again "
            f"(`manage.py node_join_token`), or have it written again by `manage.py node_add`."
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
            f"--listen {text} would have gateways and engines talk over the network unencrypted; listen on a "
            f"loopback address, have engines answer over TLS (--engine-tls), or add --plain-http where the "
            f"network is trusted or encrypted."
        )
    return str(address), int(port)


def parse_tls(certificate: str, key: str) -> tuple[Path, Path] | None:
    """Both files, tried. Raises ConfigurationError."""
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise ConfigurationError("--tls-certificate and --tls-key go together; give both, or neither.")
    files = Path(certificate).resolve(), Path(key).resolve()
    open_tls(*files)
    return files


def check_engine_tls(tls: tuple[Path, Path] | None) -> None:
    """Raises ConfigurationError where there is nothing that engines could show."""
    if tls is None:
        raise ConfigurationError(
            "--engine-tls has no certificate that engines could show; give --tls-certificate and --tls-key, "
            "or let the join make both where openssl is."
        )
    try:
        checksum_of(tls[0].read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--tls-certificate {tls[0]} cannot be told to gateways ({error}); give it in PEM, its own "
            "certificate first."
        ) from None


def open_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises ConfigurationError."""
    for path in (certificate, key):
        if not path.is_file():
            raise ConfigurationError(f"There is no file {path} for TLS; correct the path.")
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        raise ConfigurationError(f"Others may read --tls-key {key}; run `chmod 600 {key}`.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", "") or error.strerror or "a passphrase is on it"
        raise ConfigurationError(
            f"--tls-certificate {certificate} and --tls-key {key} cannot be used together ({why}); "
            f"give a PEM certificate and its own key, without a passphrase."
        ) from None
    return context


def parse_control_plane(text: str, *, is_plain_allowed: bool) -> str:
    """Scheme, host and port alone. Raises ConfigurationError."""
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        is_sound = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.path in ("", "/")
            and not (parts.query or parts.fragment or parts.username or parts.password)
        )
    except ValueError:
        is_sound = False
    if not is_sound:
        raise ConfigurationError(
            f"--control-plane {text}: write scheme and host, such as https://llmgw.example."
        )
    if parts.scheme == "http" and not is_plain_allowed and not is_loopback(parts.hostname or ""):
        raise ConfigurationError(
            f"--control-plane {text} would send this node's token over the network unencrypted; write "
            f"https://, or add --plain-http where the network is trusted or encrypted."
        )
    return text.rstrip("/")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def parse_size(option: str, text: str) -> int:
    """In bytes, 0 where none is given. Raises ConfigurationError."""
    if not text:
        return 0
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(MB|GB|TB)", text)
    size = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size:
        raise ConfigurationError(f"{option} {text}: write a size above nothing, such as 500GB (MB, GB, TB).")
    return size


_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_count(option: str, text: str, most: int) -> int:
    """Raises ConfigurationError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise ConfigurationError(f"{option} {text}: write a whole number from 1 to {most}.")
    return int(text)


def open_root(text: str) -> str:
    """The folder itself, without links. Raises ConfigurationError."""
    path = Path(text)
    if not path.is_absolute() or not path.is_dir():
        raise ConfigurationError(
            f"--root {text} is not a folder with an absolute path; make it, or correct it."
        )
    return str(path.resolve())
