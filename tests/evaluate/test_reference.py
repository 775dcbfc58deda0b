"""The same weights through the harness's own hf backend and through ours, sample by sample."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lm_eval.api.instance import Instance  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from olmo_core_jax.checkpoint.formats import hf  # noqa: E402
from olmo_core_jax.evaluate import lm_loss, tasks, token_kl  # noqa: E402
from olmo_core_jax.evaluate.harness import OlmoLM  # noqa: E402
from olmo_core_jax.evaluate.scoring import Scorer  # noqa: E402
from olmo_core_jax.model.options import ModelOptions  # noqa: E402
from olmo_core_jax.recipes import load_recipe  # noqa: E402

pytestmark = pytest.mark.reference
STEP = 400


@pytest.fixture(scope="module")
def recipe():
    found = load_recipe("laptop")
    if not Path(found.stage1.reference.hf[STEP]).is_dir():
        pytest.skip("the laptop reference has not been made")
    return found


def params_of(recipe, step):
    found = hf.open_hf(recipe.stage1.reference.hf[step], recipe.model)
    import jax

    return jax.tree.map(np.asarray, hf.params_from_hf(found, "float32"))


@pytest.fixture(scope="module")
def scorer(recipe):
    return Scorer(recipe.model, ModelOptions())


@pytest.fixture(scope="module")
def ours(recipe, scorer):
    params = params_of(recipe, STEP)
    return OlmoLM(
        lambda tokens, targets: scorer.score(params, tokens, targets),
        Tokenizer.from_file(str(Path(recipe.tokenizer.path, "tokenizer.json"))),
        eos_id=recipe.tokenizer.eos_id,
        max_length=128,
        batch_size=8,
    )


@pytest.fixture(scope="module")
def theirs(recipe):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=recipe.stage1.reference.hf[STEP],
        tokenizer=recipe.tokenizer.path,
        device="cpu",
        dtype="float32",
        batch_size=8,
        max_length=128,
    )


@pytest.fixture(scope="module")
def texts(recipe):
    file = Path(next(iter(recipe.evaluation.heldout.values()))).with_name("documents.jsonl")
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def requests(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_loglikelihoods_sample_by_sample(ours, theirs, texts):
    rng = np.random.default_rng(0)
    pairs = [
        ("", texts[0][:40]),
        ("To be ", "or not"),
        ("word", " word"),
        (texts[1][:1500], " the"),
    ]
    for text in rng.choice(texts, 30):  # cut between words: the hf backend dies of a join
        words = text.split(" ")
        cut, end = int(rng.integers(1, 60)), int(rng.integers(1, 12))
        pairs.append((" ".join(words[:cut]), " " + (" ".join(words[cut : cut + end]) or ".")))
    found = [
        lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
        for lm in (ours, theirs)
    ]
    (a, greedy_a), (b, greedy_b) = (zip(*f, strict=True) for f in found)
    np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)
    assert greedy_a == greedy_b
    assert ours.truncation.truncated_samples >= 1, "one prompt is longer than the model sees"


def test_rolling_loglikelihoods(ours, theirs, texts):
    long = requests("loglikelihood_rolling", [(t[:1200],) for t in texts[:6]])
    a, b = (lm.loglikelihood_rolling(long, disable_tqdm=True) for lm in (ours, theirs))
    np.testing.assert_allclose(a, b, atol=5e-4, rtol=0)  # sums of some 500 tokens


def test_greedy_texts(ours, theirs, texts):
    settings = {"until": ["\n\n", "."], "max_gen_toks": 24, "do_sample": False}
    prompts = requests("generate_until", [(t[:150], dict(settings)) for t in texts[:5]])
    a, b = (lm.generate_until(prompts, disable_tqdm=True) for lm in (ours, theirs))
    assert a == b and any(a)


def test_scores_of_the_bundled_tasks_are_those_of_the_hf_backend(ours, recipe):
    stored = json.loads(Path(recipe.stage1.reference.lm_eval).read_text())["stage1"][str(STEP)]
    figures = tasks.task_figures(tasks.run_tasks(ours, recipe.evaluation), stored)
    compared = [k for k in figures if k.endswith("(reference)")]
    assert len(compared) == 4
    for name in compared:
        mine = figures[name.removesuffix(" (reference)")]
        exact = "acc" in name
        assert mine == (figures[name] if exact else pytest.approx(figures[name], rel=1e-6)), name


@pytest.mark.parametrize("step", [100, STEP])
def test_heldout_loss_is_the_stored_one(recipe, scorer, step):
    stored = json.loads(Path(recipe.stage1.reference.heldout).read_text())["stage1"][str(step)]
    found = lm_loss.heldout_losses(scorer, params_of(recipe, step), lm_loss.read_windows(recipe), 8)
    assert found.keys() == stored.keys()
    for domain, loss in found.items():
        assert loss == pytest.approx(stored[domain], abs=2e-7), domain


def test_divergence_is_torchs(recipe, scorer):
    windows = lm_loss.read_windows(recipe)[:1]
    trees = [params_of(recipe, step) for step in (300, STEP)]
    found = token_kl.divergence_figures(scorer, *trees, windows, 8)
    logp = []
    for step in (300, STEP):
        folder = recipe.stage1.reference.hf[step]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            logits = model(torch.from_numpy(windows[0].tokens_NS).long()).logits
        logp.append(logits.double().log_softmax(-1))
    kl = torch.nn.functional.kl_div(logp[1], logp[0], reduction="none", log_target=True).sum(-1)
    assert found["KL mean"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found["KL max"] == pytest.approx(kl.max().item(), rel=1e-4)
    same = (logp[0].argmax(-1) == logp[1].argmax(-1)).double().mean().item()
    assert found["top-1 agreement"] == pytest.approx(same, abs=1e-9)
