"""instances.jsonl: one line an update with a digest of what it was trained on.

The trainer writes it, the audit reads it.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError


@dataclass(frozen=True)
class Line:
    """digest: of the instance ids; tokens_digest: of the token ids (None where not taken)."""

    step: int
    attempt: int
    digest: str
    tokens_digest: str | None = None

    def dump(self) -> str:
        return json.dumps(self.__dict__)


def digest(values: np.ndarray) -> str:
    """sha256 of ids as little-endian uint32, in row order: instances [B], or tokens [B, S]."""
    return hashlib.sha256(np.ascontiguousarray(values, "<u4").data).hexdigest()


def read_lines(uri: str) -> tuple[list[Line], int]:
    """The lines of a log, and how many were torn by a killed writer and are left out.

    Leaving one out is safe: its update is trained again after the restart, or is found missing.
    """
    try:
        text = storage.read_text(uri)
    except FileNotFoundError:
        raise UserError(f"{uri} does not exist: the stage has not trained yet") from None
    lines, torn = [], 0
    for line in filter(None, text.split("\n")):
        try:
            content = json.loads(line)
            lines.append(Line(**{k: content.get(k) for k in Line.__dataclass_fields__}))
        except (ValueError, AttributeError):
            torn += 1
    return lines, torn
