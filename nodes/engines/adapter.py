"""The words of `nodes/engines`: what an engine is told, and what an adapter knows of one kind of engine.

An adapter turns a Launch and a Seat into a Command. It starts nothing, opens no file and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from catalog.arguments import ABBREVIATING, option_of
from catalog.owned import OWNED_ENV, owner_of
from nodes.protocol import Launch

SHOWN_KEY = "<key>"


class RenderError(ValueError):
    """A launch that no command can be made of; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What the node adds to a launch: program, weights' place, address, key, devices.

    executable: the first words of the command line. gpus: device UUIDs, none for a CPU-only profile.
    port: None where none is chosen yet, as in a preview. meeting: host and port where the ranks of a replica
    over several nodes find each other; fabric_address: where the others reach this one. allowed_args: options
    that the node's own configuration lets through although they open files or run code. tls: files of the
    certificate and of its key, where it answers over TLS.
    """

    executable: Sequence[str]
    host: str
    port: int | None
    key: str
    model_path: str = ""
    gpus: Sequence[str] = ()
    rank: int = 0
    meeting: tuple[str, str] = ("", "")
    fabric_address: str = ""
    allowed_args: Set[str] = frozenset()
    tls: Sequence[str] = ()

    @property
    def address(self) -> tuple[str, ...]:
        """Where the engine listens, as every engine is told it."""
        return ("--host", self.host, "--port", "<port>" if self.port is None else str(self.port))


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. The replica's key is in `env`; for an engine that takes it on its command line alone it is
    `key_in_argv`, and only `shown` may be kept or told to anyone."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    key_in_argv: str = ""

    @property
    def shown(self) -> tuple[str, ...]:
        return tuple(SHOWN_KEY if word == self.key_in_argv and word else word for word in self.argv)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One kind of engine.

    executables: names looked for on PATH (none: the agent brings the engine along).
    package: the Python package that it is, which tells its version sooner than the program does.
    needs_weights: whether a source has to be on the node before the start.
    needs_checkout: whether its program imports modules of this checkout.
    running, waiting: the metrics that count its requests, summed over their labels.
    progress: metrics of which one at least changes while it works at a request, its prompt included.
    figures: what it tells besides, by our names (`figures.FIGURES`): its metrics, which are added up.
    context_path, context_keys: where its answer tells how long one request's context may be.
    tls_options: by which it is given its certificate, and the key of that.
    uncached_args: options by which a profile has the engine compute every prompt anew.
    refused_args: option -> what it would do. Refused unless the node's own configuration lets it through.
    harmless_args: options that begin like a refused one and are options of their own.
    refused_env: beginnings of environment names that a profile may not set, and why.
    remark: what an operator should know of every replica on this engine.
    """

    name: str
    title: str
    command: Callable[[Launch, Seat], Command]
    executables: tuple[str, ...] = ()
    package: str = ""
    needs_weights: bool = True
    needs_checkout: bool = False
    health_path: str = "/health"
    metrics_path: str = "/metrics"
    running: str = ""
    waiting: str = ""
    progress: tuple[str, ...] = ()
    figures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    context_path: str = "/v1/models"
    context_keys: tuple[str | int, ...] = ("data", 0, "max_model_len")
    tls_options: tuple[str, str] = ("--ssl-certfile", "--ssl-keyfile")
    uncached_args: tuple[str, ...] = ()
    refused_args: Mapping[str, str] = field(default_factory=dict)
    harmless_args: Set[str] = frozenset()
    refused_env: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


# A profile's environment could otherwise load code into an engine, or let it pass for another replica's.
REFUSED_ENV = {
    "LD_": "it loads code into the engine",
    "PYTHON": "it loads code into the engine",
    "BASH_ENV": "it runs code",
    "LLMGW_": "the agent marks its processes with it",
}


def render(adapter: Adapter, launch: Launch, seat: Seat) -> Command:
    """The command of this launch on this seat. Raises RenderError."""
    if (
        seat.port is not None and not 1 <= seat.port <= 65_535
    ):  # an engine may wrap such a port around and listen elsewhere
        raise RenderError(f"Port {seat.port} does not exist; give the agent a --port-range below 65536.")
    for argument in profile_args(launch):
        _judge_arg(adapter, launch, seat, argument)
    for name in profile_env(launch):
        _judge_env(adapter, launch, name)
    command = adapter.command(launch, seat)
    # After all others: of an option given twice the last one counts.
    tls = [word for pair in zip(adapter.tls_options, seat.tls, strict=False) for word in pair]
    theirs = {name: value for name, value in profile_env(launch).items() if name not in OWNED_ENV}
    env = {**theirs, **visible_devices(seat), **command.env}
    return replace(command, argv=(*command.argv, *tls), env=env)


def profile_args(launch: Launch) -> list[str]:
    args = launch.profile.get("args", [])
    if not isinstance(args, (list, tuple)) or not all(isinstance(each, str) for each in args):
        raise RenderError(f"{subject(launch)}: args is not a list of texts; correct it in the catalog.")
    return list(args)


def profile_env(launch: Launch) -> dict[str, str]:
    env = launch.profile.get("env", {})
    if not isinstance(env, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in env.items()
    ):
        raise RenderError(f"{subject(launch)}: env is not a map of texts; correct it in the catalog.")
    return dict(env)


def visible_devices(seat: Seat) -> dict[str, str]:
    """By UUID: indices change when a card is added. Empty hides every card from a CPU-only engine."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(seat.gpus)}


def _judge_arg(adapter: Adapter, launch: Launch, seat: Seat, argument: str) -> None:
    if "\0" in argument:
        raise RenderError(f"{subject(launch)}: an argument holds a NUL character; remove it.")
    option = argument.split("=", 1)[0]
    if owner := owner_of(argument, adapter.name):
        raise RenderError(f"{subject(launch)}: {option} is {owner}, so a profile may not give it; remove it.")
    refused = _refused_option(adapter, argument)
    if refused and refused not in seat.allowed_args:
        raise RenderError(
            f"{subject(launch)}: {option} {adapter.refused_args[refused]}, which a node allows only by its "
            f"own configuration; remove it, or start the node's agent with --allow-arg={refused}."
        )


def _refused_option(adapter: Adapter, argument: str) -> str:
    """The refused option that the engine would take this word for."""
    option = option_of(argument).partition(".")[0]  # vllm takes `--option.key value` for JSON
    if option in adapter.refused_args:
        return option
    is_too_short = len(option) < (len("--x") if option.startswith("--") else len("-x"))
    if is_too_short or adapter.name not in ABBREVIATING or option in adapter.harmless_args:
        return ""
    return next((known for known in adapter.refused_args if known.startswith(option)), "")


def _judge_env(adapter: Adapter, launch: Launch, name: str) -> None:
    value = profile_env(launch)[name]
    if not name or "=" in name or "\0" in name + value:
        raise RenderError(f"{subject(launch)}: {name!r} cannot be an environment variable; correct it.")
    refused = {**REFUSED_ENV, **adapter.refused_env}
    why = next((why for start, why in refused.items() if name.startswith(start)), "")
    if why:
        raise RenderError(f"{subject(launch)}: env may not set {name}, as {why}; remove it.")


def number_of(launch: Launch, key: str) -> int:
    """A count in the profile, such as tp or nodes; 1 where it has none."""
    value = launch.profile.get(key)
    return value if isinstance(value, int) and value > 0 else 1


def join_meeting(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def subject(launch: Launch) -> str:
    return f'model "{launch.model}" profile "{launch.profile.get("name", "")}"'
