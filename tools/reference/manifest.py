"""MANIFEST.json: what was made, from what, by which versions, and how well it agrees with itself."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import platform
import statistics
from pathlib import Path

from . import settings
from .sources import SOURCES

PACKAGES = [
    "torch",
    "ai2-olmo-core",
    "transformers",
    "tokenizers",
    "numpy",
    "lm_eval",
    "safetensors",
]


def make(out: Path, seconds: dict[str, float]) -> dict:
    """The manifest of everything under `out`."""
    return {
        "format": 1,
        "made_by": "tools/make_reference.py",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "torch_threads": settings.TORCH_THREADS,
        "dtype": "float32",
        "tokenizer": {
            "name": settings.TOKENIZER,
            "vocab_size": settings.VOCAB_SIZE,
            "padded_vocab_size": settings.VOCAB_SIZE,
            "eos_token_id": settings.EOS_ID,
            "pad_token_id": settings.PAD_ID,
            "token_dtype": "uint16, little-endian",
        },
        "corpus": {
            "seed": settings.CORPUS_SEED,
            "sources": SOURCES,
            "tokens": _token_counts(out),
        },
        "model": settings.MODEL,
        "optimizer": settings.OPTIMIZER,
        "sequence_length": settings.SEQUENCE_LENGTH,
        "batch_instances": settings.BATCH_INSTANCES,
        "batch_tokens": settings.BATCH_TOKENS,
        "stages": {stage["name"]: _stage(out, stage) for stage in settings.stages()},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "files": _digests(out),
    }


def read_curve(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def guard_scores(rows: list[dict[str, float]]) -> list[tuple[int, float, float]]:
    """(step, loss score, gradient norm score) where the skip rule is armed, in standard deviations.

    The rule skips where either is above 6: SkipStepOptimizer keeps 128 earlier values and needs 63.
    """
    length = settings.OPTIMIZER["rolling_interval_length"]
    columns = ("train/CE loss", "optim/total grad norm")
    scores = []
    for i in range(length // 2 - 1, len(rows)):
        both = []
        for column in columns:
            past = [row[column] for row in rows[max(0, i - length) : i]]
            both.append((rows[i][column] - statistics.fmean(past)) / statistics.stdev(past))
        scores.append((int(rows[i]["step"]), both[0], both[1]))
    return scores


def _stage(out: Path, stage: dict) -> dict:
    folder = out / stage["name"]
    runs = [read_curve(folder / name) for name in ("curve.csv", "curve_foreach_off.csv")]
    return {
        **stage,
        "total_steps": settings.total_steps(stage),
        "end_step": settings.end_step(stage),
        "self_agreement": _agreement(*runs),
        "skips": [_skips(rows) for rows in runs],
    }


def _agreement(run: list[dict], other: list[dict]) -> dict:
    """foreach on against foreach off, the largest gap over all updates."""
    ce = [abs(a["train/CE loss"] - b["train/CE loss"]) for a, b in zip(run, other, strict=True)]
    key = "optim/total grad norm"
    gn = [abs(a[key] / b[key] - 1) for a, b in zip(run, other, strict=True)]
    exact = [abs(row[key] / row[key + " (fp64)"] - 1) for row in run]
    skipped = [
        [int(row["step"]) for row in rows if row["optim/step skipped"]] for rows in (run, other)
    ]
    return {
        "max_abs_ce_difference": max(ce),
        "at_step": ce.index(max(ce)) + 1,
        "max_relative_grad_norm_difference": max(gn),
        "max_relative_grad_norm_error_against_fp64": max(exact),
        "same_updates_skipped": skipped[0] == skipped[1],
    }


def _skips(rows: list[dict]) -> dict:
    skipped = {int(row["step"]) for row in rows if row["optim/step skipped"]}
    scores = {step: {"loss": a, "grad_norm": b} for step, a, b in guard_scores(rows)}
    kept = {step: max(s.values()) for step, s in scores.items() if step not in skipped}
    nearest = max(kept, key=lambda step: kept[step])
    return {
        "skipped": {str(step): scores[step] for step in sorted(skipped)},
        "threshold": settings.OPTIMIZER["sigma_factor"],
        "nearest_kept": {"step": nearest, "score": kept[nearest]},
    }


def _token_counts(out: Path) -> dict:
    counts: dict[str, dict[str, int]] = {"stage1": {}, "stage2": {}, "heldout": {}}
    for stage in settings.stages():
        for line in (out / stage["mix"]).read_text().splitlines():
            if not line.startswith("#"):
                label, path = line.split(",")
                size = (out / "data" / path.format(TOKENIZER=settings.TOKENIZER)).stat().st_size
                tokens = counts[stage["name"]]
                tokens[label] = tokens.get(label, 0) + size // 2
    for path in sorted((out / "heldout").glob("*.npy")):
        counts["heldout"][path.stem] = path.stat().st_size // 2
    for tokens in counts.values():
        tokens["total"] = sum(tokens.values())
    return counts


def _digests(out: Path) -> dict[str, dict]:
    files = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file() and p.name != "MANIFEST.json"):
        data = path.read_bytes()
        name = path.relative_to(out).as_posix()
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return files
