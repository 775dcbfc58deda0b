"""A run root with invented figures, for tests and for looking at the report."""

import hashlib
import json
import math
import random
from pathlib import Path

import yaml

from olmo_core_jax import recipes
from olmo_core_jax.results import StageResult, write_result

COLUMNS = [
    "step",
    "train/CE loss",
    "train/Z loss",
    "optim/total grad norm",
    "optim/total grad norm (fp64)",
    "optim/LR (group 0)",
    "optim/step skipped",
]
DOMAINS = ("bible", "code", "docs", "shakespeare")


def recipe_dict(stage1_steps: int = 400, stage2_steps: int = 120) -> dict:
    """A small recipe whose reference lies beside it."""

    def stage(name: str, steps: int, schedule: dict, landmarks: list[int]) -> dict:
        return {
            "data": {"mix": "mix.txt", "base": ".", "sequence_length": 128, "seed": 1},
            "batch_tokens": 1024,
            "max_tokens": 1024 * steps,
            "schedule": schedule,
            "checkpoints": {"every": 50, "landmarks": landmarks},
            "reference": {
                "curve": f"./{name}.csv",
                "band": f"./{name}_band.csv",
                "batches": f"./{name}_batches.csv",
                "hf": {s: f"./hf{s}" for s in (*landmarks, steps)},
            },
        }

    cosine = {"kind": "cosine", "peak": 1e-3, "warmup": 40}
    linear = {"kind": "linear", "peak": 7e-4}
    marks = [s for s in (100, 200, 300) if s < stage1_steps]
    return {
        "name": "synthetic",
        "description": "Invented figures in the shape of a small run.",
        "model": {
            "n_layers": 4, "d_model": 8, "n_heads": 1, "n_kv_heads": 1, "head_dim": 8,
            "mlp_hidden": 8, "vocab_size": 2048, "padded_vocab_size": 2048,
        },
        "tokenizer": {"name": "t", "eos_id": 2046, "pad_id": 2047},
        "stage1": stage("stage1", stage1_steps, cosine, marks),
        "stage2": stage("stage2", stage2_steps, linear, []),
        "evaluation": {"heldout": {d: f"./{d}.npy" for d in DOMAINS}},
    }  # fmt: skip


def reference_curve(steps: int, rng: random.Random, start: float = 7.6) -> dict[int, dict]:
    rows = {}
    for s in range(1, steps + 1):
        loss = 3.9 + (start - 3.9) * math.exp(-s / 90) + rng.gauss(0, 0.05)
        norm = 0.4 + 1.6 * math.exp(-s / 25) + abs(rng.gauss(0, 0.06))
        rows[s] = dict(
            zip(
                COLUMNS[1:],
                [loss, 1e-5 * loss**2, norm * (1 + rng.gauss(0, 2e-5)), norm, 1e-3 * s / steps, 0],
                strict=True,
            )
        )
    return rows


def shifted(rows: dict[int, dict], rng: random.Random, size: float) -> dict[int, dict]:
    """The curve of a run that is nearly the same one, drifting slowly."""
    out = {}
    for s, row in rows.items():
        drift = size * (0.2 + s / len(rows))
        out[s] = row | {
            "train/CE loss": row["train/CE loss"] + rng.gauss(0, drift),
            "optim/total grad norm": row["optim/total grad norm (fp64)"]
            * (1 + rng.gauss(0, drift)),
        }
    return out


def digest(step: int) -> str:
    return hashlib.sha256(str(step).encode()).hexdigest()


def write_curve(path: Path, rows: dict[int, dict]) -> None:
    lines = [",".join([str(s), *(repr(row[c]) for c in COLUMNS[1:])]) for s, row in rows.items()]
    path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")


