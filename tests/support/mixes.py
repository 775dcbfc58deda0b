"""Small mixes on disk, and whole run roots made from them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from olmo_core_jax import recipes, storage
from olmo_core_jax.recipes import schema

VOCAB, EOS, PAD = 1000, 999, 998


@dataclass
class Mix:
    """A mix of random documents under `base`. files: what each holds."""

    base: Path
    manifest: Path
    files: dict[str, np.ndarray] = field(default_factory=dict)

    def data(self, sequence_length: int = 32, **options) -> schema.Data:
        options = {"base": str(self.base), "mix": str(self.manifest), "seed": 7} | options
        return schema.Data(sequence_length=sequence_length, **options)


TOKENIZER = schema.Tokenizer(name="tiny", eos_id=EOS, pad_id=PAD)


def documents(rng: np.random.Generator, count: int, dtype: str = "<u2") -> np.ndarray:
    """Random tokens with an EOS about every fifty."""
    tokens = rng.integers(0, PAD, count).astype(dtype)
    tokens[rng.random(count) < 0.02] = EOS
    tokens[min(20, count - 1)] = EOS
    return tokens


@pytest.fixture
def make_mix(tmp_path) -> Callable[..., Mix]:
    """make_mix(lengths, dtype): a file a length, two labels, in folders named by {TOKENIZER}."""

    def make(lengths=(500, 333, 2000, 31, 640), dtype="<u2", name="mix", seed=0) -> Mix:
        rng = np.random.default_rng(seed)
        mix = Mix(tmp_path / name, tmp_path / f"{name}.txt")
        lines = ["# a comment", ""]
        for i, length in enumerate(lengths):
            label = "web" if i % 2 else "code"
            path = mix.base / "tiny" / label / f"part-{i:02d}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            mix.files[str(path)] = documents(rng, length, dtype)
            mix.files[str(path)].tofile(path)
            lines.append(f"{label},{{TOKENIZER}}/{label}/part-{i:02d}.npy")
        mix.manifest.write_text("\n".join(lines) + "\n")
        return mix

    return make


def make_recipe(mix: Mix, batch: int = 4, updates: int = 20, **options) -> schema.Recipe:
    """A recipe whose only interesting part is the data of stage 1."""
    length = options.pop("sequence_length", 32)
    epochs = options.pop("epochs", 1)
    model = dict(
        n_layers=4, d_model=8, n_heads=1, n_kv_heads=1, head_dim=8, mlp_hidden=8,
        vocab_size=VOCAB, padded_vocab_size=VOCAB, pattern=[16, 16, 16, -1],
    )  # fmt: skip
    stage = schema.Stage(
        data=mix.data(length, **options),
        batch_tokens=batch * length,
        max_tokens=updates * batch * length,
        epochs=epochs,
        schedule=schema.Linear(peak=1e-3),
        checkpoints=schema.Checkpoints(every=10),
    )
    return schema.Recipe(
        name="tiny", model=schema.Model(**model), tokenizer=TOKENIZER, stage1=stage
    )


def make_run_root(root: str, recipe: schema.Recipe) -> str:
    """A run root with recipe.yaml only; returns its build_index folder of stage 1."""
    storage.write_text(storage.join(root, "recipe.yaml"), recipes.dump_recipe(recipe))
    return storage.join(root, "build_index", "stage1")
