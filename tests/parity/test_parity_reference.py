"""Our model against transformers and OLMo-core on the same weights: logits, and every part of
every layer.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import TOKENIZER, tiny, to_ours

from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.formats.olmo_core import open_native
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.olmo3 import ModelOptions, logits
from olmo_core_jax.parity import traces, verdicts
from olmo_core_jax.recipes import load_recipe

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("olmo_core")
pytestmark = pytest.mark.reference

# width, key/value heads, YaRN; compiling each takes seconds, so the default run has two of them
SHAPES = [
    pytest.param(64, 4, False, id="mha"),
    pytest.param(64, 2, True, id="gqa-yarn"),
    pytest.param(128, 2, False, id="gqa-128", marks=pytest.mark.slow),
    pytest.param(128, 4, True, id="yarn-128", marks=pytest.mark.slow),
    pytest.param(512, 4, False, id="mha-512", marks=pytest.mark.slow),
    pytest.param(512, 1, True, id="mqa-yarn-512", marks=pytest.mark.slow),
]


BF16 = ModelOptions(compute_dtype="bfloat16")


def slow(shape):
    return pytest.param(*shape.values, id=shape.id, marks=pytest.mark.slow)


@pytest.mark.parametrize("width, kv_heads, yarn", SHAPES)
def test_against_transformers(tmp_path, width, kv_heads, yarn):
    cfg = tiny(width=width, kv_heads=kv_heads, yarn=yarn)
    source = factory.save_hf(factory.hf_model(cfg), tmp_path / "hf")
    step = to_ours(cfg, source, tmp_path / "ours")
    t = factory.tokens(cfg, length=96)
    for dtype in ("float32", "bfloat16"):
        a, b = traces.trace_ours(step, t, dtype), traces.trace_hf(str(source), t, dtype)
        verdict = verdicts.judge("ours", "transformers", dtype, a, b)
        assert verdict.ok, verdict.table()
        assert verdict.logits.max_abs < 2e-5 or dtype == "bfloat16"
        assert len(verdict.parts) == 3 + 4 * cfg.n_layers


@pytest.mark.parametrize("width, kv_heads, yarn", SHAPES)
def test_against_olmo_core(tmp_path, width, kv_heads, yarn):
    cfg = tiny(width=width, kv_heads=kv_heads, yarn=yarn)
    factory.save_native(cfg, tmp_path / "step3")
    native = open_native(str(tmp_path / "step3"), cfg)
    meta = {"model": cfg.model_dump(mode="json")}
    step = write_step(str(tmp_path / "ours"), 0, {"params": native.params("float32")}, meta)
    t = factory.tokens(cfg, length=96)
    for dtype in ("float32", "bfloat16"):
        a = traces.trace_ours(step, t, dtype)
        b = traces.trace_side(str(tmp_path / "step3"), t, dtype)
        verdict = verdicts.judge("ours", "OLMo-core", dtype, a, b)
        assert verdict.ok, verdict.table()
        assert verdict.logits.max_abs < 2e-5 or dtype == "bfloat16"


@pytest.mark.parametrize("width, kv_heads, yarn", [SHAPES[0], *(slow(s) for s in SHAPES[1:])])
def test_best_tokens_in_bfloat16(tmp_path, width, kv_heads, yarn):
    """Over 98 % the same best token, of 1,536 positions, where weights are random but not flat."""
    cfg = tiny(width=width, kv_heads=kv_heads, yarn=yarn)
    t = factory.tokens(cfg, batch=16, length=96)
    source = factory.save_hf(factory.hf_model(cfg, leads=True), tmp_path / "hf")
    factory.save_native(cfg, tmp_path / "step3", leads=True)
    native = jax.tree.map(np.asarray, open_native(str(tmp_path / "step3"), cfg).params("float32"))
    params = traces.load_params(OrbaxStep(to_ours(cfg, source, tmp_path / "ours")))
    pairs = {"transformers": (params, source), "OLMo-core": (native, tmp_path / "step3")}
    # A window of one token less has to show in the same figures.
    models = (cfg, cfg.model_copy(update={"pattern": [11, 11, 11, -1]}))
    for name, (params, folder) in pairs.items():
        theirs = traces.trace_side(str(folder), t, "bfloat16")["logits"]
        right, wrong = (
            verdicts.compare_logits(np.asarray(logits(params, t, m, BF16)), theirs) for m in models
        )
        print(
            f"{name}, width {width}: top-1 {right.top1:.2%}, KL {right.kl_mean:.1e}; "
            f"a window off by one: {wrong.top1:.2%}, {wrong.kl_mean:.1e}"
        )
        assert right.kl_mean < 2e-3 and right.top1 > 0.98, right
        assert wrong.kl_mean > 2e-3 and wrong.top1 < 0.98, wrong


def test_trained_weights_in_bfloat16(tmp_path):
    """Real text and trained weights, whose best tokens are less of a tie than random ones'."""
    recipe = load_recipe("laptop")
    cfg, source = recipe.model, recipe.stage1.reference.hf[400]
    step = to_ours(cfg, Path(source), tmp_path / "ours")
    texts = [np.fromfile(file, "<u2")[:1024] for file in recipe.evaluation.heldout.values()]
    t = np.concatenate(texts).reshape(-1, 128).astype(np.int64)
    theirs = traces.trace_hf(source, t, "bfloat16")["logits"]
    gap = verdicts.compare_logits(traces.logits_ours(step, t, "bfloat16"), theirs)
    assert gap.positions == 5 * 1024
    assert gap.kl_mean < 1e-4 and gap.top1 > 0.98 and gap.clear == 1


