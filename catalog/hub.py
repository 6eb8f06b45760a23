"""Asks a Hugging Face hub about a repository, with the hub's own client, and answers in facts.

Never downloads weights and never raises for what a hub may do: missing, gated, slow, broken and captive pages
are all facts. One question takes no longer than its time-out, whatever the far side drips. A redirect to
another host is not followed, so neither the question nor the token goes where the operator did not send it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, ModelInfo, get_session
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from catalog.reading import shown
from catalog.source import Answer, HubFacts, HubFile, HubSource

_ANSWER_LIMIT_BYTES = 32 * 1024 * 1024  # the listing of a very large repository is a few megabytes
_CAUSE_LIMIT = 200


class _Unusable(Exception):
    """The hub answered in a way that cannot be used; the text is a phrase."""


# --- bounds on the client -------------------------------------------------------------------------

# Only questions of this module have a deadline; downloads that share the client are left as they are.
_deadline_s: ContextVar[float | None] = ContextVar("deadline of the question to the hub", default=None)


class _BoundedStream(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream, deadline_s: float) -> None:
        self._stream, self._deadline_s = stream, deadline_s

    def __iter__(self) -> Iterator[bytes]:
        taken_bytes = 0
        for chunk in self._stream:
            taken_bytes += len(chunk)
            if taken_bytes > _ANSWER_LIMIT_BYTES:
                raise _Unusable(f"its answer is longer than {_ANSWER_LIMIT_BYTES // 1024**2} MiB")
            if time.monotonic() > self._deadline_s:
                raise httpx2.ReadTimeout("the answer did not end in time")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _bound_request(request: httpx2.Request) -> None:
    deadline_s = _deadline_s.get()
    if deadline_s is not None:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), left_s)


def _bound_response(response: httpx2.Response) -> None:
    deadline_s = _deadline_s.get()
    if deadline_s is None:
        return
    if response.has_redirect_location:
        target = response.request.url.join(response.headers["location"])
        if _origin(target) != _origin(response.request.url):
            raise _Unusable(f"it sends the question on to another host, {shown(target.host)}")
    assert isinstance(response.stream, httpx2.SyncByteStream)
    response.stream = _BoundedStream(response.stream, deadline_s)


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


# --- asking ---------------------------------------------------------------------------------------


def ask(source: HubSource, *, endpoint: str, token: str, timeout_s: float) -> HubFacts:
    """What the hub at `endpoint` says of the source. Without a token it asks as nobody."""
    facts = HubFacts(Answer.UNREACHABLE, _without_login(endpoint), has_token=bool(token))
    answers: list[HubFacts] = []
    deadline_s = time.monotonic() + timeout_s
    api = HfApi(
        endpoint=endpoint.rstrip("/"), token=token or False
    )  # False: not even as the user logged in here

    def put_question() -> None:
        _deadline_s.set(deadline_s)
        _bound_client()
        answers.append(_ask(api, source, facts))

    # Resolving a name, and headers that trickle in, heed no time-out: hence a thread, which can be left.
    thread = threading.Thread(target=put_question, name="question to the hub", daemon=True)
    thread.start()
    thread.join(timeout_s + 0.1)
    return answers[0] if answers else replace(facts, cause=f"no answer within {timeout_s:g} s")


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
    except (ValueError, TypeError, KeyError, AttributeError, httpx2.InvalidURL):
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
        HubFile(sibling.rfilename, sibling.size if isinstance(sibling.size, int) else None)
        for sibling in info.siblings or ()
        if isinstance(sibling.rfilename, str) and sibling.rfilename.isprintable()
    )
    commit = info.sha if isinstance(info.sha, str) and _is_commit(info.sha) else ""
    config = info.config if isinstance(info.config, dict) else {}
    gguf = info.gguf if isinstance(info.gguf, dict) else {}
    architectures = config.get("architectures")
    architecture = gguf.get("architecture") or (
        architectures[0] if isinstance(architectures, list) and architectures else ""
    )
    return replace(
        facts,
        answer=Answer.FOUND,
        repo=_text(info.id),
        commit=commit,
        files=files,
        is_gated=bool(info.gated),
        pipeline_tag=_text(info.pipeline_tag),
        architecture=_text(architecture),
        context_length=_count(gguf.get("context_length")),
    )


def _text(value: Any) -> str:
    return shown(value) if isinstance(value, str) else ""


def _is_commit(text: str) -> bool:
    return len(text) in (40, 64) and all(digit in "0123456789abcdef" for digit in text)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def _without_login(endpoint: str) -> str:
    """The endpoint as it may be shown: a mirror's address sometimes carries a password."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
