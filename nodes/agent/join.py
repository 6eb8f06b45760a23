"""Makes this machine a node: meets the control plane, writes what the agent is told, and has it started.

    python -m nodes.agent.join --control-plane URL [--name NAME] [--address URL] [--home FOLDER]
                               [--no-service] [any option of the agent]
    python -m nodes.agent.join --uninstall [--home FOLDER]

The join token is the first line of standard input. Whatever can be found wrong on this machine is found
before the token is used. Run again, it repairs or updates what is there: the identity, the certificate, the
configuration and what is kept stay, so that no run makes a second node of one machine.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from nodes.agent.configuration import (
    Configuration,
    Identity,
    configure,
    is_loopback,
    parse_control_plane,
    parse_listen,
)
from nodes.agent.files import write_text
from nodes.agent.gpus import check_gpu_classes
from nodes.agent.home import Home, HomeError, as_toml, toml_value
from nodes.agent.install import NAME, InstallError, add_home, open_home
from nodes.agent.inventory import InventoryError, find_engines
from nodes.agent.options import ConfigurationError, add_options, from_flags
from nodes.agent.ports import PortError
from nodes.agent.processes import marked_processes
from nodes.agent.secrets import SecretError
from nodes.agent.service import Service, ServiceError
from nodes.agent.state import is_uuid

PORT = 8378
PATIENCE_S = 30.0
START_S = 20.0
OURS = ("identity", "state")  # options that follow from where all of it is


class JoinError(Exception):
    """This machine cannot be a node like this; the text is the sentence."""


REFUSALS = (
    *(ConfigurationError, HomeError, InstallError, InventoryError, JoinError, PortError, SecretError),
    ServiceError,
)


# --- joining ----------------------------------------------------------------------------------------------


def join(home: Home, given: Namespace, token: str) -> None:
    """Raises one of REFUSALS."""
    control_plane = parse_control_plane(given.control_plane or "", is_plain_allowed=True)
    if not control_plane:
        raise JoinError(
            "The join needs --control-plane; run the line that `manage.py node_join_token` prints."
        )
    service = Service.here(home.path, is_wanted=not given.no_service)
    known = home.known()
    told = _told(home, given, control_plane)
    configuration = _tried(told)
    if not home.is_agent_running():
        _try_port(configuration)
    introduction = {
        "name": given.name or (known.name if known else ""),  # a node keeps its name
        "address": given.address or _address(configuration, control_plane),
        **_introduction(home, known, configuration),
    }
    answer = asyncio.run(_meet(control_plane, token, introduction))
    identity = _identity(answer)
    write_text(home.identity, json.dumps(asdict(identity), indent=2) + "\n")
    if not home.toml.exists():
        write_text(home.toml, as_toml(_with_labels(told, answer)))
    home.write_scripts()
    print(f'This machine is the node "{identity.name}" of cluster {identity.cluster}.', flush=True)
    _begin(home, service, configuration)
    print(f"To take it off again: {shlex.quote(str(home.uninstall))}")


def _told(home: Home, given: Namespace, control_plane: str) -> dict[str, Any]:
    """What agent.toml says or will say. Raises JoinError where the line and the file differ."""
    flags = {name: value for name, value in from_flags(vars(given)).items() if value is not False}
    flags["control_plane"] = control_plane
    for option in OURS:
        if option in flags:
            raise JoinError(f"--{option} follows from --home when a machine joins; leave it out.")
    if home.toml.exists():
        return _kept(home, flags)
    told: dict[str, Any] = {"identity": str(home.identity), "state": str(home.state), **flags}
    is_plain_allowed, engine_tls = told.get("plain_http", False), told.get("engine_tls", False)
    parse_control_plane(control_plane, is_plain_allowed=is_plain_allowed)  # before anything is asked there
    if "listen" not in told:
        told["listen"] = f"{_way_to(control_plane)}:{PORT}"
    address, _ = parse_listen(told["listen"], is_plain_allowed=is_plain_allowed or engine_tls)
    is_shown = engine_tls or not is_loopback(address)
    if is_shown and "tls_certificate" not in told and home.has_certificate():
        told |= {"tls_certificate": str(home.certificate), "tls_key": str(home.key)}
    return told


def _kept(home: Home, flags: Mapping[str, Any]) -> dict[str, Any]:
    try:
        kept = tomllib.loads(home.toml.read_text())
    except (OSError, ValueError) as error:
        raise JoinError(f"{home.toml} cannot be read ({error}); correct it, or remove it.") from None
    for name, value in flags.items():
        if kept.get(name) != value:
            raise JoinError(
                f"{home.toml} is kept as it is, and has no {name} = {toml_value(value)} as this line says; "
                f"edit it, or leave --{name.replace('_', '-')} as it was."
            )
    return kept


def _way_to(control_plane: str) -> str:
    """The address of this machine from which the control plane is reached. Raises JoinError."""
    parts = urlsplit(control_plane)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=PATIENCE_S) as connection:
            found = str(connection.getsockname()[0])
    except OSError as error:
        raise JoinError(
            f"llmgw at {control_plane} cannot be reached ({error.strerror or error}); check the address, and "
            f"that the way to it is open."
        ) from None
    return "127.0.0.1" if is_loopback(found) else f"[{found}]" if ":" in found else found


def _tried(told: Mapping[str, Any]) -> Configuration:
    """What the agent makes of it, whoever the node will be. Raises what its configuration is refused with."""
    nobody = {"cluster": str(_NOBODY), "node": str(_NOBODY), "name": "nobody", "token": "none"}
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        identity, toml = Path(folder, "identity"), Path(folder, "toml")
        write_text(identity, json.dumps(nobody))
        write_text(toml, as_toml({**told, "identity": str(identity)}))
        configuration, _ = configure(["--config", str(toml)], os.environ)
    find_engines(configuration.engines, with_tls=configuration.engine_tls)
    check_gpu_classes(configuration.gpu_classes)
    return configuration


_NOBODY = "00000000-0000-4000-8000-000000000000"


def _try_port(configuration: Configuration) -> None:
    """Raises JoinError."""
    family = socket.AF_INET6 if ":" in configuration.address else socket.AF_INET
    try:
        socket.create_server((configuration.address, configuration.port), family=family).close()
    except OSError as error:
        where = f"{configuration.address}:{configuration.port}"
        raise JoinError(
            f"The agent cannot listen on {where} ({os.strerror(error.errno or 0)}); give another address or "
            f"port with --listen."
        ) from None


def _address(configuration: Configuration, control_plane: str) -> str:
    """Where the control plane finds an agent that is not told otherwise. Raises JoinError."""
    if not ip_address(configuration.address).is_unspecified:
        return configuration.url
    return f"{urlsplit(configuration.url).scheme}://{_way_to(control_plane)}:{configuration.port}"


def _introduction(home: Home, known: Identity | None, configuration: Configuration) -> dict[str, str]:
    """Which machine this is, and which node it is already."""
    if not home.claim.exists():
        write_text(home.claim, secrets.token_hex(32))
    is_ours = configuration.tls is not None and configuration.tls[0] == home.certificate.resolve()
    return {
        "host": socket.gethostname(),
        "certificate": home.checksum() if is_ours else "",
        "claim": home.claim.read_text().strip(),
        "cluster": known.cluster if known else "",
        "node": known.node if known else "",
        "token": known.token if known else "",
    }


async def _meet(control_plane: str, token: str, introduction: Mapping[str, str]) -> Mapping[str, Any]:
    """Its answer. Raises JoinError with its own sentence where it refuses."""
    patience = aiohttp.ClientTimeout(total=PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=patience, trust_env=False) as session,
            session.post(
                f"{control_plane}/api/nodes/join",
                json=dict(introduction),
                headers={"Authorization": f"Bearer {token}"},
                allow_redirects=False,
            ) as response,
        ):
            status, answer = response.status, await response.json(content_type=None)
    except TimeoutError:
        raise JoinError(
            f"llmgw at {control_plane} did not answer within {PATIENCE_S:g} s; run the same line again."
        ) from None
    except (aiohttp.ClientError, OSError) as fault:
        raise JoinError(
            f"llmgw at {control_plane} cannot be reached ({fault}); run the same line again."
        ) from None
    except ValueError:
        raise JoinError(f"{control_plane} does not answer as llmgw does; correct --control-plane.") from None
    if status != 200 or not isinstance(answer, dict):
        raise JoinError(_refusal(control_plane, status, answer))
    return answer


def _refusal(control_plane: str, status: int, answer: object) -> str:
    try:
        return str(answer["errors"][0]["sentence"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return f"llmgw at {control_plane} answered with status {status}; is that its address?"


def _identity(answer: Mapping[str, Any]) -> Identity:
    identity = Identity(*(str(answer.get(name, "")) for name in ("cluster", "node", "name", "token")))
    if not is_uuid(identity.cluster) or not is_uuid(identity.node) or not identity.token:
        raise JoinError("The answer to the join cannot be read; bring the control plane to one version.")
    return identity


def _with_labels(told: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the token, unless the machine has its own of that name."""
    labels = answer.get("labels")
    ours = {**(labels if isinstance(labels, dict) else {}), **told.get("label", {})}
    return {**told, "label": {str(name): str(value) for name, value in ours.items()}} if ours else dict(told)


