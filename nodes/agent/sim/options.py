"""What the sim engine can be told on its command line; `--help` says all of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catalog.durations import HOUR, MINUTE, SECOND, format_duration, parse_duration
from nodes.agent.sim.gang import Place
from nodes.agent.sim.lies import LIES
from nodes.agent.sim.recordings import recordings

LONGEST_NS = 24 * HOUR
MEMORY_LIMIT_MIB = 4096
CRASHES = ("exit", "kill", "core")


@dataclass(frozen=True, slots=True)
class Options:
    """One process's. A number of tokens after which something goes wrong is 0 where nothing does."""

    model: str
    host: str
    port: int
    tls: tuple[str, str] | None
    key: str
    ttft_s: float
    tpot_s: float
    load_time_s: float
    context_length: int
    default_tokens: int
    max_num_seqs: int
    max_num_queued_reqs: int | None
    block_size: int
    kv_blocks: int
    is_caching: bool
    tells_cached_tokens: bool
    tool_parser: str
    is_choosing_tools: bool
    is_seeing: bool
    lies: frozenset[str]
    gang: Place | None
    fail_load: str
    fail_load_as: str
    stall_after: int
    hang_after: int
    crash_after: int
    crash_how: str
    workers: int
    workers_outlive_s: float
    memory_growth_mib: int
    memory_growth_limit_mib: int


