"""The job on a run root whose checkpoints and reference differ by a known amount."""

import argparse
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from small import BPE_EOS, CFG, bpe_tokenizer

from olmo_core_jax import recipes
from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import OK, PREEMPTED, UserError
from olmo_core_jax.evaluate.checkpoint import stored
from olmo_core_jax.jobs import common, evaluate
from olmo_core_jax.model.olmo3 import init_params
from olmo_core_jax.results import read_result
from olmo_core_jax.signals import StopRequest

STEP, LAST, SHIFT = 2, 4, 2.0**-12
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: "{TASKS_DIR}/choice.jsonl"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
metadata: {version: 3.0}
"""


def write_recipe(root: Path) -> str:
    rng = np.random.default_rng(0)
    rng.integers(0, CFG.vocab_size, 16 * 5 + 3).astype("<u2").tofile(root / "held.npy")
    (root / "tasks").mkdir()
    (root / "tasks/choice.yaml").write_text(CHOICE)
    questions = [{"context": "a b", "choices": [" c", " d"], "answer": i % 2} for i in range(4)]
    (root / "tasks/choice.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    bpe_tokenizer().save(str(root / "tokenizer.json"))
    (root / "heldout.json").write_text(json.dumps({"stage1": {str(STEP): {"a": 1.5}}}))
    (root / "lm_eval.json").write_text(json.dumps({str(STEP): {"choice": {"acc,none": 0.5}}}))
    names = "step,train/CE loss,train/Z loss,optim/total grad norm,optim/LR (group 0)"
    curve = [f"{s},{7 - s},0.5,1.0,0.125,0" for s in range(1, LAST + 1)]
    (root / "curve.csv").write_text("\n".join([names + ",optim/step skipped", *curve]) + "\n")
    recipe = {
        "name": "small",
        "model": CFG.model_dump(),
        "tokenizer": {"name": "t", "path": ".", "eos_id": BPE_EOS, "pad_id": 0},
        "stage1": {
            "data": {
                "mix": "mix.txt",
                "base": ".",
                "sequence_length": 16,
                "seed": 1,
                "dtype": "uint16",
            },
            "batch_tokens": 32,
            "max_tokens": 32 * LAST,
            "schedule": {"kind": "linear", "peak": 1e-3},
            "checkpoints": {"every": 2, "landmarks": [STEP]},
            "reference": {
                "curve": "curve.csv",
                "hf": {STEP: "./hf2", LAST: "./hf4"},
                "heldout": "heldout.json",
                "lm_eval": "lm_eval.json",
            },
        },
        "evaluation": {
            "heldout": {"a": "held.npy"},
            "tasks_path": "./tasks",
            "tasks": ["choice"],
            "batch_size": 2,
        },
    }
    (root / "small.yaml").write_text(yaml.safe_dump(recipe))
    return str(root / "small.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Recipe and run root; step 2 is the reference's, in step 4 one weight is moved by SHIFT."""
    root = tmp_path_factory.mktemp("job")
    recipe_file, run_root = write_recipe(root), root / "run"
    recipe = recipes.load_recipe(recipe_file)
    params = init_params(CFG, 0)
    store = CheckpointStore(str(run_root / "stage1_train/checkpoints"), keep=9)
    theirs = CheckpointStore(str(root / "theirs"))
    for step in (STEP, LAST):
        theirs.save(step, {"params": params}, {})
        theirs.wait()

        source = OrbaxStep(str(root / "theirs" / str(step)))
        hf.export_hf(source, CFG, recipe.tokenizer, str(root / f"hf{step}"), context=16, rows=91)
    moved = params["final_norm"]["weight"].at[3].add(SHIFT)
    store.save(STEP, {"params": params}, {})
    store.save(LAST, {"params": {**params, "final_norm": {"weight": moved}}}, {})
    store.close(), theirs.close()
    metrics = run_root / "stage1_train/metrics"
    metrics.mkdir()
    same = {"train/Z loss": 0.5, "optim/total grad norm": 1.0, "optim/LR (group 0)": 0.125}
    lines = [
        {"step": s, "attempt": 1, "train/CE loss": 7.0 - s + (s == 3) * 2.0**-16, **same}
        for s in range(1, LAST + 1)
    ]
    (metrics / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return recipe_file, str(run_root)


def evaluate_here(run, *flags, **changes) -> int:
    parser = argparse.ArgumentParser()
    evaluate.flags(parser)
    args = parser.parse_args(flags)
    args.recipe, args.run_root, args.topology = (*run, None)
    return common.run(evaluate.JOB, args, StopRequest(25))


def test_a_landmark_of_equal_weights(run, caplog):
    assert evaluate_here(run, "--step", str(STEP)) == 0
    result = read_result(run[1], f"eval_landmarks/{STEP}")
    f = result.figures
    assert (f["KL mean"], f["KL max"], f["top-1 agreement"]) == (0.0, 0.0, 1.0)
    assert f["positions compared"] == 5 * 16
    assert f["heldout/a/CE loss (reference)"] == 1.5
    assert f["heldout max |difference|"] == abs(f["heldout/a/CE loss"] - 1.5)
    assert f["lm_eval/choice/acc"] == 0.5 == f["lm_eval/choice/acc (reference)"]
    assert result.notes["lm_eval/choice"] == "version 3.0, n_shot 0, limit None"
    with caplog.at_level(logging.INFO):
        assert evaluate_here(run, "--step", str(STEP)) == 0
    assert "already done" in caplog.text


def test_the_final_comparison(run):
    assert evaluate_here(run, "--step", str(LAST)) == 0
    assert evaluate_here(run, "--final") == 0
    result = read_result(run[1], "final_eval")
    f, largest = result.figures, result.figures["stage1/end weights, largest"]
    assert f["stage1/end weights, max |difference|"] == SHIFT
    assert f["stage1/end weights, max |difference| / largest weight"] == SHIFT / largest
    assert f["stage1/CE loss, max |difference|"] == 2.0**-16
    assert f["stage1/CE loss, update of the max"] == 3
    assert 0 < f["KL mean"] < 1e-6
    assert f["landmarks/KL mean"] == f["KL mean"], "the worst of the landmarks is the last"
    assert "computed by this model" in result.notes["heldout (reference)"]
    assert 0 < f["heldout max |difference|"] < 1e-3
    assert f["checks passed"] < f["checks"], "the stored held-out loss of step 2 is far off"


def test_what_is_missing_or_damaged_is_named(run, tmp_path):
    with pytest.raises(UserError, match="stage stage1_train is not finished"):
        evaluate_here(run, "--step", "3")
    with pytest.raises(SystemExit):
        evaluate_here(run, "--step", "3", "--final")


def test_another_checkpoint_is_not_taken_for_the_evaluated_one(run):
    meta = Path(run[1], f"stage1_train/checkpoints/{STEP}/meta/metadata")
    text = meta.read_text()
    try:
        content = json.loads(text)
        name = sorted(content["checksums"])[0]
        content["checksums"][name] = "0" * 8
        meta.write_text(json.dumps(content))
        with pytest.raises(UserError, match="stage1/2 changed"):
            evaluate_here(run, "--step", str(STEP))
    finally:
        meta.write_text(text)


@pytest.mark.slow
def test_four_devices_give_the_same_figures(run, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(Path(run[1], "stage1_train"), root / "stage1_train")
    topology = '{"platform": "cpu", "host_devices": 4, "mesh": {"fsdp": 2, "tensor": 2}}'
    command = [sys.executable, "-m", "olmo_core_jax.jobs.evaluate", "--recipe", run[0],
               "--run-root", str(root), "--step", str(STEP), "--topology", topology]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 devices" in done.stdout
    ours, theirs = (read_result(r, f"eval_landmarks/{STEP}").figures for r in (str(root), run[1]))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], abs=2e-6), name


