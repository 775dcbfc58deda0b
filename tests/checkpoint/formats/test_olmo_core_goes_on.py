"""OLMo-core's own trainer takes up a state of ours, written natively, and makes the reference's next updates."""

import csv

import numpy as np
import pytest

from olmo_core_jax.checkpoint.formats import olmo_core, olmo_core_write
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.data.mix import load_mix
from olmo_core_jax.data.resume import data_state
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.recipes import load_recipe

pytest.importorskip("torch")
pytest.importorskip("olmo_core")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

LAPTOP = load_recipe("laptop")
STAGE = LAPTOP.stage1
FIRST, UPDATES = 380, 4


def our_state(tmp_path) -> OrbaxStep:
    """The reference's state as a training checkpoint of ours, data position included."""
    native = olmo_core.open_native(STAGE.reference.native[FIRST], LAPTOP.model)
    index, order = build_stage_data(str(tmp_path / "index"), LAPTOP, "stage1")
    state = {
        "params": native.params("float32"),
        "mu": native.moments("mu", "float32"),
        "nu": native.moments("nu", "float32"),
        "count": np.asarray(native.adam_step, np.int32),
    }
    meta = {
        "model": LAPTOP.model.model_dump(mode="json"),
        "tokens_seen": FIRST * STAGE.batch_tokens,
        "data": data_state(index, order, FIRST + 1),
    }
    return OrbaxStep(write_step(str(tmp_path / "ours"), FIRST, state, meta))


def trainer(tmp_path, load_path: str, losses: dict):
    """The reference's trainer, set to stop a few updates later."""
    from dataclasses import dataclass

    from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.optim import CosWithWarmup, OptimGroupOverride, SkipStepAdamWConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import Callback
    from olmo_core.train.common import LoadStrategy
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    @dataclass
    class Losses(Callback):
        def log_metrics(self, step, metrics):
            if "train/CE loss" in metrics:
                losses[step] = float(metrics["train/CE loss"])

    t, o, s = LAPTOP.tokenizer, STAGE.optimizer, STAGE.schedule
    tokenizer = TokenizerConfig(
        vocab_size=LAPTOP.model.vocab_size, eos_token_id=t.eos_id, pad_token_id=t.pad_id
    )
    paths = [source.uri(STAGE.data.base) for source in load_mix(STAGE.data.mix, t.name)]
    dataset = NumpyFSLDatasetConfig(
        tokenizer=tokenizer,
        paths=paths,
        sequence_length=STAGE.data.sequence_length,
        work_dir=str(tmp_path / "work"),
    ).build()
    loader = NumpyDataLoaderConfig(
        global_batch_size=STAGE.batch_tokens, seed=STAGE.data.seed, num_workers=0
    ).build(dataset, dp_process_group=None)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=STAGE.batch_tokens,
        max_sequence_length=STAGE.data.sequence_length,
        optim=SkipStepAdamWConfig(
            lr=s.peak,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            group_overrides=[
                OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})
            ],
        ),
        scheduler=CosWithWarmup(warmup=s.warmup, alpha_f=s.alpha_f),
        z_loss_multiplier=STAGE.loss.z_loss,
        max_grad_norm=o.clip_norm,
        compile_model=False,
    ).build(olmo_core_write.build_model(LAPTOP.model)[0])
    return TrainerConfig(
        save_folder=str(tmp_path / "save"),
        load_path=load_path,
        load_strategy=LoadStrategy.always,
        load_trainer_state=True,
        load_optim_state=True,
        save_overwrite=True,
        device="cpu",
        metrics_collect_interval=1,
        async_bookkeeping=False,
        max_duration=Duration.tokens(STAGE.max_tokens),
        hard_stop=Duration.steps(FIRST + UPDATES),
        callbacks={"losses": Losses()},
    ).build(module, loader)


def test_olmo_core_goes_on_from_our_state(tmp_path):
    written = olmo_core_write.write_native(
        our_state(tmp_path), LAPTOP, "stage1", str(tmp_path / f"step{FIRST}")
    )
    losses: dict[int, float] = {}
    trainer(tmp_path, written, losses).fit()
    with open(STAGE.reference.curve, newline="") as file:
        curve = {int(row["step"]): float(row["train/CE loss"]) for row in csv.DictReader(file)}
    expected = {n: curve[n] for n in range(FIRST + 1, FIRST + UPDATES + 1)}
    assert {n: losses[n] for n in expected} == pytest.approx(expected, abs=1e-6)