def read_options(argv: Sequence[str], *, key: str) -> Options:
    """Ends the process with a usage error, as argparse does."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.nnodes > 1 and not (given.master_addr and given.master_port):
        parser.error("--nnodes above 1 needs --master-addr and --master-port, where the ranks meet.")
    if given.node_rank >= given.nnodes:
        parser.error(f"--node-rank {given.node_rank} is not among 0 to {given.nnodes - 1}; see --nnodes.")
    if bool(given.ssl_certfile) != bool(given.ssl_keyfile):
        parser.error("--ssl-certfile and --ssl-keyfile go together; give both or neither.")
    if given.fail_load and given.fail_load_as:
        parser.error("--fail-load and --fail-load-as both say how the load fails; give one.")
    for dependent, needed in (
        ("crash_how", "crash_after"),
        ("workers_outlive", "workers"),
        ("memory_growth_limit", "memory_growth"),
    ):
        if getattr(given, dependent) is not None and not getattr(given, needed):
            parser.error(f"--{dependent} needs --{needed}; give both or neither.".replace("_", "-"))
    place = Place(
        given.node_rank, given.nnodes, given.master_addr, given.master_port, given.rendezvous_timeout
    )
    return Options(
        model=given.model,
        host=given.host,
        port=given.port,
        tls=(given.ssl_certfile, given.ssl_keyfile) if given.ssl_certfile else None,
        key=key,
        ttft_s=given.ttft,
        tpot_s=given.tpot,
        load_time_s=given.load_time,
        context_length=given.context_length,
        default_tokens=given.default_tokens,
        max_num_seqs=given.max_num_seqs,
        max_num_queued_reqs=given.max_num_queued_reqs,
        block_size=given.block_size,
        kv_blocks=given.kv_blocks,
        is_caching=not given.no_enable_prefix_caching,
        tells_cached_tokens=given.enable_prompt_tokens_details,
        tool_parser=given.tool_call_parser,
        is_choosing_tools=given.enable_auto_tool_choice,
        is_seeing=given.vision,
        lies=frozenset(given.lie),
        gang=place if given.nnodes > 1 else None,
        fail_load=given.fail_load,
        fail_load_as=given.fail_load_as,
        stall_after=given.stall_after,
        hang_after=given.hang_after,
        crash_after=given.crash_after,
        crash_how=given.crash_how or CRASHES[0],
        workers=given.workers,
        workers_outlive_s=60.0 if given.workers_outlive is None else given.workers_outlive,
        memory_growth_mib=given.memory_growth,
        memory_growth_limit_mib=given.memory_growth_limit or 256,
    )


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: an option of llmgw's own must not be reachable under a shorter name.
    parser = argparse.ArgumentParser(
        prog="sim",
        description="A synthetic engine: OpenAI's routes in vllm's shapes, without weights. "
        "Its key is VLLM_API_KEY.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="the name it serves")

    where = parser.add_argument_group("address").add_argument
    where("--host", default="127.0.0.1", metavar="ADDRESS", help="default %(default)s")
    where("--port", type=_whole(1, 65_535), required=True, metavar="P", help="1 to 65535")

    where("--ssl-certfile", default="", metavar="FILE", help="the certificate that it shows; PEM")
    where("--ssl-keyfile", default="", metavar="FILE", help="the key of --ssl-certfile")

    pace = parser.add_argument_group("pace (durations such as 300ms or 1.5s, up to 24h)").add_argument
    pace("--load-time", type=_time, default=0.0, metavar="TIME", help="before it listens; default 0s")
    pace(
        "--ttft",
        type=_time,
        default=0.05,
        metavar="TIME",
        help="from a free slot to the first token of a prompt that is not cached, in proportion less of one "
        "that is; default 50ms",
    )
    pace("--tpot", type=_time, default=0.01, metavar="TIME", help="each further token; default 10ms")
    pace(
        "--default-tokens",
        type=_whole(1, 1_000_000),
        default=64,
        metavar="N",
        help="after which an answer without max_tokens ends by itself, 1 to 1000000; default %(default)s. "
        "With max_tokens it has exactly so many, unless a stop text or the end of a JSON text comes first",
    )

    batch = parser.add_argument_group("batch and cache").add_argument
    batch(
        "--context-length",
        type=_whole(1, 1_048_576),
        default=8192,
        metavar="N",
        help="tokens of prompt and answer, 1 to 1048576; default %(default)s",
    )
    batch(
        "--max-num-seqs",
        type=_whole(1, 65_536),
        default=256,
        metavar="N",
        help="requests that run at once, 1 to 65536; others wait; default %(default)s",
    )
    batch(
        "--max-num-queued-reqs",
        type=_whole(0, 1_000_000),
        metavar="N",
        help="requests that may wait, 0 to 1000000; others are refused with 503; default without limit",
    )
    batch(
        "--block-size",
        type=_whole(1, 4096),
        default=16,
        metavar="N",
        help="tokens a cache block, 1 to 4096; default %(default)s",
    )
    batch(
        "--kv-blocks",
        type=_whole(1, 1_000_000),
        default=16_384,
        metavar="N",
        help="blocks the cache has, 1 to 1000000; those least recently used go first; default %(default)s",
    )
    batch("--no-enable-prefix-caching", action="store_true", help="compute every prompt anew")
    batch(
        "--enable-prompt-tokens-details",
        action="store_true",
        help="tell in an answer's usage how many tokens of the prompt were cached",
    )

    tools = parser.add_argument_group("tools (as with vllm, without these two a request's tools are refused)")
    tools.add_argument(
        "--tool-call-parser",
        default="",
        metavar="NAME",
        help="any name; a required or named tool is called, with arguments after its schema",
    )
    tools.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="call a tool that the last message names, where the request leaves the choice",
    )

    sight = parser.add_argument_group("sight (without this a request's pictures are refused)")
    sight.add_argument("--vision", action="store_true", help="tell the colour that most of a PNG has")

    gang = parser.add_argument_group("gang (rank 0 alone serves, once all ranks have joined)").add_argument
    gang("--nnodes", type=_whole(1, 64), default=1, metavar="N", help="ranks, 1 to 64; default %(default)s")
    gang("--node-rank", type=_whole(0, 63), default=0, metavar="R", help="this one's; default %(default)s")
    gang("--master-addr", default="", metavar="ADDRESS", help="where rank 0 lets the others in")
    gang("--master-port", type=_whole(1, 65_535), default=0, metavar="P", help="1 to 65535")
    gang(
        "--rendezvous-timeout",
        type=_time,
        default=600.0,
        metavar="TIME",
        help="how long it waits for the others; default 10m",
    )

    fault = parser.add_argument_group("faults, on command").add_argument
    fault("--fail-load", default="", metavar="WORDS", help="end instead of listening, with these last words")
    fault(
        "--fail-load-as",
        default="",
        choices=recordings(),
        metavar="RECORDING",
        help="end instead of listening, as a real engine did: " + ", ".join(recordings()),
    )
    tokens = _whole(1, 1_048_576)
    fault(
        "--stall-after",
        type=tokens,
        default=0,
        metavar="TOKENS",
        help="once an answer has so many, no answer gets another one; /health and /metrics go on",
    )
    fault(
        "--hang-after",
        type=tokens,
        default=0,
        metavar="TOKENS",
        help="once an answer has so many, the process does nothing any more and does not heed TERM",
    )
    fault(
        "--crash-after",
        type=tokens,
        default=0,
        metavar="TOKENS",
        help="once an answer has so many, the process ends; a shorter one (a probe's) ends well",
    )
    fault(
        "--crash-how",
        choices=CRASHES,
        help="exit: at once, with code 1 (default); kill: by SIGKILL; core: as vllm when its engine core "
        "dies, with an error in each stream, 503 from /health and, soon after, exit code 0",
    )
    fault(
        "--lie",
        action="append",
        default=[],
        choices=tuple(LIES),
        metavar="ABOUT",
        help="; ".join(f"{name}: it {says}" for name, says in LIES.items()) + "; may be given again",
    )
    fault(
        "--workers",
        type=_whole(0, 8),
        default=0,
        metavar="N",
        help="processes beside it that survive its crash or kill, 0 to 8; default %(default)s",
    )
    fault(
        "--workers-outlive",
        type=_time_up_to(10 * MINUTE),
        metavar="TIME",
        help="how long they do, up to 10m; default 1m",
    )
    fault(
        "--memory-growth",
        type=_whole(1, 256),
        default=0,
        metavar="MIB",
        help="memory it takes each second while it serves and never gives back, 1 to 256 MiB",
    )
    fault(
        "--memory-growth-limit",
        type=_whole(1, MEMORY_LIMIT_MIB),
        metavar="MIB",
        help=f"of all that, 1 to {MEMORY_LIMIT_MIB} MiB; default 256",
    )
    return parser


def _time_up_to(longest_ns: int) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        try:
            nanoseconds = parse_duration(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
        if not 0 <= nanoseconds <= longest_ns:
            raise argparse.ArgumentTypeError(f"{text!r} is not from 0s to {format_duration(longest_ns)}")
        return nanoseconds / SECOND

    return seconds


_time = _time_up_to(LONGEST_NS)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number