def write_stage(folder: Path, rows: dict[int, dict], repeated: range = range(0)) -> None:
    """metrics.jsonl and instances.jsonl as a trainer leaves them; `repeated` is logged twice."""
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    order = [(s, 1) for s in rows if not repeated or s < repeated.stop]
    order += [(s, 2) for s in rows if repeated and s >= repeated.start]
    speed = random.Random(5)
    lines = [
        {"step": s, "attempt": a, **{k: v for k, v in rows[s].items() if "fp64" not in k},
         "throughput/device/TPS": speed.gauss(11000, 300), "throughput/device/BPS": 10.7,
         "throughput/total tokens": 1024 * s}
        for s, a in order
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics" / "metrics.jsonl").write_text(text)
    batches = [{"step": s, "attempt": a, "tokens_digest": digest(s)} for s, a in order]
    (folder / "instances.jsonl").write_text("".join(json.dumps(b) + "\n" for b in batches))


def evaluation_figures(rng: random.Random, level: float) -> dict[str, float]:
    figures = {}
    for i, domain in enumerate(DOMAINS):
        value = level + 0.3 * i
        figures[f"heldout/{domain}/CE loss"] = value + rng.gauss(0, 3e-7)
        figures[f"heldout/{domain}/CE loss (reference)"] = value
    figures |= {"heldout max |difference|": 6.1e-7, "KL mean": 3.2e-12, "KL max": 8.1e-10}
    figures["top-1 agreement"] = 0.99995
    for task in ("laptop_cloze", "laptop_choice"):
        figures[f"lm_eval/{task}/acc"] = figures[f"lm_eval/{task}/acc (reference)"] = 0.42
    return figures


def write_run(root: Path, steps: tuple[int, int] = (400, 120), finished: bool = True) -> Path:
    """A whole run and its reference under root; returns the run root."""
    rng = random.Random(3)
    root.mkdir(parents=True, exist_ok=True)
    recipe_file = root / "recipe.yaml"
    recipe_file.write_text(yaml.safe_dump(recipe_dict(*steps)))
    run = root / "run"
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text(recipes.dump_recipe(recipes.load_recipe(str(recipe_file))))
    end = {}
    for name, n, start in (("stage1", steps[0], 7.6), ("stage2", steps[1], 4.1)):
        rows = reference_curve(n, rng, start)
        write_curve(root / f"{name}.csv", rows)
        write_curve(root / f"{name}_band.csv", shifted(rows, rng, 4e-7))
        lines = [f"{s},{digest(s)}" for s in rows]
        (root / f"{name}_batches.csv").write_text("\n".join(["step,sha256", *lines]) + "\n")
        repeated = range(n // 2, n // 2 + 7) if name == "stage1" else range(0)
        write_stage(run / f"{name}_train", shifted(rows, rng, 1e-6), repeated)
        end[f"{name}/end weights, max |difference| / largest weight"] = 2.1e-6
    for step in [*(s for s in (100, 200, 300) if s < steps[0]), steps[0]]:
        _result(run, f"eval_landmarks/{step}", evaluation_figures(rng, 6 - step / 150), 9.2)
    for name, took in (("convert_weights", 6.4), ("build_index", 1.1), ("stage1_train", 61.0),
                       ("warm_adam", 3.9), ("stage2_train", 24.2)):  # fmt: skip
        parity = {"parity: max |logit difference|": 9e-7} if name == "convert_weights" else {}
        _result(run, name, parity, took)
    if finished:
        from olmo_core_jax.report.run import read_run

        so_far = read_run(str(run)).figures
        _result(run, "final_eval", so_far | evaluation_figures(rng, 3.7) | end, 11.8)
    return run


def _result(run: Path, folder: str, figures: dict, took: float) -> None:
    versions = {"python": "3.11.9", "jax": "0.10.2", "numpy": "2.3.1", "lm-eval": "0.4.13"}
    result = StageResult(
        stage=folder, inputs={}, outputs={}, figures=figures, versions=versions, seconds=took
    )
    write_result(str(run), folder, result)
