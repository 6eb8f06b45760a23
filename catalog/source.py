"""Where weights are, and what a source check found out: facts in, one sentence out.

Reads a source's text, and turns what the hub or the nodes answered into a Finding. Asks nobody itself; the
facts come from `catalog/hub.py` and from the nodes' agents.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from catalog.reading import quote, shown
from catalog.spec import ModelSpec
from catalog.weights import Choice, choose_weights, whole_name

_REPO_PART = r"[A-Za-z0-9_]|[A-Za-z0-9_][A-Za-z0-9._-]*[A-Za-z0-9_]"
_REPO = re.compile(rf"({_REPO_PART})/({_REPO_PART})")
_ADDRESS = re.compile(r"https?://[^/]+/([^/?#]+/[^/?#]+)(?:[/?#].*)?")
_REPO_LIMIT = 96  # the hub's own
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+@-]{0,199}")
_LISTED = 5  # names of files or nodes that one sentence lists
_FILES_KEPT = 50


class SourceError(ValueError):
    """A text that is no source. Its text is one sentence that says how to write one."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """`org/name[@revision][:file-or-glob]` on a Hugging Face hub."""

    repo: str
    revision: str = ""
    selector: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.selector}" if self.selector else "")


@dataclass(frozen=True, slots=True)
class PathSource:
    """An absolute path on the nodes."""

    path: str

    def __str__(self) -> str:
        return self.path


def parse_source(text: str) -> HubSource | PathSource:
    """Raises SourceError."""
    if text.startswith("/"):
        if ".." in text.split("/"):
            raise SourceError(f"source {quote(text)} has .. in it; give the path it leads to")
        return PathSource(text)
    before, colon, selector = text.partition(":")
    repo, at, revision = before.partition("@")
    if (address := _ADDRESS.fullmatch(text)) and _REPO.fullmatch(address[1]):
        raise SourceError(f"source {quote(text)} is the address of a page; write {address[1]}")
    if not _REPO.fullmatch(repo):
        raise SourceError(
            f"source {quote(text)} is neither a Hugging Face id (org/name[@revision][:file])"
            " nor an absolute path; write one of them"
        )
    if len(repo) > _REPO_LIMIT or "--" in repo or ".." in repo or repo.endswith(".git"):
        raise SourceError(f"source {quote(text)} is no name a hub can have; copy it from the model's page")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        step = "give a branch, tag or commit"
        raise SourceError(f"source {quote(text)} has no usable revision after @; {step}")
    if colon and (not selector or selector.startswith("/") or ".." in selector.split("/")):
        step = "give a file name such as *.gguf"
        raise SourceError(f"source {quote(text)} has no usable file after the colon; {step}")
    return HubSource(repo, revision, selector)


# --- facts ------------------------------------------------------------------------------------------


class Answer(StrEnum):
    """What became of a question to the hub."""

    FOUND = "found"
    NOT_FOUND = "not_found"
    NOT_FOUND_OR_PRIVATE = "not_found_or_private"
    NO_REVISION = "no_revision"
    GATED = "gated"
    BAD_TOKEN = "bad_token"  # noqa: S105 - the name of a finding
    FORBIDDEN = "forbidden"
    DISABLED = "disabled"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HubFacts:
    """What the hub said. `repo` is the id it answered with; `cause` is why it could not be asked.

    `may_read` is None where the hub shows a gated repository without saying whether its files may be read.
    """

    answer: Answer
    endpoint: str
    has_token: bool = False
    cause: str = ""
    repo: str = ""
    commit: str = ""
    files: tuple[HubFile, ...] = ()
    is_gated: bool = False
    may_read: bool | None = True
    pipeline_tag: str = ""
    architecture: str = ""
    context_length: int = 0
    attention_heads: int = 0


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What one node said of a path. `exists` is None where the node could not be asked."""

    node: str
    exists: bool | None
    kind: str = ""
    size_bytes: int | None = None
    files: tuple[str, ...] = ()
    reason: str = ""


