"""What OLMo-core's checkpoints say: parity logits, held-out loss, lm-evaluation-harness scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.hf.convert_checkpoint import convert_checkpoint_to_hf
from transformers import AutoModelForCausalLM

from . import settings
from .tasks import render
from .training import model_config, tokenizer_config

HF_FILES = {"config.json", "generation_config.json", "model.safetensors"}


def export_hf(checkpoint: Path, target: Path, tokenizer: Path) -> None:
    """OLMo-core's own conversion in fp32, with its own check of the logits.

    The tokenizer copy it adds to every folder is removed: tokenizer/ holds it once.
    """
    shutil.rmtree(target, ignore_errors=True)
    convert_checkpoint_to_hf(
        checkpoint,
        target,
        model_config().as_config_dict(),
        tokenizer_config().as_config_dict(),
        tokenizer_id=str(tokenizer),
        max_sequence_length=settings.SEQUENCE_LENGTH,
        device=torch.device("cpu"),
    )
    for path in target.iterdir():
        if path.name not in HF_FILES:
            path.unlink()


def write_parity(checkpoint: Path, hf: Path, heldout: Path, target: Path) -> float:
    """Logits of two held-out sequences by OLMo-core; returns the largest gap to transformers."""
    model = model_config().build(init_device="cpu")
    load_model_and_optim_state(str(checkpoint / "model_and_optim"), model)
    files = [heldout / "bible.npy", heldout / "code.npy"]
    tokens = np.stack([np.fromfile(f, "<u2")[: settings.SEQUENCE_LENGTH] for f in files])
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logits = model.eval()(ids)
        other = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()(ids).logits
    gap = float((logits - other).abs().max())
    if gap > 1e-5:
        raise SystemExit(f"transformers' logits differ from OLMo-core's by {gap}")
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, tokens=tokens.astype(np.int32), logits=logits.float().numpy())
    return gap


def heldout_loss(hf: Path, heldout: Path) -> dict[str, float]:
    """Mean cross-entropy (nats a token, no z-loss) per domain, transformers in fp32.

    Each file is cut into consecutive windows of one sequence length, the remainder is dropped, and
    the mean is over the S-1 targets inside each window.
    """
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    losses = {}
    for path in sorted(heldout.glob("*.npy")):
        tokens = np.fromfile(path, "<u2").astype(np.int64)
        count = len(tokens) // settings.SEQUENCE_LENGTH
        windows = torch.from_numpy(tokens[: count * settings.SEQUENCE_LENGTH]).view(count, -1)
        with torch.no_grad():
            logits = model(windows).logits[:, :-1]
        targets = windows[:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses[path.stem] = float(each.double().mean())
    return losses


def lm_eval_scores(hf: Path, out: Path, work: Path) -> dict[str, dict[str, float]]:
    """Scores of the bundled tasks by lm-evaluation-harness's own hf backend."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = render(out / "tasks", work / "tasks")
    model = HFLM(
        pretrained=str(hf),
        tokenizer=str(out / "tokenizer"),
        device="cpu",
        dtype="float32",
        batch_size=16,
    )
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["laptop_continuation", "laptop_bits"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    keep = ("acc,none", "acc_norm,none", "bits_per_byte,none", "word_perplexity,none")
    return {
        task: {name: float(scores[name]) for name in keep if name in scores}
        for task, scores in results["results"].items()
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
