"""The arms of a head-dimension ablation: what they cost, what OLMo-core says they cost, and which pairs are refused."""

from functools import partial

import pytest

from olmo_core_jax import recipes
from olmo_core_jax.errors import UserError
from olmo_core_jax.experiments.heads import plan
from olmo_core_jax.model.weights import n_params

PAIRS = {"olmo3_7b_16x256": ("32x128", "16x256"), "laptop_2x24": ("4x12", "2x24")}


@pytest.mark.parametrize("name", PAIRS)
def test_shipped_pairs_cost_the_same(name):
    baseline, ablated = plan.arms_of(name)
    assert (baseline.name, ablated.name) == PAIRS[name]
    assert baseline.parameters == ablated.parameters and baseline.flops == ablated.flops
    assert ablated.recipe.model.head_dim == 2 * baseline.recipe.model.head_dim


def test_the_7b_keeps_its_parameters():
    arms = plan.arms_of("olmo3_7b_16x256")
    assert [arm.parameters for arm in arms] == [7_298_617_344] * 2


def test_the_laptop_pair_is_of_the_laptops_size():
    assert plan.arms_of("laptop_2x24")[0].parameters == (
        n_params(recipes.load_recipe("laptop").model)
    )


@pytest.mark.reference
@pytest.mark.parametrize("name", PAIRS)
def test_olmo_core_counts_the_same(name):
    """Its own parameters and FLOPs of both arms; nothing is allocated."""
    pytest.importorskip("olmo_core")
    theirs = [olmo_cores(arm.recipe) for arm in plan.arms_of(name)]
    assert theirs[0] == theirs[1]
    assert theirs[0][0] == n_params(recipes.load_recipe(name).model)


def olmo_cores(recipe):
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.transformer import TransformerConfig

    m = recipe.model
    config = TransformerConfig.olmo3_7B(
        vocab_size=m.padded_vocab_size,
        n_layers=m.n_layers,
        n_heads=m.n_heads,
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
            pattern=m.pattern,
        ),
        attn_backend=AttentionBackendName.torch,
    )
    config.d_model = m.d_model
    config.block.feed_forward.hidden_size = m.mlp_hidden
    model = config.build(init_device="meta")
    attention = model.blocks["0"].attention
    assert (attention.n_heads, attention.head_dim) == (m.n_heads, m.head_dim)
    flops = model.num_flops_per_token(recipe.stage1.data.sequence_length)
    return sum(p.numel() for p in model.parameters()), flops


def test_arms_are_cut_to_what_is_compared():
    baseline, ablated = plan.arms_of("olmo3_7b_16x256", updates=1000)
    published = recipes.load_recipe("olmo3_7b")
    for recipe in (baseline.recipe, ablated.recipe):
        assert recipe.stage1.last_step == 1000
        assert recipe.stage1.total_steps == published.stage1.total_steps, "the schedule stays"
        assert recipe.stage1.data == published.stage1.data
        assert recipe.stage1.reference is None and recipe.stage2 is None
        assert recipe.weights.hf is None, "published weights name their heads"


@pytest.fixture
def child(tmp_path):
    """child(text) is a recipe of that text beside nothing else."""

    def write(text):
        (tmp_path / "mine.yaml").write_text(f"name: mine\n{text}\n")
        return str(tmp_path / "mine.yaml")

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: laptop_4x12\nmodel: {head_dim: 24}", "in parameters .400,944 and .*have to stay 48 and 48"),
        # As many parameters, but wider queries: 72 + 24 = 48 + 48.
        ("extends: laptop_4x12\nmodel: {n_heads: 6, n_kv_heads: 2}", "in FLOPs a token .*have to stay 48"),
        ("extends: laptop_4x12", "have the same heads .4x12."),
        (
            "extends: laptop_4x12\nmodel: {n_heads: 2, n_kv_heads: 2, head_dim: 24}\n"
            "stage1: {batch_tokens: 512, data: {seed: 1}}\nweights: {init_seed: 1}",
            "more than their heads: stage1.batch_tokens, stage1.data.seed, weights.init_seed",
        ),
    ],
)  # fmt: skip
def test_unequal_pairs_are_refused(child, text, said):
    with pytest.raises(UserError, match=said):
        plan.arms_of(child(text))


def test_a_recipe_without_a_baseline_is_refused():
    with pytest.raises(UserError, match="laptop extends no other one"):
        plan.arms_of("laptop")


def test_more_updates_than_there_are_are_refused():
    with pytest.raises(UserError, match="--updates 401: stage 1 of laptop_4x12 has 400"):
        plan.arms_of("laptop_2x24", updates=401)


def test_heads_do_not_change_the_first_weights():
    """What the flow relies on: one seed gives both arms the same numbers."""
    jax = pytest.importorskip("jax")
    from olmo_core_jax.model.olmo3 import init_params

    models = [arm.recipe.model for arm in plan.arms_of("laptop_2x24")]
    a, b = (jax.jit(partial(init_params, model, 0))() for model in models)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.shape == y.shape and (x == y).all(), a, b))
