"""Updates of the laptop recipe against the log of the OLMo-core run that it was made from.

The batches are read here with plain numpy, not with the project's loader, and their digests are
compared first: a difference in the losses can only come from model, loss, schedule or optimizer.
"""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pytest

from olmo_core_jax.data.batch import Batch
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.train.step import init_state, make_train_step

safetensors = pytest.importorskip("safetensors.numpy")


def token_rows(mix: str, base: str, tokenizer: str, length: int) -> np.ndarray:
    """All instances [N, S] of a mix of local uint16 files; what is left of each file is dropped."""
    lines = [line for line in Path(mix).read_text().splitlines() if line and line[0] != "#"]
    paths = [Path(base) / line.split(",")[1].replace("{TOKENIZER}", tokenizer) for line in lines]
    files = (np.fromfile(path, "<u2") for path in paths)
    return np.concatenate([f[: len(f) // length * length].reshape(-1, length) for f in files])


def hf_params(folder: str, cfg) -> dict:
    """Our tree from a transformers checkpoint, tensor by tensor."""
    tensors = safetensors.load_file(f"{folder}/model.safetensors")
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attn_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "mlp_norm": "post_feedforward_layernorm",
    }
    period = len(cfg.pattern)

    def stack(j: int, name: str) -> np.ndarray:
        layers = range(j, cfg.n_layers, period)
        return np.stack([tensors[f"model.layers.{i}.{names[name]}.weight"] for i in layers])

    def layer(j: int) -> dict:
        return {
            "attn": {n: stack(j, n) for n in ("q", "k", "v", "out", "q_norm", "k_norm")},
            "attn_norm": stack(j, "attn_norm"),
            "mlp": {n: stack(j, n) for n in ("gate", "up", "down")},
            "mlp_norm": stack(j, "mlp_norm"),
        }

    return {
        "embed": {"weight": tensors["model.embed_tokens.weight"]},
        "cycles": {f"layer_{j}": layer(j) for j in range(period)},
        "final_norm": {"weight": tensors["model.norm.weight"]},
        "lm_head": {"weight": tensors["lm_head.weight"]},
    }


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path) as f:
        return list(csv.DictReader(f))


def replay(updates: int, topology: Topology = Topology()):  # noqa: B008
    """(our metrics, the reference's row) for each of the first updates; the digest of every batch is checked."""
    recipe = load_recipe("laptop")
    stage, data = recipe.stage1, recipe.stage1.data
    rows = token_rows(data.mix, data.base, recipe.tokenizer.name, data.sequence_length)
    order = np.arange(len(rows), dtype=np.uint32)
    np.random.Generator(np.random.PCG64(data.seed + 1)).shuffle(order)
    step_fn = make_train_step(recipe.model, stage, recipe.precision, topology)
    state = init_state(hf_params(recipe.weights.hf, recipe.model), stage, recipe.precision)
    B, mask = stage.batch_instances, np.ones(stage.batch_instances, bool)
    logs = zip(read_csv(stage.reference.curve), read_csv(stage.reference.batches), strict=True)
    for n, (curve, batch) in zip(range(1, updates + 1), logs, strict=False):
        assert int(curve["step"]) == int(batch["step"]) == n
        tokens = rows[order[(n - 1) * B : n * B]]
        assert hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest() == batch["sha256"]
        rate = learning_rate(stage, n)
        assert rate == float(curve["optim/LR (group 0)"])
        state, ours = step_fn(state, Batch(tokens.astype(np.int32), mask), np.float32(rate))
        yield ours, curve


@pytest.mark.slow
def test_sixty_updates_follow_the_reference_run():
    for ours, theirs in replay(60):
        at = f"update {theirs['step']}"
        ce, z = float(theirs["train/CE loss"]), float(theirs["train/Z loss"])
        norm = float(theirs["optim/total grad norm (fp64)"])
        assert abs(float(ours.ce_loss) - ce) <= 1e-5, at
        assert float(ours.z_loss) == pytest.approx(z, rel=1e-5), at
        assert float(ours.grad_norm) == pytest.approx(norm, rel=1e-4), at
        assert float(ours.skipped) == float(theirs["optim/step skipped"]), at
