"""What is about to be started, put together: the engine's port, command and environment. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nodes.agent.failures import Failed
from nodes.agent.host import Host
from nodes.agent.inventory import FoundEngine
from nodes.agent.ports import PortError, find_port
from nodes.agent.processes import Mark, inherited, marks
from nodes.agent.secrets import SecretError
from nodes.agent.state import Record
from nodes.certificates import checksum_of
from nodes.engines import Command, RenderError, Seat, render
from nodes.engines.adapter import join_meeting
from nodes.engines.causes import Cause
from nodes.protocol import CONFIGURATION, NODE, TRANSIENT


@dataclass(frozen=True, slots=True)
class Prepared:
    """command.argv is what runs; only command.shown may be told. certificate: the checksum of the one that
    its port will show, empty where it speaks plain HTTP."""

    port: int
    command: Command
    env: Mapping[str, str]
    certificate: str


def mark_of(record: Record) -> Mark:
    return Mark(record.id, record.assignment.generation, record.assignment.rank)


def engine_of(host: Host, name: str) -> FoundEngine:
    """Raises Failed."""
    if name not in host.engines:
        sentence = f"The engine {name} is no longer on this node; install it, or give it with --engine."
        raise Failed(Cause("engine_absent", sentence, NODE))
    return host.engines[name]


def prepare(host: Host, record: Record, model_path: str, taken_ports: set[int]) -> Prepared:
    """taken_ports: those that other ranks hold. Raises Failed."""
    assignment, configuration = record.assignment, host.configuration
    engine = engine_of(host, assignment.launch.engine)
    # Rank 0 alone has a door. Words may hand the files to any rank.
    certificate = own_certificate(host) if configuration.engine_tls and assignment.rank == 0 else ""
    try:
        port = next_port(host, configuration.address, taken_ports)
        seat = Seat(
            executable=engine.words,
            host=configuration.address,
            port=port,
            key=assignment.key,
            model_path=model_path,
            gpus=tuple(assignment.gpus),
            rank=assignment.rank,
            meeting=split_meeting(record.meeting),
            fabric_address=configuration.meeting_address,
            allowed_args=configuration.allowed_args,
            tls=tuple(map(str, configuration.tls or ())) if certificate else (),
        )
        command = render(assignment.launch, seat)
        given = {**engine.env, **configuration.secrets.resolve(command.env)}
    except PortError as error:
        raise Failed(Cause("port_in_use", str(error), TRANSIENT)) from None
    except RenderError as error:
        raise Failed(Cause("bad_argument", str(error), CONFIGURATION)) from None
    except SecretError as error:
        raise Failed(Cause("no_secret", str(error), NODE)) from None
    mark, node = mark_of(record), configuration.identity.node
    marked = {**given, **marks(mark, node=node, port=port, certificate=certificate)}
    words = engine.fill(
        env=sorted(marked),
        gpus=assignment.gpus,
        model=model_path,
        name=f"llmgw-{str(mark).replace(':', '-')}",
        tls=configuration.tls if configuration.engine_tls else None,
    )
    command = replace(command, argv=(*words, *command.argv[len(engine.words) :]))
    return Prepared(port, command, {**inherited(os.environ), **marked}, certificate)


def own_certificate(host: Host) -> str:
    """As it is now, whatever it was when the agent started. Raises Failed."""
    assert host.configuration.tls is not None, "engines that speak TLS need one"
    path, _ = host.configuration.tls
    try:
        return checksum_of(path.read_text())
    except (OSError, ValueError) as error:
        sentence = f"The certificate {path} cannot be read ({error}); correct it on the node."
        raise Failed(Cause("no_certificate", sentence, NODE)) from None


def next_port(host: Host, address: str, taken: set[int]) -> int:
    """Raises PortError."""
    first, last = host.configuration.ports
    return find_port(address, first, last, start=host.state.ledger.next_port, taken=taken)


def meeting_at(address: str, port: int) -> str:
    return join_meeting(address, str(port))


def split_meeting(meeting: str) -> tuple[str, str]:
    address, _, port = meeting.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), port
