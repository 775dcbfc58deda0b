"""The 7B's own widths and length: one cycle of layers, 8192 tokens, in fp32 and bf16, against transformers.

Needs 12 GB of memory and ten minutes: of the model's 100,352 logits a position, 8,192 are enough.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch_olmo3 import TRANSFORMERS, in_bfloat16, our_params, tokens_for, transformers_model  # noqa: E402

from olmo_core_jax import recipes  # noqa: E402
from olmo_core_jax.model.olmo3 import ModelOptions, logits  # noqa: E402

pytestmark = [pytest.mark.reference, pytest.mark.slow]
MODEL = recipes.load_recipe("olmo3_7b").model.model_copy(
    update={"n_layers": 4, "vocab_size": 8192, "padded_vocab_size": 8192}
)


@jax.jit
def compare(a_BSV, b_BSV):
    """(mean KL in nats, top-1 agreement, largest difference over the deviation)."""
    p, q = jax.nn.log_softmax(a_BSV), jax.nn.log_softmax(b_BSV)
    kl = jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))
    top1 = jnp.mean(jnp.argmax(a_BSV, -1) == jnp.argmax(b_BSV, -1))
    return kl, top1, jnp.max(jnp.abs(a_BSV - b_BSV)) / jnp.std(a_BSV)


def test_logits_at_full_width_and_length():
    model, tokens = transformers_model(MODEL), tokens_for(MODEL, batch=1, length=8192)
    model.set_attn_implementation("sdpa")  # the eager one holds all scores, 8.6 GB a layer
    params = jax.tree.map(jnp.asarray, our_params(model.state_dict(), MODEL, TRANSFORMERS))

    def theirs():
        with torch.inference_mode():
            return model(torch.tensor(tokens).long()).logits.float().numpy()

    def ours(dtype):
        return np.asarray(logits(params, tokens, MODEL, ModelOptions(compute_dtype=dtype)))

    exact = theirs()
    in_bfloat16(model)
    half = theirs()

    pairs = {
        "fp32, ours and transformers": (exact, ours("float32")),
        "bf16, ours and transformers": (half, mine := ours("bfloat16")),
        "transformers, fp32 and bf16": (exact, half),
        "fp32 of transformers, bf16 of ours": (exact, mine),
    }
    found = {name: [float(x) for x in compare(*pair)] for name, pair in pairs.items()}
    for name, (kl, top1, gap) in found.items():
        print(
            f"{name}: KL {kl:.2e} nats, top-1 {top1:.2%}, largest difference {gap:.1e} deviations"
        )
    kl, top1, gap = found["fp32, ours and transformers"]
    assert kl < 1e-7 and top1 > 0.999 and gap < 1e-3
    noise, top1_noise, _ = found["transformers, fp32 and bf16"]
    for pair in ("bf16, ours and transformers", "fp32 of transformers, bf16 of ours"):
        assert found[pair][0] < 1.2 * noise and found[pair][1] > top1_noise - 0.02, pair
