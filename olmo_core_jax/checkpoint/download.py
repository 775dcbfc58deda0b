"""Where weights come from: a folder, a bucket, a web server, or the hub at a revision.

Folders, gs:// and https:// are read in place by byte range. A repository of the hub is downloaded
first: whole or not at all, every file compared with the size and hash that the hub lists.
"""

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from olmo_core_jax import storage
from olmo_core_jax.errors import CRASH, JobError, UserError
from olmo_core_jax.recipes.schema import Weights
from olmo_core_jax.results import digest_of, file_digest
from olmo_core_jax.storage import ranges

log = logging.getLogger("olmo")

HUB = "hub:"
WANTED = (".json", ".safetensors", ".txt")
HASHED_BYTES = 200 * 2**20
SMALL_BYTES = 2**20


class DownloadFailed(JobError):
    """The hub did not deliver; what has come is kept, and a later attempt goes on from there."""

    exit_code = CRASH


def local_weights(weights: Weights, cache: str) -> str:
    """Folder or URI of a recipe's step-0 weights; what is on the hub is downloaded under `cache`.

    A download goes on where it was broken off. Raises UserError where the weights cannot be had.
    """
    assert weights.hf is not None
    if weights.hf.startswith(HUB):
        folder = storage.join(cache, "download")
        return from_hub(weights.hf.removeprefix(HUB), weights.revision, folder)
    if not ranges.is_web(weights.hf) and not storage.list_dir(weights.hf):
        raise UserError(f"weights.hf: there is nothing at {weights.hf}")
    return weights.hf


def identity(weights: Weights) -> str:
    """sha256 of what tells one set of weights from another, cheaply.

    Small folders enter by their content; of large ones config and index do, and every weight file
    by name and size. The hub and web servers enter by address and revision.
    """
    assert weights.hf is not None
    if weights.hf.startswith(HUB) or ranges.is_web(weights.hf):
        return digest_of(weights.hf, weights.revision or "")
    entries = [e for e in storage.list_dir(weights.hf) if not e.is_dir]
    if not entries:
        raise UserError(f"weights.hf: there is nothing at {weights.hf}")
    whole = sum(e.size for e in entries) <= HASHED_BYTES
    parts = []
    for e in entries:
        uri = storage.join(weights.hf, e.name)
        known = file_digest(uri) if whole or e.size < SMALL_BYTES else ""
        parts.append(f"{e.name}:{e.size}:{known}")
    return digest_of(*parts)


@dataclass(frozen=True)
class Remote:
    """A file as the hub lists it: sha256 of large files, git's blob hash of small ones."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


def from_hub(
    repository: str, revision: str | None, folder: str, *, endpoint: str | None = None
) -> str:
    """Downloads weights, config and tokenizer of a model repository into `folder`, a local one.

    Raises UserError for an unknown repository, revision or a file whose hash is wrong,
    DownloadFailed where the connection broke off.
    """
    if storage.is_remote(folder):
        raise UserError(f"the hub's files are downloaded to a disk first; {folder} is in a bucket")
    files, commit = _listed(repository, revision, endpoint)
    total = sum(f.size for f in files)
    log.info("%s at %s: %d files, %.2f GB", repository, commit[:12], len(files), total / 1e9)
    for remote in files:
        _fetch(repository, commit, remote, Path(folder), endpoint)
    return folder


def _listed(
    repository: str, revision: str | None, endpoint: str | None
) -> tuple[list[Remote], str]:
    """The wanted files of a revision, and its commit."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise UserError("hub: needs the extra: pip install -e '.[hub]'") from None
    try:
        info = HfApi(endpoint=endpoint).model_info(
            repository, revision=revision, files_metadata=True
        )
    except (HfHubHTTPError, HFValidationError) as e:
        at = f" at revision {revision}" if revision else ""
        raise UserError(f"weights.hf: the hub has no {repository}{at}: {_line(e)}") from None
    except OSError as e:
        raise DownloadFailed(f"the hub cannot be reached: {_line(e)}") from None
    files = [
        Remote(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None, s.blob_id)
        for s in info.siblings or []
        if s.rfilename.endswith(WANTED) and "/" not in s.rfilename
    ]
    if not any(f.name.endswith(".safetensors") for f in files):
        raise UserError(f"weights.hf: {repository} has no safetensors at {revision or info.sha}")
    return files, info.sha or ""


def _fetch(repository: str, commit: str, remote: Remote, folder: Path, endpoint) -> None:
    """One file, whole and with the listed hash. What came of a broken transfer stays and counts."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    path, partial = folder / remote.name, folder / f".{remote.name}.partial"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(partial, "ab") as f:
            there = f.tell()
            try:
                url = hf_hub_url(repository, remote.name, revision=commit, endpoint=endpoint)
                size, headers = remote.size, build_hf_headers()
                http_get(url, f, resume_size=there, headers=headers, expected_size=size)
            except Exception as e:
                raise DownloadFailed(
                    f"{repository}/{remote.name}: {f.tell()} of {remote.size} bytes came "
                    f"({_line(e)}); run again to go on from there"
                ) from None
        _require_right(partial, repository, remote)
        os.replace(partial, path)
    else:
        _require_right(path, repository, remote)


def _require_right(path: Path, repository: str, remote: Remote) -> None:
    size = path.stat().st_size
    if size == remote.size and _hash_fits(path, remote):
        return
    path.unlink()  # a download of this job wrote it
    raise UserError(
        f"{repository}/{remote.name}: {size} bytes came, but not the {remote.size} that the hub "
        "lists (size or hash); the file is removed, run again"
    )


def _hash_fits(path: Path, remote: Remote) -> bool:
    with open(path, "rb") as f:
        if remote.sha256:
            return hashlib.file_digest(f, "sha256").hexdigest() == remote.sha256
        if remote.blob:
            data = f.read()
            return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == remote.blob
    return True


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
