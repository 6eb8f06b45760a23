"""The agent's beginning and end.

    python -m nodes.agent --identity FILE --state FOLDER [--listen 127.0.0.1:8378] [--store FOLDER]
        [--engine llamacpp=PROGRAM] [--allow-arg=OPTION] [--sim-gpus 2:sim] [--gpu-class NAME=CLASS]
        [--label NAME=VALUE] [--secrets FOLDER] [--fabric NAME] [--port-range 18000-18999] [--stop-grace 30s]
        [--engines-stop-with-agent] [--plain-http]

The identity is a JSON file, mode 0600: {"cluster": UUID, "node": UUID, "name": ..., "token": ...}. TERM ends
the agent alone; its engines run on and the next agent takes them up, unless they are to stop with it.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web

from catalog.durations import SECOND, parse_duration
from nodes.agent.app import Agent, Identity
from nodes.agent.gpus import Devices, check_gpu_classes, parse_sim_gpus
from nodes.agent.host import Host
from nodes.agent.inventory import InventoryError, find_engines
from nodes.agent.ports import PortError, check_port_range
from nodes.agent.ranks import Ranks, is_uuid
from nodes.agent.secrets import SecretError, Secrets, open_folder
from nodes.agent.state import StateError, StateFolder

DEFAULT_LISTEN = "127.0.0.1:8378"
DEFAULT_PORT_RANGE = "18000-18999"


class ConfigurationError(Exception):
    """The agent cannot start like this; the text is the sentence."""


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


def parse_grace_s(text: str) -> float:
    """Raises ConfigurationError."""
    try:
        return parse_duration(text) / SECOND
    except ValueError as error:
        raise ConfigurationError(f"--stop-grace {text} {error}.") from None


async def serve(options: argparse.Namespace) -> None:
    """Until TERM or INT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    identity = read_identity(options.identity)
    address, port = parse_listen(options.listen, is_plain_allowed=options.plain_http)
    classes = check_gpu_classes(parse_pairs("--gpu-class", options.gpu_class))
    devices = Devices(parse_sim_gpus(options.sim_gpus), node=identity.node, classes=classes)
    engines = find_engines(parse_pairs("--engine", options.engine))
    ports = parse_port_range(options.port_range)
    labels = parse_pairs("--label", options.label)
    grace_s = parse_grace_s(options.stop_grace)
    secrets = Secrets(os.environ, open_folder(options.secrets))
    state = StateFolder.open(options.state.resolve())
    # Idle connections are let go before an engine closes them itself (llama-server does after 5 s).
    connector = aiohttp.TCPConnector(keepalive_timeout=3, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    ) as session:
        host = Host(
            node=identity.node,
            state=state,
            engines=engines,
            session=session,
            store=(options.store or options.state / "weights").resolve(),
            address=address,
            ports=ports,
            allowed_args=frozenset(options.allow_arg),
            secrets=secrets,
            stop_grace_s=grace_s,
            engines_end_with_agent=options.engines_stop_with_agent,
        )
        ranks = Ranks(host, cluster=identity.cluster, gpus=devices.read)
        agent = Agent(identity, ranks, devices, engines=engines, labels=labels, fabric=options.fabric)
        runner = web.AppRunner(agent.app(), access_log=None, handle_signals=False, shutdown_timeout=1)
        door = _bind(address, port)
        try:
            ranks.recover()  # before anybody can ask what there is
            await runner.setup()
            await web.SockSite(runner, door).start()
            shown = f"[{address}]" if ":" in address else address
            print(f'llmgw agent "{identity.name}" listens on http://{shown}:{port}', flush=True)
            await stopping.wait()
        finally:
            await runner.cleanup()
            await ranks.close(stop_engines=options.engines_stop_with_agent)
            state.close()


def _bind(address: str, port: int) -> socket.socket:
    """Raises ConfigurationError."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigurationError(
            f"--listen {address}:{port} is not to be had ({why}); choose another port."
        ) from None


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nodes.agent",
        description="Runs engines on this node, as llmgw tells it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--identity", type=Path, required=True, metavar="FILE", help="who this node is: JSON, mode 0600")
    add(
        "--state", type=Path, required=True, metavar="FOLDER", help="what the agent keeps; one agent a folder"
    )
    add("--listen", default=DEFAULT_LISTEN, metavar="ADDRESS:PORT", help="default %(default)s")
    add("--plain-http", action="store_true", help="allow an address that is not loopback")
    add("--store", type=Path, metavar="FOLDER", help="where weights go; default weights/ in the state folder")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=PROGRAM",
        help="where an engine is, if not on PATH",
    )
    add(
        "--allow-arg",
        action="append",
        default=[],
        metavar="OPTION",
        help="let profiles give this engine option",
    )
    add(
        "--secrets",
        type=Path,
        metavar="FOLDER",
        help="files, mode 0600, that secret:NAME in a profile's env stands for",
    )
    add("--sim-gpus", default="", metavar="N:CLASS", help="make up cards, such as 2:sim or 8:h100-80g")
    add(
        "--gpu-class",
        action="append",
        default=[],
        metavar="NAME=CLASS",
        help='class of a product, such as "NVIDIA H100 80GB HBM3=h100"; else made of its name and memory',
    )
    add("--label", action="append", default=[], metavar="NAME=VALUE", help="what node selectors look for")
    add("--fabric", default="", metavar="NAME", help="the fast interconnect this node is on")
    add("--port-range", default=DEFAULT_PORT_RANGE, metavar="A-B", help="for engines; default %(default)s")
    add("--stop-grace", default="30s", metavar="TIME", help="between TERM and KILL; default %(default)s")
    add("--engines-stop-with-agent", action="store_true", help="for trials: leave nothing running")
    return parser.parse_args(argv)


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        asyncio.run(serve(read_options(sys.argv[1:])))
    except (ConfigurationError, InventoryError, PortError, SecretError, StateError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
