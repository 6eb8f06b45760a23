"""Files from a Hugging Face hub, by its own client: which there are, and the bytes of one, from where they
stop. HF_ENDPOINT and HF_TOKEN are those of the agent's own environment; the token goes to the hub alone.
"""

from __future__ import annotations

import errno
from typing import BinaryIO, cast
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, errors, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import disable_progress_bars

from nodes.agent.weights.parts import Part
from nodes.agent.weights.sources import FetchError, Order, is_checksum, is_plain
from nodes.agent.weights.store import READ_BYTES, Holding
from nodes.protocol import CONFIGURATION, TRANSIENT, ListedFile
from nodes.tickets import is_commit

disable_progress_bars()
constants.DOWNLOAD_CHUNK_SIZE = READ_BYTES  # progress is told, and a pace kept, by pieces of this


def listing(order: Order) -> Holding:
    """The repository at the commit that the order means now, with nothing of it here. Raises FetchError."""
    try:
        info = HfApi().model_info(order.repo, revision=order.revision or None, files_metadata=True)
        commit = info.sha or order.revision
        if not is_commit(commit):
            raise FetchError(
                "hub_unreachable",
                f"{order.at}: what answers at {constants.ENDPOINT} tells no commit; see whether it is a hub.",
                TRANSIENT,
            )
        files = {
            each.rfilename: ListedFile(each.size or 0, _hex(each.lfs and each.lfs.sha256), _hex(each.blob_id))
            for each in info.siblings or []
            if is_plain(each.rfilename)
        }
    except FetchError:
        raise
    except Exception as error:
        raise failure(order.at, error) from None
    return Holding(order.repo, commit, files)


def _hex(told: object) -> str:
    return told if isinstance(told, str) and is_checksum(told) else ""


def pull(holding: Holding, name: str, part: Part) -> None:
    """Add what the part lacks. Raises FetchError."""
    listed = holding.listing[name]
    url = hf_hub_url(holding.repo, name, revision=holding.revision)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    # The client refuses larger ones unasked, and not every hub does.
    size = listed.size if listed.size <= constants.MAX_HTTP_DOWNLOAD_SIZE else None
    try:
        place = get_hf_file_metadata(url).location
        if urlsplit(place).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # it belongs to the hub, not to where its files lie
        http_get(place, cast(BinaryIO, part), resume_size=part.size, headers=headers, expected_size=size)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise failure(f"{holding.repo}@{holding.revision[:8]}", error) from None


def failure(at: str, error: Exception) -> FetchError:
    endpoint = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):  # is a RepositoryNotFoundError, too
        sentence = (
            f"{at} is gated: accept its licence on the hub, and start the agent with the HF_TOKEN of an "
            f"account that has."
        )
        return FetchError("gated_repo", sentence, CONFIGURATION)
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchError("repo_not_found", f"{at}: the hub has no such revision; correct it.", CONFIGURATION)
    if isinstance(error, errors.RepositoryNotFoundError):
        sentence = f"{at} was not found at {endpoint}, or is private; correct the source or set HF_TOKEN."
        return FetchError("repo_not_found", sentence, CONFIGURATION)
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return FetchError("repo_not_found", f"{at}: the hub lacks a file it lists; try again.", TRANSIENT)
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    sentence = f"Could not fetch {at} from {endpoint} ({cause}); it is tried again."
    return FetchError("hub_unreachable", sentence, TRANSIENT)