def test_our_export_is_what_transformers_computes(tmp_path):
    """The export loads as it is, uses every tensor, and gives the very logits of the source."""
    cfg = tiny(kv_heads=2, yarn=True)
    source = factory.save_hf(factory.hf_model(cfg), tmp_path / "hf")
    step = OrbaxStep(to_ours(cfg, source, tmp_path / "ours"))
    hf.export_hf(step, cfg, TOKENIZER, str(tmp_path / "out"), context=512, shard_bytes=300_000)
    t = factory.tokens(cfg)
    before, after = (traces.trace_hf(str(tmp_path / f), t, "float32") for f in ("hf", "out"))
    assert all(np.array_equal(before[part], after[part]) for part in before)


def test_released_vocabulary(tmp_path):
    """Without the padding rows the real entries' logits stay the same numbers."""
    cfg = tiny()
    source = factory.save_hf(factory.hf_model(cfg), tmp_path / "hf")
    step = OrbaxStep(to_ours(cfg, source, tmp_path / "ours"))
    hf.export_hf(step, cfg, TOKENIZER, str(tmp_path / "out"), context=512, rows=cfg.vocab_size)
    t = factory.tokens(cfg)
    padded, cut = (
        traces.trace_hf(str(tmp_path / f), t, "float32")["logits"] for f in ("hf", "out")
    )
    assert cut.shape[-1] == cfg.vocab_size
    assert verdicts.compare_logits(padded, cut).max_abs < 2e-6


def test_legacy_form_of_the_rotary_settings(tmp_path):
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling at the top."""
    cfg = tiny(yarn=True)
    source = factory.save_hf(factory.hf_model(cfg), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    full = config.pop("rope_parameters")["full_attention"]
    config["rope_theta"] = full.pop("rope_theta")
    config["rope_scaling"] = full
    (source / "config.json").write_text(json.dumps(config))
    step = to_ours(cfg, source, tmp_path / "ours")
    t = factory.tokens(cfg, length=96)
    a, b = traces.trace_ours(step, t, "float32"), traces.trace_hf(str(source), t, "float32")
    verdict = verdicts.judge("ours", "transformers", "float32", a, b)
    assert verdict.ok, verdict.table()


def test_yarn_leaves_sliding_layers_alone(tmp_path):
    """All layers sliding: the same numbers with and without YaRN. With full ones: not."""
    t = factory.tokens(tiny(), length=96)
    for pattern, equal in (([12, 12], True), ([12, -1], False)):
        found = []
        for yarn in (False, True):
            cfg = tiny(yarn=yarn).model_copy(update={"pattern": pattern})
            tensors = factory.random_params(cfg)
            folder = tmp_path / f"{pattern[1]}_{yarn}"
            config = hf.hf_config.config_from_model(
                cfg, rows=256, context=512, eos_id=1, pad_id=2, bos_id=None, dtype="float32"
            )
            step = to_ours(
                cfg,
                factory.write_hf(cfg, folder, tensors, **config),
                tmp_path / f"o{pattern[1]}{yarn}",
            )
            found.append(traces.logits_ours(step, t, "float32"))
        assert np.array_equal(*found) == equal


def test_unused_or_invented_weights_are_an_error(tmp_path):
    """transformers would only warn, and compare random numbers."""
    cfg = tiny()
    tensors = factory.random_params(cfg)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    folder = factory.write_hf(cfg, tmp_path / "hf", tensors)
    with pytest.raises(UserError, match=r"unused or makes them up: .*q_proj.bias"):
        traces.trace_hf(str(folder), factory.tokens(cfg), "float32")
