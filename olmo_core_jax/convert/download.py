"""Where weights come from: a folder, a bucket, or the hub at a revision, brought here whole or
not at all.
"""

import logging
from pathlib import Path

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import Weights
from olmo_core_jax.results import digest_of, file_digest

log = logging.getLogger("olmo")

HUB = "hub:"
HASHED_BYTES = 200 * 2**20
SMALL_BYTES = 2**20


def local_weights(weights: Weights, cache: str) -> str:
    """Folder or URI of a recipe's step-0 weights; what is on the hub is downloaded under `cache`
    first.

    A download goes on where it was broken off. Raises UserError where it cannot be had whole.
    """
    assert weights.hf is not None
    if not weights.hf.startswith(HUB):
        if not storage.is_remote(weights.hf) and not Path(weights.hf).is_dir():
            raise UserError(f"weights.hf: there is no folder {weights.hf}")
        return weights.hf
    return from_hub(weights.hf.removeprefix(HUB), weights.revision, storage.join(cache, "download"))


def identity(weights: Weights) -> str:
    """sha256 of what tells one set of weights from another, cheaply.

    Small folders enter by their content; of large ones config and index do, and every weight file
    by name and size.
    """
    assert weights.hf is not None
    if weights.hf.startswith(HUB):
        return digest_of(weights.hf, weights.revision or "")
    entries = [e for e in storage.list_dir(weights.hf) if not e.is_dir]
    if not entries:
        raise UserError(f"weights.hf: there is nothing at {weights.hf}")
    whole = sum(e.size for e in entries) <= HASHED_BYTES
    parts = []
    for e in entries:
        uri = storage.join(weights.hf, e.name)
        parts.append(
            f"{e.name}:{e.size}:{file_digest(uri) if whole or e.size < SMALL_BYTES else ''}"
        )
    return digest_of(*parts)


def from_hub(repository: str, revision: str | None, folder: str) -> str:
    """Downloads a model repository's weights, config and tokenizer into `folder` and returns it."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError("hub: needs the extra: pip install 'olmo-core-jax[hub]'") from None
    if storage.is_remote(folder):
        raise UserError(
            f"weights of the hub are downloaded to a disk first; {folder} is in a bucket"
        )
    return snapshot_download(
        repository,
        revision=revision,
        local_dir=folder,
        allow_patterns=["*.json", "*.safetensors", "*.txt"],
    )
