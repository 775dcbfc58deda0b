"""A model that trains in seconds, its data, and runs of it: in this process, or as real jobs."""

import argparse
import contextlib
import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml

from olmo_core_jax import recipes, storage
from olmo_core_jax.checkpoint.checksums import key_name
from olmo_core_jax.data import instance_log
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.errors import Preempted
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.jobs import train as jobs_train
from olmo_core_jax.jobs.common import Context
from olmo_core_jax.recipes import Recipe
from olmo_core_jax.signals import StopRequest
from olmo_core_jax.train.loop import Trainer

VOCAB, EOS, PAD, SEQUENCE, BATCH = 64, 63, 62, 32, 8


def write_recipe(
    folder: Path, updates: int = 30, every: int = 10, batch: int = BATCH, **stage
) -> str:
    """Writes recipe and data under `folder`; returns the recipe's path. stage: changes to it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    # Words that repeat, so that there is something to learn.
    words = [rng.integers(0, PAD, 6) for _ in range(20)]
    for name, count in (("a", 1300 * batch // BATCH), ("b", 900 * batch // BATCH)):
        tokens = np.concatenate([np.append(words[i], EOS) for i in rng.integers(0, 20, count)])
        tokens.astype("<u2").tofile(folder / f"{name}.npy")
    (folder / "mix.txt").write_text("x,a.npy\ny,b.npy\n")
    section = {
        "data": {
            "mix": "mix.txt",
            "base": ".",
            "sequence_length": SEQUENCE,
            "seed": 5,
            "dtype": "uint16",
        },
        "batch_tokens": SEQUENCE * batch,
        "max_tokens": SEQUENCE * batch * updates,
        "epochs": 40,
        "schedule": {"kind": "cosine", "peak": 3e-3, "warmup": 5},
        "optimizer": {"skip": {"window": 8}},
        "checkpoints": {"every": every},
    }
    recipe = {
        "name": "tiny",
        "model": {
            "n_layers": 4,
            "d_model": 16,
            "n_heads": 2,
            "n_kv_heads": 2,
            "head_dim": 8,
            "mlp_hidden": 32,
            "vocab_size": VOCAB,
            "padded_vocab_size": VOCAB,
            "pattern": [8, -1],
        },
        "tokenizer": {"name": "tiny", "eos_id": EOS, "pad_id": PAD},
        "stage1": section | stage,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def build_index(run_root: str | Path, recipe: Recipe, stage: str = "stage1") -> None:
    build_stage_data(storage.join(str(run_root), "build_index", stage), recipe, stage)


def context(
    recipe_path: str, run_root: str | Path, topology: Topology | None = None, stage="stage1"
) -> Context:
    """What a job's work is given, with a stop request that no signal reaches."""
    recipe = recipes.load_recipe(recipe_path)
    if not Path(run_root, "build_index", stage).exists():
        build_index(run_root, recipe, stage)
    args = argparse.Namespace(stage=stage, interrupt="", accept_other_data=False)
    folder = storage.join(str(run_root), f"{stage}_train")
    return Context(recipe, str(run_root), folder, args, topology or Topology(), StopRequest(25))


def rows(run_root: str | Path, stage: str = "stage1") -> list[dict]:
    """All lines of a run's metrics."""
    text = Path(run_root, f"{stage}_train", "metrics", "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def train(at: Context, stop_after: int | None = None, around=None) -> Trainer:
    """Trains in this process. stop_after: updates of this call after which a stop is requested.

    around(step_fn, state, batch, rate) makes an update in place of step_fn.
    """
    with contextlib.ExitStack() as open_things:
        trainer = jobs_train._trainer(at, open_things)
        step_fn, made = trainer.step_fn, 0

        def counted(*arguments):
            nonlocal made
            made += 1
            if made == stop_after:
                at.stop.request()
            return around(step_fn, *arguments) if around else step_fn(*arguments)

        trainer.step_fn = counted
        try:
            trainer.run()
        except Preempted:
            assert stop_after == made
        return trainer


def final_arrays(run_root: str | Path, step: int, stage: str = "stage1") -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path."""
    where = Path(run_root, f"{stage}_train", "checkpoints", str(step), "state").resolve()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        item = reader.metadata(where).item_metadata.tree
        like = jax.tree.map(lambda m: ocp.RestoreArgs(restore_type=np.ndarray), item)
        tree = reader.restore(where, args=ocp.args.PyTreeRestore(restore_args=like))
    return {key_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


REPEATABLE = ("train/", "optim/", "throughput/total tokens")


def curve(run_root: str | Path, stage: str = "stage1") -> dict[int, dict[str, float]]:
    """What a run logged of each update that has to be the same in any run, the last attempt's."""
    return {
        row["step"]: {k: v for k, v in row.items() if k.startswith(REPEATABLE)}
        for row in rows(run_root, stage)
    }


def batches(run_root: str | Path, stage: str = "stage1") -> dict[int, tuple[str, str]]:
    """Digests of every update's instance ids and token ids."""
    uri = str(Path(run_root, f"{stage}_train", "instances.jsonl"))
    lines, torn = instance_log.read_lines(uri)
    assert torn == 0
    return {line.step: (line.digest, line.tokens_digest) for line in lines}


def assert_same_run(a: str | Path, b: str | Path, last: int) -> None:
    """Batches, metrics and every bit of the final state are equal."""
    assert batches(a) == batches(b)
    assert curve(a) == curve(b) and sorted(curve(a)) == list(range(1, last + 1))
    x, y = final_arrays(a, last), final_arrays(b, last)
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype and x[name].tobytes() == y[name].tobytes(), name