# --- its beginning and end --------------------------------------------------------------------------------


def _begin(home: Home, service: Service | None, configuration: Configuration) -> None:
    """Raises JoinError where a service was started and nothing answers."""
    if service is None:
        was = " again, once the one that runs has been stopped" if home.is_agent_running() else ""
        print(f"systemd does not start it. Start the agent{was} by: {shlex.quote(str(home.run))}")
        return
    service.start(home.run)
    if not service.is_up(configuration.address, configuration.port, START_S):
        raise JoinError(f"The agent was started and does not answer; {service.tells} tells why.")
    print(f"The agent runs, and starts with the machine ({service.tells} tells what it does).")


def uninstall(home: Home) -> None:
    """Stop the agent and remove all of it, weights included. Raises JoinError while an engine runs."""
    known = home.known()
    if not home.path.is_dir() or known is None:
        raise JoinError(f"There is no agent in {home.path}; name its folder with --home.")
    engines = {seen.mark.replica for seen in marked_processes(known.node)}
    if engines:
        raise JoinError(
            f'The node "{known.name}" runs {len(engines)} replica{"s" * (len(engines) > 1)}; drain it first '
            f"(manage.py node_drain), and come back when none is left."
        )
    service = Service.here(home.path, is_wanted=True)
    if service is not None:
        service.remove()
    if home.is_agent_running():
        number = home.agent_number()
        how = f"kill {number}" if number else "Ctrl-C where it was started"
        raise JoinError(f"The agent in {home.path} runs; stop it ({how}), then run this again.")
    shutil.rmtree(home.path)
    print(f'The agent is gone from this machine. On the control plane: manage.py node_remove "{known.name}"')


# --- the door ---------------------------------------------------------------------------------------------


def parser() -> ArgumentParser:
    found = ArgumentParser(prog=NAME, description="Makes this machine a node of llmgw.", allow_abbrev=False)
    add_home(found)
    found.add_argument(
        "--name", default="", help="of the node; if left out, the token's, or the machine's own"
    )
    found.add_argument(
        "--address", default="", metavar="URL", help="where llmgw reaches the agent, if not at --listen"
    )
    found.add_argument("--no-service", action="store_true", help="leave systemd alone")
    found.add_argument("--uninstall", action="store_true", help="take the agent off this machine")
    add_options(found)
    return found


def main() -> None:
    given = parser().parse_args()
    home = Home(given.home.absolute())
    try:
        if given.uninstall:
            uninstall(home)
            return
        open_home(home.path)
        token = (getpass.getpass("Join token: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
        join(home, given, token)
    except REFUSALS as no:
        sys.exit(str(no))
    except OSError as error:
        sys.exit(f"{error.filename or home.path}: {error.strerror}; see to it, then run the line again.")


if __name__ == "__main__":
    main()
