"""Asks a Hugging Face hub about a repository, with the hub's own client, and answers in facts.

Never downloads weights and never raises for what a hub may do: missing, gated, slow, broken and captive pages
are all facts. One question takes no longer than its time-out, whatever the far side drips. A redirect to
another host is not followed, so neither the question nor the token goes where the operator did not send it.
A good answer may be given again for a short while, and no other.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, ModelInfo, constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from catalog.reading import shown
from catalog.source import Answer, HubFacts, HubFile, HubSource

# The client asks huggingface.co, whatever the endpoint, what programs it may be run by, and waits for it.
constants.HF_HUB_DISABLE_TELEMETRY = True

ANSWER_LIMIT_BYTES = 32 * 1024 * 1024  # the listing of a very large repository is a few megabytes
CONFIG = "config.json"
CONFIG_LIMIT_BYTES = 1024 * 1024
_CAUSE_LIMIT = 200
KEPT_ANSWERS = 128

# What is no answer of a hub, however it parses: a login page, a list, JSON without an end of brackets.
_SENSELESS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, httpx2.InvalidURL)


class _Unusable(Exception):
    """The hub answered in a way that cannot be used; the text is a phrase."""


# --- bounds on the client -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bounds:
    """By the monotonic clock, and of one answer."""

    deadline_s: float
    limit_bytes: int


# Only questions of this module are bounded; downloads that share the client are left as they are.
_bounds: ContextVar[_Bounds | None] = ContextVar("bounds of the question to the hub", default=None)


class _BoundedStream(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream, bounds: _Bounds) -> None:
        self._stream, self._bounds = stream, bounds

    def __iter__(self) -> Iterator[bytes]:
        taken_bytes = 0
        for chunk in self._stream:
            taken_bytes += len(chunk)
            if taken_bytes > self._bounds.limit_bytes:
                raise _Unusable(f"its answer is longer than {self._bounds.limit_bytes // 1024**2} MiB")
            if time.monotonic() > self._bounds.deadline_s:
                raise httpx2.ReadTimeout("the answer did not end in time")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _bound_request(request: httpx2.Request) -> None:
    bounds = _bounds.get()
    if bounds is not None:
        left_s = max(bounds.deadline_s - time.monotonic(), 0.001)
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), left_s)


def _bound_response(response: httpx2.Response) -> None:
    bounds = _bounds.get()
    if bounds is None:
        return
    if response.has_redirect_location:
        target = response.request.url.join(response.headers["location"])
        if _origin(target) != _origin(response.request.url):
            raise _Unusable(f"it sends the question on to another host, {shown(target.host)}")
    assert isinstance(response.stream, httpx2.SyncByteStream)
    response.stream = _BoundedStream(response.stream, bounds)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _bound_client() -> None:
    """Put both bounds on the client that huggingface_hub shares in this process, once."""
    client = get_session()
    hooks = client.event_hooks
    if _bound_request not in hooks["request"]:
        hooks["request"].append(_bound_request)
        hooks["response"].append(_bound_response)
        client.event_hooks = hooks


# --- answers that are kept ------------------------------------------------------------------------


@dataclass(slots=True)
class _Answers:
    """Good answers, each with the time by the monotonic clock when it was given; the oldest leaves first."""

    _kept: OrderedDict[tuple[str, ...], tuple[float, HubFacts]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def recall(self, question: tuple[str, ...], young_s: float) -> HubFacts | None:
        """The answer, if it is younger than this."""
        with self._lock:
            given_s, facts = self._kept.get(question, (0.0, None))
        return facts if facts and time.monotonic() - given_s < young_s else None

    def keep(self, question: tuple[str, ...], facts: HubFacts) -> None:
        with self._lock:
            self._kept.pop(question, None)
            if facts.answer is Answer.FOUND:
                self._kept[question] = (time.monotonic(), facts)
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)


_answers = _Answers()


# --- asking ---------------------------------------------------------------------------------------


def ask(
    source: HubSource,
    *,
    endpoint: str,
    token: str,
    timeout_s: float,
    young_s: float = 0,
    limit_bytes: int = ANSWER_LIMIT_BYTES,
) -> HubFacts:
    """What the hub at `endpoint` says of the source. Without a token it asks as nobody.

    An answer that was given to the same question less than `young_s` ago is given again.
    """
    question = (endpoint, source.repo, source.revision, hashlib.sha256(token.encode()).hexdigest())
    recalled = _answers.recall(question, young_s)
    if recalled is not None:
        return recalled
    facts = HubFacts(Answer.UNREACHABLE, _without_login(endpoint), has_token=bool(token))
    told: list[HubFacts] = []
    deadline_s = time.monotonic() + timeout_s
    # False: not even as the user who is logged in on this machine.
    api = HfApi(endpoint=endpoint.rstrip("/"), token=token or False)

    def put_questions() -> None:
        _bounds.set(_Bounds(deadline_s, limit_bytes))
        _bound_client()
        found = _ask(api, source, facts)
        told.append(found)
        if found.answer is Answer.FOUND and any(each.name == CONFIG for each in found.files):
            _bounds.set(_Bounds(deadline_s, min(limit_bytes, CONFIG_LIMIT_BYTES)))
            told.append(_with_config(api.endpoint, token, source, found))

    # Resolving a name, and headers that trickle in, heed no time-out: hence a thread, which can be left.
    thread = threading.Thread(target=put_questions, name="question to the hub", daemon=True)
    thread.start()
    thread.join(timeout_s + 0.1)
    answer = told[-1] if told else replace(facts, cause=f"no answer within {timeout_s:g} s")
    _answers.keep(question, answer)
    return answer


def _ask(api: HfApi, source: HubSource, facts: HubFacts) -> HubFacts:
    found = _put(lambda: _found(api, source, facts), facts)
    if found.answer is not Answer.FOUND or not found.is_gated:
        return found
    # A gated repository shows its listing to everybody; who may read its files is another question.
    allowed = _put(lambda: _allowed(api, source, found), facts)
    if allowed.answer in (Answer.NOT_FOUND, Answer.UNREACHABLE):  # many mirrors do not know this route
        return replace(found, may_read=None)
    return allowed


def _found(api: HfApi, source: HubSource, facts: HubFacts) -> HubFacts:
    info = api.model_info(source.repo, revision=source.revision or None, files_metadata=True)
    return _from_info(info, facts)


def _allowed(api: HfApi, source: HubSource, found: HubFacts) -> HubFacts:
    api.auth_check(source.repo)
    return found


def _put(question: Callable[[], HubFacts], facts: HubFacts) -> HubFacts:
    """The question's answer, or what its failure says."""
    try:
        return question()
    except GatedRepoError:  # is a RepositoryNotFoundError, too
        return replace(facts, answer=Answer.GATED)
    except RevisionNotFoundError:
        return replace(facts, answer=Answer.NO_REVISION)
    except RepositoryNotFoundError as missing:
        return replace(facts, answer=_of_missing(missing.response.status_code))
    except HFValidationError:
        return replace(facts, answer=Answer.NOT_FOUND)
    except DisabledRepoError:
        return replace(facts, answer=Answer.DISABLED)
    except HfHubHTTPError as error:
        return _of_status(error, facts)
    except OfflineModeIsEnabled:
        return replace(facts, cause="offline mode is on (HF_HUB_OFFLINE)")
    except httpx2.TimeoutException:
        return replace(facts, cause="no answer in time")
    except httpx2.HTTPError as error:
        return replace(facts, cause=shown(f"{type(error).__name__}: {error}", _CAUSE_LIMIT))
    except _Unusable as unusable:
        return replace(facts, cause=str(unusable))
    except _SENSELESS:
        return replace(facts, cause="its answer is not what a hub says (a login page of the network?)")


