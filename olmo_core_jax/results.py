"""result.json: the one contract between jobs, flow, report and other people's scripts."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError


class StageResult(BaseModel):
    """What a finished stage hands on.

    inputs: digests by name; outputs: paths or URIs by name; figures: numbers by name; notes: short texts by name.
    """

    model_config = ConfigDict(extra="forbid")

    stage: str
    status: Literal["ok"] = "ok"
    inputs: dict[str, str]
    outputs: dict[str, str]
    figures: dict[str, float]
    notes: dict[str, str] = {}
    versions: dict[str, str] = {}
    seconds: float = 0.0


def run_root(text: str) -> str:
    """A run root as it is given, a folder as an absolute path: Orbax takes no other.

    Raises UserError for an empty one: paths under it would start at `/`.
    """
    if not text.strip():
        raise UserError("--run-root (or RUN_ROOT) is empty: name a folder, or . for this one")
    return text if storage.is_remote(text) else str(Path(text).absolute())


def result_uri(run_root: str, folder: str) -> str:
    """Where the result of a stage folder (`stage1_train`, `eval_landmarks/100`) is."""
    return storage.join(run_root, folder, "result.json")


def read_result(run_root: str, folder: str) -> StageResult | None:
    """The stage's result, None if it has not finished. Raises UserError where the file is not a result."""
    uri = result_uri(run_root, folder)
    try:
        return StageResult.model_validate(storage.read_json(uri))
    except FileNotFoundError:
        return None
    except ValidationError as e:
        raise UserError(
            f"{uri} is not a stage's result ({e.errors()[0]['msg']}); move it away"
        ) from None


def require_result(run_root: str, folder: str) -> StageResult:
    """The result of a stage that has to be finished. Raises UserError that names it."""
    result = read_result(run_root, folder)
    if result is None:
        raise UserError(f"stage {folder} is not finished under {run_root}: run it first")
    return result


def write_result(run_root: str, folder: str, result: StageResult) -> None:
    storage.write_json(result_uri(run_root, folder), result.model_dump())


def digest_of(*parts: str) -> str:
    """sha256 of some texts, in order."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def arrays_digest(metadata: str) -> str:
    """sha256 of a checkpoint's arrays, as the checksums in its `meta/metadata` name them.

    Raises FileNotFoundError, or UserError where the file lists no checksums.
    """
    sums = storage.read_mapping(metadata).get("checksums", {})
    if not isinstance(sums, dict):
        raise UserError(f"{metadata} lists no checksums of arrays; choose another output folder")
    return digest_of(*(f"{name}={sums[name]}" for name in sorted(sums)))


def file_digest(uri: str) -> str:
    """sha256 of a file, or of all names and contents under a folder. Raises UserError where it is missing."""
    if not storage.is_remote(uri) and Path(uri).is_dir():
        return digest_of(
            *(f"{name}:{file_digest(storage.join(uri, name))}" for name, _ in storage.walk(uri))
        )
    try:
        if storage.is_remote(uri):
            return hashlib.sha256(storage.read_bytes(uri)).hexdigest()
        with open(uri, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"{uri} cannot be read: {e.strerror or e}") from None
