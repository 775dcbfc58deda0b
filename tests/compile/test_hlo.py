"""Counting a program's text: against XLA's own count of an unrolled model, and against plain arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_core_jax import recipes
from olmo_core_jax.compile import hlo
from olmo_core_jax.hardware.flops import attention_flops
from olmo_core_jax.model.olmo3 import ModelOptions, abstract_params
from olmo_core_jax.model.weights import n_matmul_params
from olmo_core_jax.train.loss import loss_divisor, shifted_targets
from olmo_core_jax.train.step import _micro_loss

ROWS, LENGTH = 2, 512
MODEL = recipes.load_recipe("laptop").model.model_copy(
    update={"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "mlp_hidden": 1376}
    | {"vocab_size": 4096, "padded_vocab_size": 4096, "pattern": [-1, -1, -1, -1]}
)


def lowered(scan: bool, remat: str = "none"):
    """Loss and gradients of the model, chunked head included, as a program for this machine."""
    opts = ModelOptions(remat=remat, scan_layers=scan, attention="reference")
    tokens, mask = np.zeros((ROWS, LENGTH), np.int32), np.ones(ROWS, bool)

    def loss(params):
        targets = shifted_targets(tokens, mask)
        divisor = loss_divisor(targets, mask)
        return _micro_loss(params, tokens, targets, divisor, cfg=MODEL, opts=opts, z=1e-5, chunks=1)

    return jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(abstract_params(MODEL))


def text(program) -> str:
    return program.compiler_ir("hlo").as_hlo_text()


MATRICES = 6 * n_matmul_params(MODEL) * ROWS * LENGTH
# The reference kernel computes what the causal mask hides, too: S keys a query in place of (S + 1) / 2. No policy keeps
# its scores: seven products in place of six.
ATTENTION = 3.5 * attention_flops(MODEL, LENGTH) * ROWS * LENGTH * 2 * LENGTH / (LENGTH + 1)


def test_the_model_counts_what_xla_counts_on_an_unrolled_program():
    """XLA adds the elementwise operations, a few hundred a value of the stream."""
    xla = lowered(scan=False).cost_analysis()["flops"]
    assert 1 <= xla / (MATRICES + ATTENTION) < 1.03


@pytest.mark.parametrize("scan", [False, True])
def test_a_loop_counts_as_often_as_it_runs(scan):
    counts = hlo.count(text(lowered(scan)))
    assert counts.matrix_flops == pytest.approx(MATRICES + ATTENTION, rel=1e-12)
    assert counts.unknown_loops == 0


def test_recomputation_is_seen():
    gate_and_up = 2 * 2 * MODEL.d_model * MODEL.mlp_hidden * MODEL.n_layers * ROWS * LENGTH
    counts = [hlo.count(text(lowered(True, remat))).matrix_flops for remat in ("none", "mlp")]
    assert counts[1] - counts[0] == pytest.approx(gate_and_up)


WINDOWS = {
    # As the TPU compiler writes products: operands, window, labels; and what the product costs.
    "rows": (
        "bf16[2,8,16]",
        "bf16[32,16,1]",
        "bf16[2,8,32]",
        "size=1",
        "0bf_oi0->0bf",
        2 * 8 * 16 * 32,
    ),
    "gradient": (
        "bf16[2,8,16]",
        "bf16[2,8,32]",
        "f32[16,32,1]",
        "size=2",
        "0fb_0io->bf0",
        2 * 8 * 16 * 32,
    ),
    "padded": (
        "bf16[32,16,1]",
        "bf16[2,8,16]",
        "bf16[2,8,32]",
        "size=2 pad=1_1 rhs_reversal=1",
        "bf0_0oi->0fb",
        2 * 8 * 16 * 32,
    ),
    "heads": (
        "bf16[2,8,16,1]",
        "bf16[4,8,16,1]",
        "bf16[2,8,4,8]",
        "size=1x4 pad=0_0x3_3 rhs_reversal=0x1",
        "0bf1_1oi0->0b1f",
        2 * 8 * 16 * 32,
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_products_written_as_windows_count_what_they_multiply(name):
    lhs, rhs, out, window, labels, multiplications = WINDOWS[name]
    program = f"""HloModule m
ENTRY %main (a: {lhs}, b: {rhs}) -> {out} {{
  %a = {lhs} parameter(0)
  %b = {rhs} parameter(1)
  ROOT %c = {out} convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
"""
    assert hlo.count(program).matrix_flops == 2 * multiplications


def test_a_real_convolution_counts_its_taps():
    """Against XLA's own count, padding and stride included."""
    conv = partial(
        jax.lax.conv_general_dilated, window_strides=(2,), padding=[(3, 1)], rhs_dilation=(2,)
    )
    program = jax.jit(conv).lower(jnp.ones((2, 5, 16)), jnp.ones((7, 5, 3)))
    assert hlo.count(text(program)).matrix_flops == program.cost_analysis()["flops"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("branches", [2, 3], ids=["cond", "switch"])
def test_of_branches_the_dearest_counts(branches, compiled):
    """XLA, too, takes the largest of them; how often: the loop's three times."""

    def product(n):
        return lambda x: sum((jnp.tanh(x + i) @ x for i in range(n)), x)

    def body(x, which):
        if branches == 2:
            return jax.lax.cond(which > 0, product(2), product(1), x), None
        return jax.lax.switch(which, [product(n) for n in (1, 3, 2)], x), None

    def once(x, which):
        return body(x, which)[0]

    def thrice(x, which):
        return jax.lax.scan(body, x, which)[0]

    dearest = (2 if branches == 2 else 3) * 2 * 64**3
    x, which = jnp.ones((64, 64)), jnp.int32(1)
    program = jax.jit(once).lower(x, which)
    # What it adds to the products are a few operations an element.
    assert 1 <= program.cost_analysis()["flops"] / dearest < 1.1
    for function, argument, times in ((once, which, 1), (thrice, jnp.full(3, which), 3)):
        program = jax.jit(function).lower(x, argument)
        found = hlo.count(program.compile().as_text() if compiled else text(program))
        assert found.matrix_flops == times * dearest and found.unknown_loops == 0
