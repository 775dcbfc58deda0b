import pytest

from olmo_core_jax import recipes
from olmo_core_jax.hardware.flops import (
    attention_flops,
    mean_visible_keys,
    training_flops,
)
from olmo_core_jax.model.weights import n_matmul_params


@pytest.mark.parametrize("sequence, window", [(8, 4), (8, -1), (8, 8), (8, 100), (7, 1)])
def test_visible_keys_are_counted(sequence, window):
    seen = [sum(1 for k in range(q + 1) if window < 0 or k > q - window) for q in range(sequence)]
    assert mean_visible_keys(sequence, window) == sum(seen) / sequence


def test_the_7b_figures():
    assert mean_visible_keys(8192, -1) == 4096.5
    assert mean_visible_keys(8192, 4096) == 3072.25
    model = recipes.load_recipe("olmo3_7b").model
    full = model.model_copy(update={"pattern": [-1, -1, -1, -1]})
    ratio = attention_flops(model, 8192) / attention_flops(full, 8192)
    assert ratio == pytest.approx(0.8125, abs=5e-4)
    # 7,298,617,344 parameters, less the embedding table and the gains of the norms.
    gains = 4096 * (32 * 4 + 1)
    assert n_matmul_params(model) == 7_298_617_344 - 100352 * 4096 - gains


def test_against_a_count_by_hand():
    model = recipes.load_recipe("laptop").model  # width 48, 3 heads of 16, MLP 112, vocabulary 2048
    layer = 4 * 48 * 48 + 3 * 48 * 112
    keys = 6 * mean_visible_keys(128, 32) + 2 * 64.5
    forward = 2 * (8 * layer + 2048 * 48) + 2 * 2 * 48 * keys
    assert training_flops(model, 128) == pytest.approx(3 * forward)
