"""What tests of several folders share."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from olmo_core_jax.recipes.schema import Model


def slow_unless(names: Iterable[str], kept: Collection[str]) -> list:
    """Parameters of a test, of which the default run has only those kept."""
    return [pytest.param(n, marks=[] if n in kept else pytest.mark.slow) for n in names]


def json_lines(path: str | Path) -> list[dict]:
    """The whole lines of a file that may still be written to; none where there is no file yet."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def tiny_model(**changes) -> Model:
    """Four layers of width 16 that alternate a window of 8 with full attention."""
    shape = {
        "n_layers": 4,
        "d_model": 16,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 8,
        "mlp_hidden": 32,
        "vocab_size": 64,
        "padded_vocab_size": 64,
        "pattern": [8, -1],
    }
    return Model.model_validate(shape | changes)
