"""The job convert_weights: a checkpoint with proof, or one error and no checkpoint."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from olmo_core_jax import recipes
from olmo_core_jax.checkpoint.formats.safetensors import SafetensorsFolder, SafetensorsWriter
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import OK, USER_ERROR
from olmo_core_jax.jobs import convert_weights as job
from olmo_core_jax.jobs.common import main
from olmo_core_jax.model.weights import n_params
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.results import read_result

LAPTOP = load_recipe("laptop")
COMMAND = [sys.executable, "-m", "olmo_core_jax.jobs.convert_weights", "--recipe=laptop"]


def recipe_with(tmp_path: Path, **weights) -> str:
    """The laptop recipe with other weights."""
    raw = yaml.safe_load(recipes.dump_recipe(LAPTOP))
    raw["weights"] |= weights
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    return str(tmp_path / "recipe.yaml")


def run(recipe: str, root: Path) -> int:
    return main(job.JOB, ["--recipe", recipe, "--run-root", str(root)])


def latest(root: Path) -> int | None:
    return CheckpointStore(str(root / "convert_weights" / "checkpoints")).latest_good()


def test_laptop(tmp_path, capsys):
    assert run("laptop", tmp_path) == OK
    result = read_result(str(tmp_path), "convert_weights")
    assert result is not None and latest(tmp_path) == 0
    figures = result.figures
    assert figures["parity with the reference: max |logit difference|"] < 2e-6
    assert figures["parity with the reference: top-1 agreement"] == 1
    assert figures["parameters"] == n_params(LAPTOP.model)
    assert figures["vocabulary rows added as zeros"] == 0
    assert result.notes["dtype"] == "float32 -> float32, exactly"
    assert run("laptop", tmp_path) == OK
    assert "already done" in capsys.readouterr().out


def rewrite(folder: Path, target: Path, change) -> Path:
    """A copy of an HF folder with its tensors changed."""
    source = SafetensorsFolder(str(folder))
    tensors = {n: source.read(n, 0, s.shape[0]).copy() for n, s in source.specs().items()}
    change(tensors)
    shutil.copytree(folder, target)
    writer = SafetensorsWriter(target / "model.safetensors", source.specs())
    for name, values in tensors.items():
        writer.write(name, 0, values)
    writer.close()
    return target


def test_weights_of_another_function_are_refused(tmp_path, capsys):
    """The logits tell what names and shapes cannot."""

    def swap(tensors):
        a, b = (f"model.layers.2.self_attn.{kind}_proj.weight" for kind in ("q", "k"))
        tensors[a], tensors[b] = tensors[b], tensors[a]

    wrong = rewrite(Path(LAPTOP.weights.hf), tmp_path / "hf", swap)
    assert run(recipe_with(tmp_path, hf=str(wrong)), tmp_path / "run") == USER_ERROR
    said = capsys.readouterr().out
    assert "the weights do not compute the reference's logits" in said
    assert "max |logit difference|" in said
    assert read_result(str(tmp_path / "run"), "convert_weights") is None


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"hf": "/no/such/folder"}, "there is nothing at /no/such/folder"),
        ({"parity": "/no/such.npz"}, "/no/such.npz cannot be read"),
    ],
)
def test_what_is_missing_is_named(tmp_path, capsys, fields, said):
    assert run(recipe_with(tmp_path, **fields), tmp_path / "run") == USER_ERROR
    assert said in capsys.readouterr().out


def test_parity_file_of_another_model(tmp_path, capsys):
    np.savez(tmp_path / "p.npz", tokens=np.zeros((1, 4), int), logits=np.zeros((1, 4, 7)))
    recipe = recipe_with(tmp_path, parity=str(tmp_path / "p.npz"))
    assert run(recipe, tmp_path / "run") == USER_ERROR
    assert "has tokens (1, 4) and logits (1, 4, 7)" in capsys.readouterr().out


def test_no_weights_at_all(tmp_path):
    """Our own initialisation, as a checkpoint like any other."""
    recipe = recipe_with(tmp_path, hf=None, parity=None, init_seed=3)
    assert run(recipe, tmp_path / "run") == OK
    result = read_result(str(tmp_path / "run"), "convert_weights")
    assert result is not None and result.notes["weights"] == "own initialisation, seed 3"
    assert latest(tmp_path / "run") == 0


def test_killed_and_started_again(tmp_path):
    """SIGKILL while the arrays are written: nothing passes for whole, the next run finishes."""
    folder = tmp_path / "convert_weights" / "checkpoints"
    child = subprocess.Popen([*COMMAND, f"--run-root={tmp_path}"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(folder.glob("*tmp*/state*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert list(folder.glob("*tmp*")) and latest(tmp_path) is None
    assert read_result(str(tmp_path), "convert_weights") is None
    assert run("laptop", tmp_path) == OK
    assert latest(tmp_path) == 0


def test_a_disk_that_takes_no_more(tmp_path):
    """The system refuses writes in the middle of an array: one line, nothing half, and a way on."""
    limited = ["sh", "-c", 'ulimit -f 300 && exec "$@"', "sh"]  # a file ends within the embedding
    done = subprocess.run(
        [*limited, *COMMAND, f"--run-root={tmp_path}"], capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == USER_ERROR, said
    assert "checkpoints/0 cannot be written: File too large" in said
    assert "Traceback" not in said
    assert latest(tmp_path) is None
    assert list((tmp_path / "convert_weights" / "checkpoints").rglob("*.ocdbt"))  # it had begun
    assert run("laptop", tmp_path) == OK
    assert latest(tmp_path) == 0


def test_a_whole_checkpoint_without_a_result_is_taken_up(tmp_path, capsys):
    assert run("laptop", tmp_path) == OK
    (tmp_path / "convert_weights" / "result.json").unlink()
    assert run("laptop", tmp_path) == OK
    assert "is whole already" in capsys.readouterr().out