Level = Literal["ok", "warn", "refuse"]
_SEVERITY: Mapping[Level, int] = {"ok": 0, "warn": 1, "refuse": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a source check: one sentence, and what is worth recording.

    `facts` may hold repo, commit, bytes, files, file_count, pipeline_tag, architecture, context_length,
    attention_heads, gated and newest_commit (a hub), bytes, files, nodes and missing_on (a path), `also`:
    further sentences, where more was found, and `unanswered`: why nobody told of the source.
    """

    level: Level
    code: str
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_refused(self) -> bool:
        return self.level == "refuse"

    @property
    def is_answered(self) -> bool:
        """Somebody told of the source. Otherwise what an earlier check found may well be so still."""
        return "unanswered" not in self.facts


# --- judging ----------------------------------------------------------------------------------------


def judge_text(model: ModelSpec) -> HubSource | PathSource | Finding:
    """The source to ask about, or the finding where there is nothing to ask."""
    if model.simulated:
        sentence = f"model {quote(model.name)}: every profile is simulated; no weights are read"
        return Finding("ok", "simulated", sentence)
    try:
        return parse_source(model.source)
    except SourceError as malformed:
        return Finding("refuse", "malformed", f"model {quote(model.name)}: {malformed}")


def about(model: ModelSpec, source: HubSource | PathSource) -> str:
    """How every sentence on a source begins."""
    return f"model {quote(model.name)}: source {quote(str(source))}"


def judge_offline(model: ModelSpec, source: HubSource) -> Finding:
    why = "llmgw is offline (LLMGW_OFFLINE)"
    says = f"was not looked up, as {why}; nodes must hold its weights already"
    return Finding("warn", "offline", f"{about(model, source)} {says}", {"unanswered": why})


def judge_unasked(model: ModelSpec, source: HubSource) -> Finding:
    """Of many models' sources, where the hub did not answer for one: nobody waits for the others."""
    why = "the hub did not answer for another model just now"
    says = f"was not asked about, as {why}; repeat this once the hub answers"
    return Finding("refuse", "unasked", f"{about(model, source)} {says}", {"unanswered": why})


def still_says(last: str, finding: Finding) -> str:
    """The last sentence on a source, where asking again brought no answer."""
    return f"{last}; it could not be asked again since: {finding.facts['unanswered']}"


def judge_hub(model: ModelSpec, source: HubSource, facts: HubFacts) -> Finding:
    on = about(model, source)
    if facts.answer is not Answer.FOUND:
        no = {"unanswered": f"{facts.endpoint}: {facts.cause}"} if facts.answer is Answer.UNREACHABLE else {}
        return Finding("refuse", facts.answer.value, _refusal(on, source, facts), no)
    choice = choose_weights(_engines(model), [each.name for each in facts.files], source.selector)
    sizes = {each.name: each.size_bytes for each in facts.files}
    sizes_known = [sizes[name] for name in choice.files]
    known: dict[str, Any] = {
        "repo": facts.repo,
        "commit": facts.commit,
        "bytes": sum(size or 0 for size in sizes_known) if None not in sizes_known else 0,
        "files": list(choice.files[:_FILES_KEPT]),
        "file_count": len(choice.files),
        "pipeline_tag": facts.pipeline_tag,
        "architecture": facts.architecture,
        "context_length": facts.context_length,
        "attention_heads": facts.attention_heads,
        "gated": facts.is_gated,
    }
    found = [_of_choice(on, choice)] if choice.code else []
    if facts.may_read is None:
        says = f"is gated, and the hub does not say whether it may be read (asked with {_token(facts)})"
        step = f"accept its licence at {facts.endpoint}/{source.repo} if the download is refused"
        found.append(Finding("warn", "gated_unknown", f"{on} {says}; {step}"))
    if facts.repo and facts.repo.lower() != source.repo.lower():
        step = "write that id, as the old one may go any day"
        found.append(Finding("warn", "renamed", f"{on} is called {quote(facts.repo)} now; {step}"))
    commit = f" at commit {facts.commit[:12]}" if facts.commit else ""
    size = f", {known['bytes'] / 1e9:.1f} GB" if known["bytes"] else ""
    ok = f"{on} found{commit}{size} in {_counted(len(choice.files), 'file')}"
    return _worst([*found, Finding("ok", "found", ok)], {key: value for key, value in known.items() if value})


def _token(facts: HubFacts) -> str:
    return "the token in HF_TOKEN" if facts.has_token else "no token, as HF_TOKEN is not set"


def _refusal(on: str, source: HubSource, facts: HubFacts) -> str:
    licence = f"{facts.endpoint}/{source.repo}"
    with_token = _token(facts)
    match facts.answer:
        case Answer.NOT_FOUND:
            return f"{on}: {facts.endpoint} has no repository {quote(source.repo)}; check the spelling"
        case Answer.NOT_FOUND_OR_PRIVATE:
            step = "set HF_TOKEN to one that may read it" if not facts.has_token else "give that token access"
            return f"{on} is not found or private (asked with {with_token}); check the spelling, or {step}"
        case Answer.NO_REVISION:
            what = f"no revision {quote(source.revision or 'main')}"
            return f"{on}: the repository has {what}; give a branch, tag or commit that it has"
        case Answer.GATED:
            step = "then ask again" if facts.has_token else "then set HF_TOKEN to a token of that account"
            return f"{on} is gated (asked with {with_token}); accept its licence at {licence}, {step}"
        case Answer.BAD_TOKEN:
            return f"{on}: {facts.endpoint} refuses the token in HF_TOKEN; set a valid one, or none"
        case Answer.FORBIDDEN:
            return f"{on} may not be read (asked with {with_token}); set HF_TOKEN to a token that may"
        case Answer.DISABLED:
            return f"{on}: {facts.endpoint} has disabled {quote(source.repo)} for everybody; choose another"
    return (
        f"{on}: could not ask the hub at {facts.endpoint}: {facts.cause};"
        " check that address and the way to it, or save the model unchecked"
    )


def judge_paths(model: ModelSpec, source: PathSource, facts: Sequence[PathFacts]) -> Finding:
    on = about(model, source)
    have = [each for each in facts if each.exists]
    lack = [each for each in facts if each.exists is False]
    unknown = [each for each in facts if each.exists is None]
    known: dict[str, Any] = {
        "nodes": [each.node for each in have],
        "missing_on": [each.node for each in lack],
    }
    if not have and lack:
        where = (
            f"the node {_listed(lack)}" if len(lack) == 1 else f"any of {len(lack)} nodes ({_listed(lack)})"
        )
        sentence = f"{on} is not on {where}; copy the weights there, or correct the path"
        return Finding("refuse", "path_missing", sentence, known)
    if not have:
        who = f"{_listed(unknown)} told nothing" if unknown else "no node that could run it is there yet"
        sentence = f"{on} could not be checked: {who}; check again later"
        return Finding("warn", "path_unasked", sentence, known | {"unanswered": who})

    first = have[0]
    name = source.path.rsplit("/", 1)[-1]
    is_file = first.kind == "file"
    # Of one file nobody has told what lies beside it: its other shards, if it has any.
    choice = choose_weights(_engines(model), [whole_name(name)] if is_file else first.files, "")
    files = [name] if is_file and choice.files else list(choice.files[:_FILES_KEPT])
    known |= {"bytes": first.size_bytes or 0, "files": files}
    found = [_of_choice(f"{on} on node {quote(first.node)}", choice)] if choice.code else []
    if lack:
        says = f"is on {_listed(have)} and not on {_listed(lack)}; copy it there if they shall run it, too"
        found.append(Finding("warn", "path_partly", f"{on} {says}"))
    found.append(Finding("ok", "found", f"{on} found on {_listed(have)}"))
    return _worst(found, {key: value for key, value in known.items() if value})


def _engines(model: ModelSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(profile.engine for profile in model.profiles if profile.engine != "sim"))


def _of_choice(on: str, choice: Choice) -> Finding:
    names = ", ".join(map(shown, choice.listed[:_LISTED]))
    names += ", ..." if len(choice.listed) > _LISTED else ""
    return Finding(choice.level, choice.code, f"{on} {choice.says.format(names=names)}")


def _listed(facts: Sequence[PathFacts]) -> str:
    names = [shown(each.node + (f" ({each.reason})" if each.reason else "")) for each in facts[:_LISTED]]
    return ", ".join(names) + (f" and {len(facts) - _LISTED} more" if len(facts) > _LISTED else "")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _worst(findings: Sequence[Finding], known: Mapping[str, Any]) -> Finding:
    """The first of the worst, with these facts and what the others warn of."""
    told = max(findings, key=lambda finding: _SEVERITY[finding.level])
    also = [finding.sentence for finding in findings if finding is not told and finding.level != "ok"]
    return Finding(told.level, told.code, told.sentence, {**known, **({"also": also} if also else {})})
