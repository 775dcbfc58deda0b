"""Faults that names and shapes cannot show. Every one has to be caught, and named by layer and
module.
"""

import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import tiny, to_ours, write_hf

from olmo_core_jax.parity import traces, verdicts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.reference

CFG = tiny(window=12)
TOKENS = factory.tokens(CFG, length=64)


@pytest.fixture(scope="module")
def model():
    return factory.hf_model(CFG)


@pytest.fixture(scope="module")
def right(model):
    """The trace of the right weights, by transformers."""
    return traces.trace_hf_model(model, TOKENS)


def tensors_of(model) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy().copy() for name, x in model.state_dict().items()}


def ours(tensors: dict, tmp_path) -> traces.Trace:
    """Our model's trace on these tensors, by way of a conversion that sees names and shapes."""
    step = to_ours(CFG, write_hf(CFG, tmp_path / "hf", tensors), tmp_path / "ours")
    return traces.trace_ours(step, TOKENS, "float32")


def swap(a: str, b: str):
    def fault(tensors):
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return fault


def layer(i: int, name: str) -> str:
    return f"model.layers.{i}.{name}.weight"


def transpose(tensors):
    name = layer(2, "self_attn.o_proj")
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def lose_gain(tensors):
    tensors[layer(4, "post_feedforward_layernorm")][:] = 1.0


def interleave_rotary(tensors):
    """What converters do for rotary pairs that lie side by side."""
    for i in range(CFG.n_layers):
        for kind in ("q", "k"):
            for name in (layer(i, f"self_attn.{kind}_proj"), layer(i, f"self_attn.{kind}_norm")):
                x = tensors[name].reshape(CFG.n_heads, 2, CFG.head_dim // 2, -1)
                tensors[name] = np.ascontiguousarray(x.swapaxes(1, 2)).reshape(tensors[name].shape)


def shift_layers(tensors):
    old = dict(tensors)
    for i in range(CFG.n_layers):
        for name in [n for n in old if n.startswith(f"model.layers.{i}.")]:
            tensors[name.replace(f".{i}.", f".{(i + 1) % CFG.n_layers}.", 1)] = old[name]


def permute_embedding(tensors):
    a, b = int(TOKENS[0, 0]), int(TOKENS[0, 1])
    table = tensors["model.embed_tokens.weight"]
    table[[a, b]] = table[[b, a]]


def tie_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()


WEIGHT_FAULTS = [
    (swap(layer(1, "self_attn.q_proj"), layer(1, "self_attn.k_proj")), "layers.1.attn"),
    (swap(layer(6, "mlp.gate_proj"), layer(6, "mlp.up_proj")), "layers.6.mlp"),
    (lose_gain, "layers.4.out"),
    (transpose, "layers.2.attn"),
    (interleave_rotary, "layers.0.attn"),
    (shift_layers, "layers.0.attn"),
    (permute_embedding, "embed"),
    (tie_head, "logits"),
]


@pytest.mark.parametrize("fault, part", WEIGHT_FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_fault_in_the_weights(model, right, tmp_path, fault, part):
    tensors = tensors_of(model)
    fault(tensors)
    verdict = verdicts.judge("ours", "transformers", "float32", ours(tensors, tmp_path), right)
    assert not verdict.ok
    assert verdict.departure is not None and verdict.departure.part == part, verdict.table()
    said = "layer {}, {}".format(*part.split(".")[1:]) if "." in part else part
    assert f"first departs at {said} (" in verdict.failures[0]


def test_without_a_fault(model, right, tmp_path):
    verdict = verdicts.judge(
        "ours", "transformers", "float32", ours(tensors_of(model), tmp_path), right
    )
    assert verdict.ok and verdict.departure is None


@pytest.mark.parametrize("window, position", [(11, 11), (13, 12)])
def test_window_off_by_one(model, right, tmp_path, window, position):
    """One key too few, or one too many: the first position that has that many shows it."""
    step = to_ours(CFG, write_hf(CFG, tmp_path / "hf", tensors_of(model)), tmp_path / "ours")
    wrong = CFG.model_copy(update={"pattern": [window, window, window, -1]})
    params = traces.load_params(traces.OrbaxStep(step))
    verdict = verdicts.judge(
        "ours", "hf", "float32", traces.trace_params(params, wrong, TOKENS, "float32"), right
    )
    assert verdict.departure is not None
    assert (verdict.departure.part, verdict.departure.position) == ("layers.0.attn", position)
    assert "layer 0, attn (attention" in verdict.failures[0]


def test_qk_norm_per_head(model, right):
    """Each head normed by itself instead of all together: only where there is more than one key."""
    faulty = factory.hf_model(CFG)

    class PerHead(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.eps = norm.weight, norm.variance_epsilon

        def forward(self, x):
            heads = x.unflatten(-1, (-1, CFG.head_dim))
            heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * heads.flatten(-2)

    for block in faulty.model.layers:
        block.self_attn.q_norm = PerHead(block.self_attn.q_norm)
        block.self_attn.k_norm = PerHead(block.self_attn.k_norm)
    verdict = verdicts.judge("a", "b", "float32", traces.trace_hf_model(faulty, TOKENS), right)
    assert verdict.departure is not None
    assert (verdict.departure.part, verdict.departure.position) == ("layers.0.attn", 1)


def test_nan_is_a_departure(right):
    broken = dict(right)
    broken["layers.3.mlp"] = np.full_like(right["layers.3.mlp"], np.nan)
    broken["logits"] = np.full_like(right["logits"], np.nan)
    verdict = verdicts.judge("a", "b", "float32", broken, right)
    assert verdict.departure is not None and verdict.departure.part == "layers.3.mlp"
    assert len(verdict.failures) == 5
