"""Which files of a source are its weights, and whether an engine can read them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

GGUF_ENGINES = frozenset({"llamacpp"})
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")


@dataclass(frozen=True, slots=True)
class Choice:
    """The weight files chosen. Where `code` is not empty something is wrong: `says` completes
    `source "..." ...` and may list `{names}`, which are in `listed`."""

    files: tuple[str, ...] = ()
    level: Literal["ok", "warn", "refuse"] = "ok"
    code: str = ""
    says: str = ""
    listed: tuple[str, ...] = ()


def whole_name(name: str) -> str:
    """The name without its place among the shards of a GGUF model."""
    return _SHARD.sub("", name)


def _gguf_models(files: Sequence[str]) -> dict[str, list[str]]:
    """GGUF files by the model they belong to: shards together, projectors for images left out."""
    models: dict[str, list[str]] = {}
    for name in files:
        if name.endswith(".gguf") and not name.rsplit("/", 1)[-1].startswith("mmproj"):
            models.setdefault(whole_name(name), []).append(name)
    return models


def _lacking_shards(names: Sequence[str]) -> tuple[str, ...]:
    """Those of one GGUF model that should be beside these."""
    found = _SHARD.search(names[0])
    if found is None:
        return ()
    before, total = names[0][: found.start()], found[1]
    wanted = [f"{before}-{number:05}-of-{total}.gguf" for number in range(1, int(total) + 1)]
    held = frozenset(names)
    return tuple(name for name in wanted if name not in held)


def choose_weights(engines: Sequence[str], files: Sequence[str], selector: str) -> Choice:
    """What these engines would read of these files; the worst of what any of them says.

    The selector is a file's name or a glob, and who chooses one shard chooses all of its model.
    """
    offered = sorted(files)
    if selector:
        meant = {whole_name(name) for name in files if name == selector or fnmatchcase(name, selector)}
        offered = [name for name in offered if whole_name(name) in meant]
        if not offered:
            weights = tuple(name for name in sorted(files) if _is_weight(name))
            step = "choose one of {names}" if weights else "the repository holds no weights; choose another"
            return Choice((), "refuse", "no_file", f"has no file of that name; {step}", weights)
    choices = [_choose_for(engine, offered) for engine in engines]
    refused = [choice for choice in choices if choice.level == "refuse"]
    warned = [choice for choice in choices if choice.level == "warn"]
    worst = (refused + warned + choices)[0]
    chosen = tuple(dict.fromkeys(name for choice in choices for name in choice.files))
    return Choice(chosen, worst.level, worst.code, worst.says, worst.listed)


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", *_PICKLES))


def _choose_for(engine: str, files: Sequence[str]) -> Choice:
    weights = tuple(name for name in files if _is_weight(name))
    safetensors = tuple(name for name in files if name.endswith(".safetensors"))
    models = _gguf_models(files)
    ggufs = tuple(name for names in models.values() for name in names)
    if not weights:
        step = "give one that has some (safetensors, or GGUF for llamacpp)"
        return Choice((), "refuse", "no_weights", f"holds no weights; {step}")
    if engine in GGUF_ENGINES:
        if not models:
            step = "give a repository or file in GGUF form, or another engine"
            return Choice(
                (), "refuse", "no_gguf", f"holds no GGUF file, the only form {engine} reads; {step}"
            )
        if len(models) > 1:
            step = "choose one by its file name, as in org/name:file.gguf, from {names}"
            return Choice(
                (), "refuse", "many_ggufs", f"holds {len(models)} GGUF models; {step}", tuple(sorted(models))
            )
        lacking = _lacking_shards(ggufs)
        if lacking:
            says = f"holds a GGUF model that lacks {len(lacking)} of its shards ({{names}})"
            return Choice((), "refuse", "no_shard", f"{says}; bring them there, or choose another", lacking)
        return Choice(ggufs)
    if safetensors:
        return Choice(safetensors)
    if ggufs:
        step = "give a repository with safetensors, or the engine llamacpp"
        return Choice(
            ggufs, "warn", "gguf", f"holds GGUF files alone, which {engine} reads poorly if at all; {step}"
        )
    step = "give a repository with safetensors, or save the model unchecked if you trust its author"
    return Choice(
        weights, "refuse", "pickle", f"holds pickle files alone, which run code when they are read; {step}"
    )
