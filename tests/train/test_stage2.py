"""A stage that begins with another stage's weights, moments and Adam count, and with nothing else of it."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import yaml

from olmo_core_jax import recipes
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import UserError
from olmo_core_jax.optim.schedules import learning_rate

FIRST, SECOND = 20, 12


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(recipe, run root): stage 1 trained, and its state as stage 2's step 0 (step 0, empty window)."""
    folder = tmp_path_factory.mktemp("both")
    path = tiny.write_recipe(folder / "recipe", FIRST)
    raw = yaml.safe_load(Path(path).read_text())
    raw["stage2"] = raw["stage1"] | {
        "data": raw["stage1"]["data"] | {"seed": 77},
        "max_tokens": SECOND * tiny.SEQUENCE * tiny.BATCH,
        "schedule": {"kind": "linear", "peak": 5e-3, "warmup": 0, "alpha_f": 0.0},
        "checkpoints": {"every": 6},
    }
    Path(path).write_text(yaml.safe_dump(raw))
    root = folder / "run"
    tiny.train(tiny.context(path, root))
    arrays = tiny.final_arrays(root, FIRST)
    start = {k: np.zeros_like(v) if k in FRESH else v for k, v in arrays.items()}
    store = CheckpointStore(str(root / "warm_adam" / "checkpoints"))
    store.save(0, nested(start), {"recipe": recipes.digest(recipes.load_recipe(path))})
    store.close()
    tiny.train(tiny.context(path, root, stage="stage2"))
    return path, root


FRESH = ("losses", "grad_norms", "seen", "step")


def nested(flat: dict) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        *above, name = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def test_counters(both):
    _, root = both
    meta = CheckpointStore(str(root / "stage2_train/checkpoints")).meta(SECOND)
    before = CheckpointStore(str(root / "stage1_train/checkpoints")).meta(FIRST)
    assert meta["schedule_count"] == meta["step"] == SECOND
    assert meta["adam_count"] == before["adam_count"] + SECOND - meta["skipped"]
    assert meta["data"]["seed"] == 77 and meta["data"]["batches_processed"] == SECOND
    assert meta["tokens_seen"] == SECOND * tiny.SEQUENCE * tiny.BATCH


def test_learning_rates_are_the_new_schedules_from_first_to_last(both):
    path, root = both
    stage = recipes.load_recipe(path).stage2
    rates = [row["optim/LR (group 0)"] for row in tiny.rows(root, "stage2")]
    assert rates == [learning_rate(stage, n) for n in range(1, SECOND + 1)]
    assert rates[0] == pytest.approx(5e-3 * (1 - 1 / SECOND)) and rates[-1] == 0.0
    moved = tiny.final_arrays(root, SECOND, "stage2")["params/lm_head/weight"]
    assert not np.array_equal(moved, tiny.final_arrays(root, FIRST)["params/lm_head/weight"])


def test_data_begins_anew_with_its_own_seed(both):
    from olmo_core_jax.data.instance_log import digest
    from olmo_core_jax.data.stage_data import open_stage_data

    path, root = both
    recipe = recipes.load_recipe(path)
    _, order = open_stage_data(str(root / "build_index/stage2"), recipe.stage2)
    shuffled = np.arange(order.shuffle.instances, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(77 + 1)).shuffle(shuffled)
    given = tiny.batches(root, "stage2")
    for step in (1, 2, 3):
        ids = shuffled[(step - 1) * tiny.BATCH : step * tiny.BATCH]
        assert given[step][0] == digest(ids)


def test_stopped_and_resumed_is_the_same(both, tmp_path):
    import shutil

    path, root = both
    for name in ("build_index", "warm_adam"):
        shutil.copytree(root / name, tmp_path / name)
    for _ in range(3):
        tiny.train(tiny.context(path, tmp_path, stage="stage2"), stop_after=3)
    tiny.train(tiny.context(path, tmp_path, stage="stage2"))
    a = tiny.final_arrays(root, SECOND, "stage2")
    b = tiny.final_arrays(tmp_path, SECOND, "stage2")
    assert all(a[k].tobytes() == b[k].tobytes() for k in a)
    assert tiny.curve(root, "stage2") == tiny.curve(tmp_path, "stage2")


def test_without_a_warm_start_it_says_what_to_run(both, tmp_path):
    path, _ = both
    with pytest.raises(
        UserError, match=r"stage2 begins with .*warm_adam/checkpoints/0, but it does not exist"
    ):
        tiny.train(tiny.context(path, tmp_path, stage="stage2"))


def test_a_start_of_another_recipe_is_refused(both, tmp_path):
    path, root = both
    store = CheckpointStore(str(tmp_path / "warm_adam" / "checkpoints"))
    store.save(0, nested(tiny.final_arrays(root, FIRST)), {"recipe": "another"})
    store.close()
    with pytest.raises(UserError, match=r"is of another recipe: another there"):
        tiny.train(tiny.context(path, tmp_path, stage="stage2"))
