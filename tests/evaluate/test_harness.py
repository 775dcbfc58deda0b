"""What other backends got wrong: joins, spaces, shifts, prefixes, truncation, order, padding,
shapes.
"""

import math

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from small import BPE_EOS, CFG, Counting, bpe_tokenizer, counting_lm, word_tokenizer

from olmo_core_jax.errors import UserError
from olmo_core_jax.evaluate.harness import OlmoLM
from olmo_core_jax.evaluate.scoring import Scorer
from olmo_core_jax.model.olmo3 import init_params
from olmo_core_jax.model.options import ModelOptions

NEXT, OTHER = math.log(0.9), math.log(0.1 / 9)


def requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def model():
    return init_params(CFG, 0), Scorer(CFG, ModelOptions())


def real_lm(model, batch_size=4, max_length=256):
    params, scorer = model
    score = lambda tokens, targets: scorer.score(params, tokens, targets)  # noqa: E731
    return OlmoLM(
        score, bpe_tokenizer(), eos_id=BPE_EOS, max_length=max_length, batch_size=batch_size
    )


def test_a_token_that_joins_context_and_continuation_is_scored_apart(model, caplog):
    lm = real_lm(model)
    assert (
        lm.tok_encode("Answer") == lm.tok_encode("Ans" + "wer")
        and len(lm.tok_encode("Answer")) == 1
    )
    seen = []
    lm._score_pairs = lambda pairs: seen.extend(pairs) or [(-1.0, False)] * len(pairs)
    lm.loglikelihood(requests("loglikelihood", ("Ans", "wer"), ("Ans ", "wer")), disable_tqdm=True)
    assert seen[0] == (lm.tok_encode("Ans"), lm.tok_encode("wer"))
    assert all(answer for _, answer in seen)
    assert lm.joined_tokens == 1 and "'Ans' and 'wer'" in caplog.text
    del lm._score_pairs
    ((logp, _),) = lm.loglikelihood(requests("loglikelihood", ("Ans", "wer")), disable_tqdm=True)
    assert math.isfinite(logp) and logp < 0


def test_trailing_spaces_belong_to_the_continuation(model):
    lm = real_lm(model)
    a, b, c = lm.loglikelihood(
        requests("loglikelihood", ("a ", "b"), ("a", " b"), ("  ", "b")), disable_tqdm=True
    )
    assert a == b
    (empty,) = lm.loglikelihood(requests("loglikelihood", ("", "  b")), disable_tqdm=True)
    assert c == empty, "a context of spaces only is an empty one"


def test_logits_are_those_before_the_token():
    lm, _ = counting_lm()
    right, wrong = lm.loglikelihood(
        requests("loglikelihood", ("3 4", " 5 6"), ("3 4", " 6 5")), disable_tqdm=True
    )
    assert right == (pytest.approx(-0.21072, abs=1e-5), True)
    assert wrong == (pytest.approx(-8.99962, abs=1e-5), False)


def test_empty_context_is_exactly_one_eos():
    lm, score = counting_lm()
    lm.loglikelihood(requests("loglikelihood", ("", "3 4")), disable_tqdm=True)
    assert score.inputs[0][0, :2].tolist() == [9, 3]
    lm, score = counting_lm()
    lm.loglikelihood(requests("loglikelihood", ("1", " 2")), disable_tqdm=True)
    assert score.inputs[0][0, 0] == 1, "nothing is put before a prompt"


def test_left_truncation_keeps_the_right_end_and_is_counted():
    lm, score = counting_lm(max_length=8)
    text = "0 1 2 3 4 5 6 7 8 9"
    ((logp, _),) = lm.loglikelihood(requests("loglikelihood", (text, " 5 6")), disable_tqdm=True)
    assert score.inputs[0][0].tolist() == [3, 4, 5, 6, 7, 8, 9, 5]
    assert logp == pytest.approx(OTHER + NEXT, abs=1e-5)
    assert (lm.truncation.truncated_samples, lm.truncation.tokens_cut) == (1, 3)
    lm.loglikelihood(requests("loglikelihood", ("1 2", " 3")), disable_tqdm=True)
    assert lm.truncation.truncated_samples == 1
    with pytest.raises(UserError, match="10 tokens does not fit"):
        lm.loglikelihood(requests("loglikelihood", ("1", " " + text)), disable_tqdm=True)