def _of_missing(status: int) -> Answer:
    return Answer.NOT_FOUND_OR_PRIVATE if status == 401 else Answer.NOT_FOUND


def _of_status(error: HfHubHTTPError, facts: HubFacts) -> HubFacts:
    """Mirrors leave out the headers by which the client tells errors apart; the status says a good deal."""
    status = error.response.status_code
    if status == 401 and "invalid credentials" in error.response.headers.get("x-error-message", "").lower():
        return replace(facts, answer=Answer.BAD_TOKEN)
    if status in (401, 404):
        return replace(facts, answer=_of_missing(status))
    if status == 403:
        return replace(facts, answer=Answer.FORBIDDEN)
    return replace(facts, cause=f"it answers with status {status}")


def _from_info(info: ModelInfo, facts: HubFacts) -> HubFacts:
    files = tuple(
        HubFile(sibling.rfilename, _size(sibling.size))
        for sibling in info.siblings or ()
        if isinstance(sibling.rfilename, str) and sibling.rfilename.isprintable()
    )
    commit = info.sha if isinstance(info.sha, str) and _is_commit(info.sha) else ""
    config = info.config if isinstance(info.config, dict) else {}
    gguf = info.gguf if isinstance(info.gguf, dict) else {}
    return replace(
        facts,
        answer=Answer.FOUND,
        repo=_text(info.id),
        commit=commit,
        files=files,
        is_gated=bool(info.gated),
        pipeline_tag=_text(info.pipeline_tag),
        architecture=_text(gguf.get("architecture")) or _architecture(config),
        context_length=_count(gguf.get("context_length")),
    )


# --- the model's own config -----------------------------------------------------------------------

# Families of models have names of their own for the same thing.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")  # of a model that reads images or sound, too


def _with_config(endpoint: str, token: str, source: HubSource, found: HubFacts) -> HubFacts:
    """With what config.json adds. One that is missing, broken or elsewhere adds nothing and is no refusal."""
    try:
        revision = found.commit or source.revision or None
        url = hf_hub_url(source.repo, CONFIG, revision=revision, endpoint=endpoint)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = get_session().get(url, headers=headers)
        config = answer.json() if answer.status_code == 200 else None
    except (httpx2.HTTPError, OfflineModeIsEnabled, _Unusable, *_SENSELESS):
        return found
    if not isinstance(config, dict):
        return found
    text: Mapping[str, Any] = next(
        (config[part] for part in _TEXT_PARTS if isinstance(config.get(part), dict)), {}
    )
    return replace(
        found,
        architecture=found.architecture or _architecture(config),
        context_length=found.context_length or _context_length(text) or _context_length(config),
        attention_heads=_first_count(text, _HEADS_KEYS) or _first_count(config, _HEADS_KEYS),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return _text(names[0]) if isinstance(names, list) and names else ""


def _context_length(config: Mapping[str, Any]) -> int:
    """In tokens. YaRN is given as a factor on what the model was trained with at first."""
    stated = _first_count(config, _CONTEXT_KEYS)
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return stated
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or not 1 <= factor <= 1000:
        return stated
    return max(stated, _count(int(_count(rope.get("original_max_position_embeddings")) * factor)))


def _first_count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return next((_count(config[key]) for key in keys if _count(config.get(key))), 0)


# --- reading what strangers wrote -----------------------------------------------------------------


def _text(value: Any) -> str:
    return shown(value) if isinstance(value, str) else ""


def _is_commit(text: str) -> bool:
    return len(text) in (40, 64) and all(digit in "0123456789abcdef" for digit in text)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**53 else None


def _without_login(endpoint: str) -> str:
    """The endpoint as it may be shown: a mirror's address sometimes carries a password."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
