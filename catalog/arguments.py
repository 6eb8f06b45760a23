"""Reads a profile's arguments as engines do: which option a word names, and what an option was given.

Dashes and underscores are the same, a value may be stuck to its option by `=`, and of an option that is given
twice the last one counts. Says nothing of what an option means.
"""

from collections.abc import Collection, Sequence

# argparse takes `--tensor-par 4` for the whole option.
ABBREVIATING = frozenset({"vllm", "sglang", "sim"})

# How many requests llama-server runs at once where its profile does not say.
LLAMA_SLOTS = 4


def option_of(argument: str) -> str:
    """The option that a word names, without its value; empty for a word that is a value itself."""
    words = argument.replace("=", " ").split(maxsplit=1)
    if not words or not words[0].startswith("-"):
        return ""
    return words[0].replace("_", "-") if words[0].startswith("--") else words[0]


def last_given(args: Sequence[str], options: Collection[str]) -> tuple[str, str] | None:
    """The option among these that counts, and its value (empty where there is none)."""
    found = None
    for argument, following in zip(args, [*args, ""][1:], strict=True):
        option = option_of(argument)
        if option in options:
            _, is_stuck, value = argument.partition("=")
            found = option, value if is_stuck else following
    return found


def is_given(args: Sequence[str], options: Collection[str]) -> bool:
    return any(option_of(argument) in options for argument in args)
