"""A checked folder to the Hub, through huggingface_hub and its own login. Tested against a loopback stand-in of the Hub's API, not the Hub."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Publish

ATTEMPTS, PAUSE = 4, 2.0
"""Tries of the upload, and seconds before the second; doubled from then on."""
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_REPLACED = ("model*.safetensors", "model.safetensors.index.json", "draft-*.gguf")
"""Weights of an earlier publication that the new one lacks: left in place, a loader could pick them."""


def push_folder(
    folder: Path, names: Sequence[str], settings: Publish, *, endpoint: str | None = None, pause: float | None = None
) -> dict[str, Any]:
    """Send files to ``settings.repo_id``: repository, one commit or pull request on a known parent, tag, collection.

    A second call sends only what changed: the Hub knows the large files by their hash.

    Args:
        names: the files of ``folder`` to send, and no others.
        endpoint: the Hub's address; None takes huggingface_hub's (HF_ENDPOINT).

    Returns:
        repo, commit, parent, pull_request (its URL or None), tag, collection.

    Raises:
        DraftstillError: the repository is public though private was asked, someone else committed meanwhile, or the Hub refused.
    """
    import huggingface_hub

    pause = PAUSE if pause is None else pause
    repo, api = str(settings.repo_id), huggingface_hub.HfApi(endpoint=endpoint)
    with _Refusals(repo):
        _often(lambda: api.create_repo(repo, private=settings.private, exist_ok=True), pause)
        info = _often(lambda: api.model_info(repo), pause)
        # exist_ok leaves an existing repository as visible as it was.
        if settings.private and not info.private:
            raise DraftstillError("this repository exists and is public, and publish.private asks for a private one", key="publish.repo_id", value=repo,
                                  mend="give another repository, or set publish.private: false")  # fmt: skip
        commit = _often(lambda: _commit(api, folder, names, settings, info.sha), pause)
        if settings.tag:
            _often(lambda: api.create_tag(repo, tag=str(settings.tag), revision=commit.oid), pause)
        slug = _collect(api, repo, settings, pause) if settings.collection else None
    say(f"sent {len(names)} files to {repo} ({'private' if settings.private else 'PUBLIC'}), commit {commit.oid[:12]}"
        + (f", pull request {commit.pr_url}" if commit.pr_url else "") + (f", tag {settings.tag}" if settings.tag else "")
        + (f", collection {slug}" if slug else ""))  # fmt: skip
    return {"repo": repo, "commit": commit.oid, "parent": info.sha, "pull_request": commit.pr_url, "tag": settings.tag, "collection": slug}


def _commit(api: Any, folder: Path, names: Sequence[str], settings: Publish, parent: str) -> Any:
    """One commit for everything. ``upload_folder`` would, with hf_xet, commit in batches: a reader could load half of a draft."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repo = str(settings.repo_id)
    stale = [f for f in api.list_repo_files(repo) if f not in names and any(fnmatch(f, p) for p in _REPLACED)]
    work = [CommitOperationAdd(n, str(folder / n)) for n in names] + [CommitOperationDelete(f) for f in stale]
    return api.create_commit(
        repo, work, commit_message="Draft model made with Draftstill", create_pr=settings.pull_request, parent_commit=parent
    )


def _collect(api: Any, repo: str, settings: Publish, pause: float) -> str:
    slug = str(settings.collection)
    if "/" not in slug:
        made = _often(lambda: api.create_collection(slug, namespace=repo.split("/")[0], private=settings.private, exists_ok=True), pause)
        slug = made.slug
    _often(lambda: api.add_collection_item(slug, item_id=repo, item_type="model", exists_ok=True), pause)
    return slug


def _often(call: Callable[[], Any], pause: float) -> Any:
    """Try again where a repeated request can help: no connection, or the Hub is busy. What was sent already is not sent again."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not _passing(error):
                raise
            wait = pause * 2**attempt
            say(f"  the Hub did not answer as it should ({_first_line(error)}); trying again in {wait:g} s")
            time.sleep(wait)
    raise AssertionError


def _status(error: BaseException | None) -> int | None:
    while error is not None:
        if (status := getattr(getattr(error, "response", None), "status_code", None)) is not None:
            return int(status)
        error = error.__cause__
    return None


def _passing(error: Exception) -> bool:
    status = _status(error)
    return status in _TRANSIENT if status is not None else "Connect" in type(error).__name__ or "Timeout" in type(error).__name__ or isinstance(
        error, ConnectionError | TimeoutError) or type(error).__name__ in ("ReadError", "WriteError", "RemoteProtocolError")  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Refusals:
    """Turns the hub library's errors, whose base differs by major version, into ours."""

    def __init__(self, repo: str) -> None:
        self.repo = repo

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or isinstance(error, DraftstillError) or not isinstance(error, Exception):
            return
        status = _status(error)
        mend = {
            401: "log in with `hf auth login` (a token that may write)",
            403: "log in with `hf auth login` (a token that may write to this owner's repositories)",
            409: "the tag or name is taken: give another publish.tag",
            412: "someone else committed in the meantime, and nothing was overwritten: look at the repository, then give the command again",
        }.get(
            status or 0,
            "log in with `hf auth login` (a token that may write), check the name and the connection; what was sent is not sent again",
        )
        raise DraftstillError(f"the Hub refused: {_first_line(error)}", key="publish.repo_id", value=self.repo, mend=mend) from error
