"""The two stages, run by OLMo-core's own trainer, train module, data loader and optimizer."""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from olmo_core.config import DType
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
from olmo_core.nn.transformer import (
    TransformerBlockType,
    TransformerConfig,
)
from olmo_core.optim import (
    CosWithWarmup,
    LinearWithWarmup,
    OptimGroupOverride,
    SkipStepAdamWConfig,
)
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
from olmo_core.train.common import LoadStrategy
from olmo_core.train.train_module import TransformerTrainModuleConfig

from . import settings
from .corpus import mix_paths

COLUMNS = [
    "step",
    "train/CE loss",
    "train/Z loss",
    "optim/total grad norm",
    "optim/total grad norm (fp64)",
    "optim/LR (group 0)",
    "optim/step skipped",
]


@dataclass
class Recorder(Callback):
    """Keeps every update's metrics unrounded, its batch's digest and its exact gradient norm."""

    rows: dict = field(default_factory=dict)
    digests: dict = field(default_factory=dict)

    def pre_step(self, batch):
        tokens = batch["input_ids"].numpy().astype("<u4")
        self.digests[self.step] = hashlib.sha256(tokens.tobytes()).hexdigest()

    def pre_optim_step(self):
        grads = [p.grad for p in self.trainer.train_module.model.parameters()]
        total = sum(grad.double().square().sum() for grad in grads if grad is not None)
        self._row(self.step)["optim/total grad norm (fp64)"] = float(total**0.5)

    def log_metrics(self, step, metrics):
        # Called once more where a checkpoint was saved, with its duration; at step 0 only so.
        if step > 0:
            self._row(step).update({k: v for k, v in metrics.items() if k in COLUMNS})
            if step % 50 == 0 and "train/CE loss" in metrics:
                print(f"   update {step}: CE {metrics['train/CE loss']:.4f}", flush=True)

    def _row(self, step: int) -> dict:
        return self.rows.setdefault(step, {"step": step})

    def write(self, curve: Path, batches: Path | None) -> None:
        """CSV files with repr() floats: reading them back gives the same numbers."""
        with curve.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([self._cell(row, c) for c in COLUMNS] for row in self.rows.values())
        if batches is not None:
            lines = [f"{step},{digest}" for step, digest in self.digests.items()]
            batches.write_text("\n".join(["step,sha256", *lines]) + "\n")

    @staticmethod
    def _cell(row: dict, column: str) -> str:
        value = row[column]
        whole = column in ("step", "optim/step skipped")
        return str(int(value)) if whole else repr(float(value))


def tokenizer_config() -> TokenizerConfig:
    return TokenizerConfig(
        vocab_size=settings.VOCAB_SIZE,
        eos_token_id=settings.EOS_ID,
        pad_token_id=settings.PAD_ID,
        identifier=settings.TOKENIZER,
    )


def model_config() -> TransformerConfig:
    """Olmo 3's blocks at laptop size; every builder argument is the one olmo3_7B passes."""
    m = settings.MODEL
    config = TransformerConfig.llama_like(
        d_model=m["d_model"],
        vocab_size=m["vocab_size"],
        n_layers=m["n_layers"],
        n_heads=m["n_heads"],
        head_dim=m["head_dim"],
        rope_theta=m["rope_theta"],
        layer_norm_eps=m["layer_norm_eps"],
        qk_norm=True,
        block_name=TransformerBlockType.reordered_norm,
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
            pattern=m["window_pattern"],
        ),
        attn_backend=AttentionBackendName.torch,
        dtype=DType.float32,
        init_seed=m["init_seed"],
    )
    config.block.feed_forward.hidden_size = m["hidden_size"]
    return config


def dataset_config(out: Path, stage: dict, work: Path) -> NumpyFSLDatasetConfig:
    return NumpyFSLDatasetConfig(
        tokenizer=tokenizer_config(),
        paths=[str(path) for path in mix_paths(out, stage)],
        sequence_length=settings.SEQUENCE_LENGTH,
        work_dir=str(work),
    )


