"""The agent's beginning and end.

    python -m nodes.agent --identity FILE --state FOLDER [--listen 127.0.0.1:8378] [--config FILE] ...
    python -m nodes.agent --check ...     judge the configuration, print what the agent would tell, and say
                                          whether the control plane that it was given knows it

The identity is a JSON file, mode 0600: {"cluster": UUID, "node": UUID, "name": ..., "token": ...}. TERM ends
the agent alone; its engines run on and the next agent takes them up, unless they are to stop with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from aiohttp.connector import NEEDS_CLEANUP_CLOSED

from nodes.agent.app import Agent
from nodes.agent.configuration import Configuration, configure
from nodes.agent.gpus import Devices
from nodes.agent.hints import HintError, Hints, hint
from nodes.agent.host import Host
from nodes.agent.inventory import FoundEngine, InventoryError, find_engines
from nodes.agent.options import ConfigurationError
from nodes.agent.ports import PortError
from nodes.agent.ranks import Ranks
from nodes.agent.report import node_report
from nodes.agent.secrets import SecretError
from nodes.agent.state import StateError, StateFolder
from nodes.agent.weights.fetches import Fetches
from nodes.protocol import to_json

# A connection whose other end is gone without a word is noticed within 35 s.
UNHEARD_MS = 30_000
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


async def serve(configuration: Configuration) -> None:
    """Until TERM or INT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    identity = configuration.identity
    devices = _devices(configuration)
    engines = _engines(configuration)
    state = StateFolder.open(configuration.state)
    async with open_session() as session:
        hints = Hints(configuration.control_plane, identity, session)
        host = Host(
            configuration,
            state=state,
            engines=engines,
            devices=devices,
            session=session,
            hints=hints,
            fetches=Fetches(configuration, state),
        )
        ranks = Ranks(host)
        agent = Agent(host, ranks, token=identity.token)
        runner = web.AppRunner(agent.app(), access_log=None, handle_signals=False, shutdown_timeout=1)
        door = bind(configuration.address, configuration.port)
        sender = asyncio.create_task(hints.send(), name="hints")
        try:
            ranks.recover()  # before anybody can ask what there is
            await runner.setup()
            await web.SockSite(runner, door, ssl_context=configuration.tls_context()).start()
            print(f'llmgw agent "{identity.name}" listens on {configuration.url}', flush=True)
            hints.tell()  # it is there
            await stopping.wait()
        finally:
            sender.cancel()
            await runner.cleanup()
            await ranks.close(stop_engines=configuration.engines_end_with_agent)
            state.close()


@contextlib.asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """By which engines and the control plane are asked."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            keepalive_timeout=3,  # let go before an engine does so itself (llama-server does after 5 s)
            limit=0,
            # Before 3.12.8, Python leaves a connection open whose certificate was found wrong.
            enable_cleanup_closed=NEEDS_CLEANUP_CLOSED,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )
    try:
        yield session
    finally:
        # Such a one is aborted last of all, and 3.11.2 fails there where it has come to its end meanwhile.
        with contextlib.suppress(AttributeError):
            await session.close()


def bind(address: str, port: int) -> socket.socket:
    """Raises ConfigurationError."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        door = socket.create_server((address, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigurationError(
            f"--listen {address}:{port} is not to be had ({why}); choose another port."
        ) from None
    # Connections have these from the socket that they came in by.
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
    for name, value in KEEPALIVE.items():
        door.setsockopt(socket.IPPROTO_TCP, name, value)
    return door


def _devices(configuration: Configuration) -> Devices:
    return Devices(
        configuration.sim_gpus, node=configuration.identity.node, classes=configuration.gpu_classes
    )


def _engines(configuration: Configuration) -> dict[str, FoundEngine]:
    return find_engines(configuration.engines, with_tls=configuration.engine_tls)


def check(configuration: Configuration) -> None:
    """Print what would be told. Beside an agent that runs, nothing of it is touched."""
    report = node_report(configuration, _devices(configuration), _engines(configuration))
    print(json.dumps(to_json(report), indent=2))
    identity = configuration.identity
    print(f'node "{identity.name}" of cluster {identity.cluster}, at {configuration.url}', file=sys.stderr)
    if configuration.control_plane:
        asyncio.run(_meet(configuration))
        print(f"llmgw at {configuration.control_plane} knows this node", file=sys.stderr)


async def _meet(configuration: Configuration) -> None:
    """Raises HintError."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        await hint(configuration.control_plane, configuration.identity, session)


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        configuration, is_check = configure(sys.argv[1:], os.environ)
        if is_check:
            check(configuration)
        else:
            asyncio.run(serve(configuration))
    except (ConfigurationError, HintError, InventoryError, PortError, SecretError, StateError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
