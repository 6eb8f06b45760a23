"""What real engines said when they could not load, to be said again: their logs as they were recorded."""

from __future__ import annotations

from pathlib import Path

from nodes.agent.sim.ends import End

_FOLDER = Path(__file__).with_name("recorded")
_USAGE_EXIT_CODE = 2  # argparse's, in vllm
_EXIT_CODES = {"vllm/badarg": _USAGE_EXIT_CODE}

# `nodes/engines/causes.py` reads what follows as that engine's.
_SPEAKS_AS = "sim: speaks as {engine} did"
SPEAKS_AS_VLLM = _SPEAKS_AS.format(engine="vllm")


def recordings() -> list[str]:
    """Their names, as in `vllm/badarg`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in _FOLDER.glob("*/*.log"))


def end_as(name: str) -> End:
    """The end that was recorded under this name, one of `recordings()`."""
    engine = name.partition("/")[0]
    log = (_FOLDER / f"{name}.log").read_text(errors="replace").rstrip("\n")
    return End(_EXIT_CODES.get(name, 1), f"{_SPEAKS_AS.format(engine=engine)}\n{log}")