def loader_config(stage: dict) -> NumpyDataLoaderConfig:
    return NumpyDataLoaderConfig(
        global_batch_size=settings.BATCH_TOKENS, seed=stage["data_seed"], num_workers=0
    )


def train_module_config(stage: dict, foreach: bool) -> TransformerTrainModuleConfig:
    o = settings.OPTIMIZER
    scheduler = {"CosWithWarmup": CosWithWarmup, "LinearWithWarmup": LinearWithWarmup}
    return TransformerTrainModuleConfig(
        rank_microbatch_size=settings.BATCH_TOKENS,
        max_sequence_length=settings.SEQUENCE_LENGTH,
        optim=SkipStepAdamWConfig(
            lr=stage["peak_lr"],
            betas=tuple(o["betas"]),
            eps=o["eps"],
            weight_decay=o["weight_decay"],
            foreach=foreach,
            rolling_interval_length=o["rolling_interval_length"],
            sigma_factor=o["sigma_factor"],
            group_overrides=[
                OptimGroupOverride(
                    params=["embeddings.weight"],
                    opts={"weight_decay": o["embedding_weight_decay"]},
                )
            ],
        ),
        scheduler=scheduler[stage["scheduler"]](warmup=stage["warmup"], alpha_f=stage["alpha_f"]),
        z_loss_multiplier=o["z_loss_multiplier"],
        max_grad_norm=o["max_grad_norm"],
        compile_model=False,
    )


def run_stage(
    out: Path, work: Path, stage: dict, foreach: bool, load_path: Path | None
) -> tuple[Path, Recorder]:
    """Train one stage; return the folder of its native checkpoints and what was recorded."""
    torch.set_num_threads(settings.TORCH_THREADS)
    folder = work / f"{stage['name']}{'' if foreach else '_foreach_off'}"
    shutil.rmtree(folder, ignore_errors=True)
    dataset = dataset_config(out, stage, work / "dataset" / folder.name)
    loader = loader_config(stage)
    module = train_module_config(stage, foreach)
    model = model_config()
    stop = settings.end_step(stage)
    trainer_config = TrainerConfig(
        save_folder=str(folder),
        load_path=None if load_path is None else str(load_path),
        load_strategy=LoadStrategy.never if load_path is None else LoadStrategy.always,
        load_optim_state=load_path is not None,
        load_trainer_state=False,
        save_overwrite=True,
        device="cpu",
        metrics_collect_interval=1,
        async_bookkeeping=False,
        cancel_check_interval=stop,
        max_duration=Duration.tokens(stage["max_tokens"]),
        hard_stop=None if stage["hard_stop"] is None else Duration.steps(stop),
        callbacks={
            "checkpointer": CheckpointerCallback(
                save_interval=20, max_checkpoints=None, save_async=False
            ),
            "config_saver": ConfigSaverCallback(),
            "recorder": Recorder(),
        },
    )
    built = model.build(init_device="cpu")
    train_module = module.build(built)
    data_loader = loader.build(dataset.build(), dp_process_group=None)
    trainer = trainer_config.build(train_module, data_loader)
    trainer.callbacks["config_saver"].config = {
        "model": model.as_config_dict(),
        "dataset": _portable(dataset.as_config_dict(), out),
        "data_loader": loader.as_config_dict(),
        "train_module": module.as_config_dict(),
        "init_seed": settings.MODEL["init_seed"],
    }
    trainer.fit()
    return folder, trainer.callbacks["recorder"]


def _portable(config: dict, out: Path) -> dict:
    """A dataset config without this machine's folders."""
    config["paths"] = [os.path.relpath(path, out) for path in config["paths"]]
    config.pop("work_dir", None)
    return config


def copy_native(checkpoint: Path, target: Path, out: Path) -> None:
    """Copy a native checkpoint as it is; only its list of data paths is made relative."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target)
    listing = target / "data_paths.txt"
    paths = [os.path.relpath(path, out) for path in listing.read_text().splitlines()]
    listing.write_text("\n".join(paths))
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