def test_rolling_windows_see_one_eos_and_then_the_token_before(model):
    lm, score = counting_lm(max_length=4, batch_size=1)
    (total,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("0 1 2 3 4 5 6 7 8 9",)))
    inputs = sorted(row.tolist() for batch in score.inputs for row in batch)
    assert inputs == [[3, 4, 5, 6], [5, 6, 7, 8], [9, 0, 1, 2]]
    assert total == pytest.approx(10 * NEXT, abs=1e-5), "the last window scores two tokens only"
    assert lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("",), ("9",))) == [
        0.0,
        pytest.approx(OTHER),
    ]


def test_scores_depend_neither_on_batch_size_nor_on_order(model):
    rng = np.random.default_rng(0)
    letters = [chr(c) for c in range(40, 110)]
    texts = [
        ("".join(rng.choice(letters, n)), "".join(rng.choice(letters, m)))
        for n, m in zip(rng.integers(1, 45, 17), rng.integers(1, 12, 17), strict=True)
    ]
    found = {
        size: real_lm(model, size).loglikelihood(
            requests("loglikelihood", *texts), disable_tqdm=True
        )
        for size in (1, 3, 8)
    }
    back = real_lm(model, 3).loglikelihood(
        requests("loglikelihood", *texts[::-1]), disable_tqdm=True
    )
    for other in (found[3], found[8], back[::-1]):
        np.testing.assert_allclose([a for a, _ in other], [a for a, _ in found[1]], atol=1e-4)
        assert [g for _, g in other] == [g for _, g in found[1]]


def test_padding_rows_are_never_scored():
    lm, score = counting_lm(batch_size=4)
    answers = lm.loglikelihood(
        requests("loglikelihood", *[(str(i), f" {i + 1}") for i in range(6)]), disable_tqdm=True
    )
    assert answers == [(pytest.approx(NEXT), True)] * 6
    assert [batch.shape[0] for batch in score.inputs] == [4, 4]


def test_few_shapes_for_many_lengths_and_the_scores_of_unpadded_rows(model):
    params, _ = model
    scorer = Scorer(CFG, ModelOptions())
    lm = real_lm((params, scorer), batch_size=8)
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, 85, n).tolist() for n in range(5, 205)]
    pairs = [(t[:-3], t[-3:]) for t in tokens]
    answers = lm._score_pairs(pairs)
    assert 1 < scorer.compilations <= 8
    for n in (5, 129, 204):
        row = np.asarray([tokens[n - 5]], np.int32)
        logp = np.asarray(scorer.score(params, row[:, :-1], row[:, 1:]).logp_BS)[0, -3:]
        assert answers[n - 5][0] == pytest.approx(logp.sum(), abs=1e-4)


def test_buckets():
    lm, _ = counting_lm(max_length=400)
    lengths = (1, 128, 129, 256, 257, 400)
    assert [lm.bucket(n) for n in lengths] == [128, 128, 256, 256, 400, 400]


def generate(lm, *arguments):
    return lm.generate_until(requests("generate_until", *arguments))


def test_greedy_text_ends_before_a_stop_string_at_eos_or_at_the_limit():
    lm, _ = counting_lm()
    texts = generate(
        lm,
        ("1 2", {"until": ["6"], "max_gen_toks": 20}),
        ("5", {"until": ["nothing"], "max_gen_toks": 20}),
        ("0", {"until": [], "max_gen_toks": 3}),
        ("", {"until": "3", "max_gen_toks": 20}),
        ("2", {"until": "4 5", "max_gen_toks": 20}),
    )
    assert texts == ["3 4 5 ", "6 7 8", "1 2 3", "0 1 2 ", "3 "]


def test_generation_cuts_the_prompt_to_leave_room():
    lm, score = counting_lm(max_length=8)
    assert generate(lm, ("0 1 2 3 4 5 6", {"until": [], "max_gen_toks": 3})) == ["7 8"]
    assert score.inputs[0][0, :5].tolist() == [2, 3, 4, 5, 6]
    assert lm.truncation.tokens_cut == 2
    with pytest.raises(UserError, match="8 new tokens"):
        generate(lm, ("1", {"until": [], "max_gen_toks": 8}))
    with pytest.raises(UserError, match="greedy"):
        generate(lm, ("1", {"until": [], "do_sample": True, "temperature": 0.7}))


def test_eos_in_a_text_is_its_token():
    lm = OlmoLM(Counting(), bpe_tokenizer(), eos_id=BPE_EOS, max_length=64, batch_size=1)
    assert lm.tok_encode("a<eos>b")[1] == lm.eot_token_id
    assert word_tokenizer("x").encode("x").ids == [0]
