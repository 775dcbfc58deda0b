"""Every choice behind the laptop reference, in one place.

These figures go into MANIFEST.json word for word, so a recipe can be written from the manifest alone.
"""

from __future__ import annotations

TOKENIZER = "laptop-bpe-2k"
VOCAB_SIZE = 2048
EOS_ID = VOCAB_SIZE - 2
PAD_ID = VOCAB_SIZE - 1
EOS, PAD = "<|endoftext|>", "<|pad|>"

SEQUENCE_LENGTH = 128
BATCH_INSTANCES = 8
BATCH_TOKENS = SEQUENCE_LENGTH * BATCH_INSTANCES

MODEL = {
    "n_layers": 8,
    "d_model": 48,
    "n_heads": 3,
    "head_dim": 16,
    "hidden_size": 112,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 500_000,
    "layer_norm_eps": 1e-6,
    "window": 32,
    "window_pattern": [32, 32, 32, -1],
    "init_std": 0.02,
    "init_seed": 0,
}

OPTIMIZER = {
    "name": "SkipStepAdamW",
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "embedding_weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "z_loss_multiplier": 1e-5,
    "rolling_interval_length": 128,
    "sigma_factor": 6,
    # A fresh run saves step 0, and saving initialises Adam through one zero update: see README.md.
    "adam_count_start": 1,
}

STAGE1 = {
    "name": "stage1",
    "mix": "mixes/stage1.txt",
    "peak_lr": 3e-4,
    "scheduler": "CosWithWarmup",
    "warmup": 40,
    "alpha_f": 0.1,
    # T = ceil(max_tokens / batch) is beyond the hard stop, as in the published run.
    "max_tokens": 500_000,
    "hard_stop": 400,
    # Chosen so that one update (385) holds two instances of the domain `noise` and is skipped by
    # a wide margin, and no other update between 64 and the end holds any.
    "data_seed": 83258,
    "landmarks": [100, 200, 300],
    "hf_steps": [0, 100, 200, 300, 400],
    "native_steps": [380, 400],
}

STAGE2 = {
    "name": "stage2",
    "mix": "mixes/stage2.txt",
    "peak_lr": 2.0712352850360292e-4,
    "scheduler": "LinearWithWarmup",
    "warmup": 0,
    "alpha_f": 0.0,
    "max_tokens": 122_500,
    "hard_stop": None,
    "data_seed": 1337,
    "landmarks": [],
    "hf_steps": [120],
    "native_steps": [],
    "load": "stage1/native/step400",
    "load_optimizer_state": True,
    "load_trainer_state": False,
}

# One thread: the order of every sum is then fixed, whatever the machine.
TORCH_THREADS = 1

# Tokens a domain gives to each part (at least; the last document is whole).
CORPUS_SEED = 20260101
DOMAINS = {
    "bible": {"heldout": 9_000, "stage2": 42_000, "stage1": 635_000, "files": 3},
    "shakespeare": {"heldout": 9_000, "stage2": 38_000, "stage1": 560_000, "files": 3},
    "jargon": {"heldout": 8_000, "stage2": 32_000, "stage1": 300_000, "files": 2},
    "code": {"heldout": 8_000, "stage2": 0, "stage1": 300_000, "files": 2},
    "docs": {"heldout": 8_000, "stage2": 24_000, "stage1": 260_000, "files": 2},
    "noise": {"heldout": 0, "stage2": 0, "stage1": 3_000, "files": 1},
}
MIN_STAGE1_TOKENS = 2_050_000


def stages() -> list[dict]:
    """The two stages in the order in which they run."""
    return [STAGE1, STAGE2]


def end_step(stage: dict) -> int:
    """The last update of a stage: its hard stop, or ceil(max_tokens / batch)."""
    return stage["hard_stop"] or total_steps(stage)


def total_steps(stage: dict) -> int:
    """T of the schedule: ceil(max_tokens / batch)."""
    return -(-stage["max_tokens"] // BATCH_TOKENS)