@pytest.fixture(scope="module")
def long_run(run):
    """The same, with so many questions that scoring them takes seconds; where, and their number."""
    folder, count = Path(run[0]).parent, 800
    shutil.copytree(folder / "tasks", folder / "many")
    line = (folder / "many/choice.jsonl").read_text().splitlines()[0] + "\n"
    (folder / "many/choice.jsonl").write_text(line * count)
    recipe = yaml.safe_load(Path(run[0]).read_text())
    recipe["evaluation"]["tasks_path"] = "./many"
    (folder / "long.yaml").write_text(yaml.safe_dump(recipe | {"name": "long"}))
    return str(folder / "long.yaml"), run[1], count


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("process 0 of 1", id="restore-and-compile"),
        pytest.param("held-out loss", id="scoring"),
    ],
)
def test_sigterm_while_it_scores(long_run, tmp_path, moment):
    """Exit code 42 inside the grace, nothing half-written; the next attempt does all of it."""
    recipe, whole, count = long_run
    shutil.copytree(Path(whole, "stage1_train"), tmp_path / "stage1_train")
    command = [sys.executable, "-m", "olmo_core_jax.jobs.evaluate", "--recipe", recipe,
               "--run-root", str(tmp_path), "--step", str(STEP)]  # fmt: skip

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    job = start()
    seen = next(line for line in job.stdout if moment in line)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    told = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == PREEMPTED, seen + output
    assert time.monotonic() - told < 10 and "Traceback" not in output and "grace" not in output
    assert {p.name for p in (tmp_path / f"eval_landmarks/{STEP}").iterdir()} <= {
        "log.txt",
        "lock.json",
    }
    again = start()
    output, _ = again.communicate(timeout=120)
    assert again.returncode == OK, output
    figures = read_result(str(tmp_path), f"eval_landmarks/{STEP}").figures
    assert (figures["KL max"], figures["top-1 agreement"]) == (0.0, 1.0)
    assert figures["lm_eval/choice/acc"] in (0.0, 1.0), f"one question, {count} times"


def test_reference_files_by_stage_and_step_or_by_step(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"stage1": {"5": {"a": 1.0}}, "stage2": {"5": {"a": 2.0}}}))
    assert stored(str(file), "stage2", 5) == {"a": 2.0}
    assert stored(str(file), "stage1", 6) == {}
    file.write_text(json.dumps({"5": {"a": 3.0}}))
    assert stored(str(file), "stage1", 5) == {"a": 3.0}
    assert stored(None, "stage1", 5) == {}
    with pytest.raises(UserError, match="missing"):
        stored(str(tmp_path / "missing"), "stage1", 5)
