"""vllm or sglang as the agent meets it: their command lines, in front of the sim engine's server.

`stand_in(folder, "vllm")` is a program to give to an agent. It refuses what it was not told of, as they do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def stand_in(folder: Path, engine: str) -> str:
    program = folder / engine
    known = {"ENGINE": engine}
    program.write_text(
        f"#!{sys.executable}\nimport runpy\nrunpy.run_path({__file__!r}, {known!r}, '__main__')\n"
    )
    program.chmod(0o700)
    return str(program)


def _options(engine: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=engine)
    parser.add_argument("word", choices=["serve"])
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--ssl-certfile", default="")
    parser.add_argument("--ssl-keyfile", default="")
    if engine == "vllm":
        parser.add_argument("model")
        parser.add_argument("--max-model-len", default="8192")
        parser.add_argument("--shutdown-timeout", type=int, required=True)
        parser.add_argument("--middleware", required=True)
    else:
        parser.add_argument("--model-path", dest="model", required=True)
        parser.add_argument("--context-length", dest="max_model_len", default="8192")
        parser.add_argument("--enable-metrics", action="store_true", required=True)
        parser.add_argument("--api-key", required=True)
    return parser.parse_args()


def main(engine: str) -> None:
    if sys.argv[1:] == ["--version"]:
        sys.exit(f"{engine} imports all of itself before it tells its version, which takes long")
    options = _options(engine)
    if engine == "vllm":
        module, _, name = options.middleware.rpartition(".")
        getattr(importlib.import_module(module), name)  # from wherever the agent said that it is
        key = os.environ["VLLM_API_KEY"]
    else:
        key = options.api_key
        print(f"server_args=ServerArgs(model_path={options.model!r}, api_key={key!r})", flush=True)
    if not Path(options.model, "config.json").exists():
        sys.exit("ValueError: Invalid repository ID or local directory specified: no config.json")
    sim = ["-m", "nodes.agent.sim", "--model", options.served_model_name]
    sim += ["--host", options.host, "--port", options.port, "--context-length", options.max_model_len]
    sim += ["--ssl-certfile", options.ssl_certfile, "--ssl-keyfile", options.ssl_keyfile]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_API_KEY": key}
    os.execve(sys.executable, [sys.executable, *sim], env)


if __name__ == "__main__":
    main(globals()["ENGINE"])
