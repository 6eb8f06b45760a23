"""The sim engine: an OpenAI-compatible server without weights, for trials, tests and benchmarks.

    python -m nodes.agent.sim --help

It answers in vllm's shapes, word for word in its refusals, and under vllm's metric names. Its key is
VLLM_API_KEY; without one it is open. Like vllm it is not there until it has loaded, and a client that leaves
frees its slot. It uses no chance: the same requests in the same order are answered alike.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys

from aiohttp import web

from nodes.agent.sim.ends import End, Ends
from nodes.agent.sim.engine import Engine
from nodes.agent.sim.faults import Workers, grow_memory
from nodes.agent.sim.gang import Gang
from nodes.agent.sim.options import Options, read_options
from nodes.agent.sim.recordings import end_as

CUT_S = 0.1  # for running requests when it is told to end; 0 would be without end


async def serve(options: Options) -> End:
    """Until TERM or INT, or until it fails. Streams are cut then, as vllm cuts them: whoever stops it drains
    it first."""
    ends = Ends()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ends.come, End())
    if options.gang is None:
        return await _run(options, ends)
    gang = Gang(options.gang, options.key)
    try:
        _say(f"sim: rank {options.gang.rank} of {options.gang.size} waits for the others")
        await gang.gather(ends)
        return await _run(options, ends)
    finally:
        await gang.close()


async def _run(options: Options, ends: Ends) -> End:
    _say(f"sim: loading {options.model} takes {options.load_time_s:g} s")
    if (end := await ends.within(options.load_time_s)) is not None:
        return end
    if options.fail_load_as:
        return end_as(options.fail_load_as)
    if options.fail_load:
        return End(1, options.fail_load)
    if options.gang is not None and options.gang.rank > 0:  # without a door, as vllm's headless ranks
        _say("sim: loaded; rank 0 serves")
        return await ends.wait()
    try:
        tls = _open_tls(options)
    except OSError as error:
        return End(1, f"sim: error: --ssl-certfile and --ssl-keyfile cannot be used: {error}")
    runner = web.AppRunner(
        Engine(options, end=ends.come).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=CUT_S,
    )
    await runner.setup()
    growing = asyncio.create_task(grow_memory(options.memory_growth_mib, options.memory_growth_limit_mib))
    try:
        await web.TCPSite(runner, options.host, options.port, ssl_context=tls).start()
        _say(f"sim: listening on {'https' if tls else 'http'}://{options.host}:{options.port}")
        return await ends.wait()
    except OSError as error:
        return End(1, f"sim: cannot listen on {options.host}:{options.port}: {error.strerror}")
    finally:
        growing.cancel()
        await runner.cleanup()


def _open_tls(options: Options) -> ssl.SSLContext | None:
    if options.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*options.tls)
    return context


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    options = read_options(sys.argv[1:], key=os.environ.get("VLLM_API_KEY", ""))
    with Workers(options.workers, options.workers_outlive_s):
        end = asyncio.run(serve(options))
    if end.words:
        _say(end.words)
    sys.exit(end.code)


if __name__ == "__main__":
    main()
