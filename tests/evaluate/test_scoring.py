"""Held-out loss and divergence: against definitions in float64, repeatable to the bit, blind to
padding rows.
"""

import jax
import numpy as np
import pytest
import scipy.special
from small import CFG

from olmo_core_jax.errors import UserError
from olmo_core_jax.evaluate import lm_loss, scoring, token_kl
from olmo_core_jax.evaluate.lm_loss import Windows, heldout_losses, loss_figures
from olmo_core_jax.evaluate.scoring import Scorer, kl_of_logits
from olmo_core_jax.model.olmo3 import init_params, logits
from olmo_core_jax.model.options import ModelOptions

OPTS = ModelOptions()
jitted_logits = jax.jit(lambda params, tokens: logits(params, tokens, CFG, OPTS))


@pytest.fixture(scope="module")
def params():
    return init_params(CFG, 0)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(CFG, OPTS)


@pytest.fixture(scope="module")
def windows():
    rng = np.random.default_rng(1)
    make = lambda n: rng.integers(0, CFG.vocab_size, (n, 24)).astype(np.int32)  # noqa: E731
    return [Windows("a", make(5)), Windows("b", make(3))]


def exact_logp(params, tokens_BS):
    """float64 log-softmax over the real vocabulary, by scipy."""
    raw = np.asarray(jitted_logits(params, tokens_BS), np.float64)[..., : CFG.vocab_size]
    return scipy.special.log_softmax(raw, axis=-1)


def test_loss_is_the_mean_of_minus_log_p_inside_windows(params, scorer, windows):
    found = heldout_losses(scorer, params, windows, batch_size=2)
    for w in windows:
        logp = exact_logp(params, w.tokens_NS)
        rows, places = np.indices(w.tokens_NS[:, 1:].shape)
        expected = -logp[rows, places, w.tokens_NS[:, 1:]].mean()
        assert found[w.domain] == pytest.approx(expected, abs=2e-6)


def test_same_weights_same_bits_whatever_came_before(params, scorer, windows):
    first = heldout_losses(scorer, params, windows, 2)
    for factor in (1.01, 1.02, 1.03):
        other = jax.tree.map(lambda x, f=factor: f * x, params)
        assert heldout_losses(scorer, other, windows, 2) != first
    assert heldout_losses(scorer, params, windows, 2) == first
    assert heldout_losses(Scorer(CFG, OPTS), params, windows[::-1], 2) == first


def test_padding_rows_of_the_head_take_no_part(params, scorer, windows):
    head = params["lm_head"]["weight"]
    loud = head.at[CFG.vocab_size :].set(50.0 * head[: CFG.padded_vocab_size - CFG.vocab_size])
    other = {**params, "lm_head": {"weight": loud}}
    tokens = windows[0].tokens_NS
    raw = np.asarray(jitted_logits(other, tokens))
    assert (raw.argmax(-1) >= CFG.vocab_size).mean() > 0.5, "the control: they would win"
    mine, theirs = (scorer.score(p, tokens, tokens) for p in (params, other))
    np.testing.assert_array_equal(mine.logp_BS, theirs.logp_BS)
    assert int(np.max(theirs.best_BS)) < CFG.vocab_size


def test_chunked_logits_give_the_same(params, scorer, windows, monkeypatch):
    tokens = windows[0].tokens_NS
    whole = scorer.score(params, tokens, tokens)
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 5 * 128 * 4 * 4)
    chunked = Scorer(CFG, OPTS)
    text = chunked._score.lower(params, tokens, tokens).as_text()
    assert "5x3x128" in text and "5x24x128" not in text, "24 positions in pieces of 3"
    got = chunked.score(params, tokens, tokens)
    np.testing.assert_allclose(got.logp_BS, whole.logp_BS, atol=2e-6)
    np.testing.assert_array_equal(got.best_BS, whole.best_BS)


@pytest.mark.parametrize("distance", [0.0, 1e-6, 1e-4, 1e-2, 0.1, 1.0, 10.0])
def test_kl_is_exact_where_fp32_would_drown_it(distance):
    rng = np.random.default_rng(0)
    p = rng.normal(0, 3, (50, 1000)).astype(np.float32)
    q = p + (distance * rng.normal(0, 1, p.shape)).astype(np.float32)
    lp, lq = (scipy.special.log_softmax(x.astype(np.float64), axis=-1) for x in (p, q))
    exact = (np.exp(lp) * (lp - lq)).sum(-1)
    found = np.asarray(kl_of_logits(p, q), np.float64)
    np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-14)
    assert (found >= 0).all()


def test_kl_does_not_see_a_constant_added_to_all_logits():
    p = np.random.default_rng(0).normal(0, 3, (4, 100)).astype(np.float32)
    assert np.asarray(kl_of_logits(p, p + np.float32(0.5))).max() < 1e-12


def test_divergence_figures_of_two_models(params, scorer, windows):
    same = token_kl.divergence_figures(scorer, params, params, windows, 2)
    assert (same["KL mean"], same["KL max"], same["top-1 agreement"]) == (0.0, 0.0, 1.0)
    other = jax.tree.map(lambda x: x * 1.01, params)
    found = token_kl.divergence_figures(scorer, params, other, windows, 2)
    lp, lq = (
        np.concatenate([exact_logp(m, w.tokens_NS) for w in windows]) for m in (params, other)
    )
    kl = (np.exp(lp) * (lp - lq)).sum(-1)
    assert found["KL mean"] == pytest.approx(kl.mean(), rel=1e-3)
    assert found["KL max"] == pytest.approx(kl.max(), rel=1e-3)
    assert found["top-1 agreement"] == (lp.argmax(-1) == lq.argmax(-1)).mean()
    assert found["positions compared"] == 8 * 24
    back = token_kl.divergence_figures(scorer, other, params, windows, 2)
    assert back["KL mean"] != found["KL mean"], "KL has a direction"


def test_figures_need_every_domain_for_a_largest_difference():
    ours = {"a": 1.0, "b": 2.0}
    assert loss_figures(ours, {"a": 1.5, "b": 2.25})["heldout max |difference|"] == 0.5
    figures = loss_figures(ours, {"a": 1.5})
    assert "heldout max |difference|" not in figures
    assert figures["heldout/a/CE loss (reference)"] == 1.5


def test_files_are_cut_into_windows_and_bad_ones_are_named(tmp_path):
    file = tmp_path / "x.npy"
    tokens = np.arange(50, dtype="<u2")
    tokens.tofile(file)
    cut = lm_loss._cut(str(file), np.dtype("<u2"), 16, 91)
    np.testing.assert_array_equal(cut, tokens[:48].reshape(3, 16))
    for content, said in (
        (tokens.tobytes()[:-1], "truncated"),
        (tokens[:10].tobytes(), "less than one window"),
        (np.full(40, 91, "<u2").tobytes(), "holds id 91"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"x.npy.*{said}"):
            lm_loss._cut(str(file), np.dtype("<u2"), 16, 91)
    with pytest.raises(UserError, match="missing"):
        lm_loss._cut(str(tmp_path / "missing"), np.dtype("<u2"), 16, 91)
