"""llama-server for processors on which the packaged one does not run: the same server inside xllamacpp,
behind the part of its command line that llmgw uses. `python tests/xllama_server.py --model FILE ...`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.metadata import version
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As llama-server says it, for those who read its log."""
        _, _, argument = message.partition("unrecognized arguments: ")
        sys.exit(f"error: invalid argument: {argument.split()[0]}" if argument else f"error: {message}")


def main() -> None:
    parser = _Parser(allow_abbrev=False)
    parser.add_argument("--model", "-m", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--alias", "-a", default="")
    parser.add_argument("--ctx-size", "-c", type=int, default=0)
    parser.add_argument("--parallel", "-np", type=int, default=4)
    parser.add_argument("--threads", "-t", type=int, default=2)
    parser.add_argument("--no-kv-unified", action="store_true")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--embeddings", "--embedding", action="store_true")
    parser.add_argument("--version", action="version", version=f"version: {version('xllamacpp')}")
    options = parser.parse_args()

    import xllamacpp  # only now: it is slow to load

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames, params.port = [options.host], options.port
    params.model_alias = {options.alias or options.model}
    params.n_ctx, params.n_parallel = options.ctx_size, options.parallel
    params.kv_unified = not options.no_kv_unified
    params.cpuparams.n_threads = options.threads
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = True
    params.embedding = options.embeddings
    params.api_keys = [key for key in [os.environ.get("LLAMA_API_KEY", "")] if key]
    server = xllamacpp.Server(params)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    while server:
        signal.pause()


if __name__ == "__main__":
    main()
