"""Stage 2's start: what goes on keeps its bits, the rest begins at zero, and the table says so."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from olmo_core_jax import recipes
from olmo_core_jax.checkpoint import warm_adam
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import OK, USER_ERROR, UserError
from olmo_core_jax.jobs import warm_adam as job
from olmo_core_jax.jobs.common import main
from olmo_core_jax.model.olmo3 import init_params
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState, skip_step_adamw
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.results import read_result
from olmo_core_jax.train.resume import state_tree
from olmo_core_jax.train.step import TrainState, init_state

LAPTOP = load_recipe("laptop")


def trained_state(recipe, step: int, count: int) -> dict:
    """A stage-1 end that no reset state looks like."""
    params = init_params(recipe.model, 5)
    state = init_state(params, recipe.stage1, recipe.precision)
    tree = state_tree(state)
    tree["mu"] = jax.tree.map(lambda p: 0.01 * p, params)
    tree["nu"] = jax.tree.map(lambda p: p * p, params)
    numbers = {"count": count, "step": step, "seen": step}
    tree |= {name: jnp.asarray(value, jnp.int32) for name, value in numbers.items()}
    return tree | {"losses": tree["losses"] + 3.0, "grad_norms": tree["grad_norms"] + 0.5}


def save_stage1(root: Path, recipe, step: int, count: int) -> dict:
    tree = trained_state(recipe, step, count)
    store = CheckpointStore(str(root / "stage1_train" / "checkpoints"))
    meta = {
        "recipe": recipes.digest(recipe),
        "stage": "stage1",
        "model": recipe.model.model_dump(mode="json"),
        "tokens_seen": step * recipe.stage1.batch_tokens,
        "schedule_count": step,
        "adam_count": count,
        "data": {"seed": recipe.stage1.data.seed, "epoch": 1, "batches_processed": step},
    }
    store.save(step, tree, meta)
    store.close()
    return tree


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished warm_adam job after a stage 1 of 400 updates, two of them skipped."""
    root = tmp_path_factory.mktemp("run")
    tree = save_stage1(root, LAPTOP, 400, 399)
    assert main(job.JOB, ["--recipe", "laptop", "--run-root", str(root)]) == OK
    return root, tree


def restored(root: Path) -> tuple[dict, dict]:
    shapes = jax.eval_shape(lambda: trained_state(LAPTOP, 400, 399))
    return CheckpointStore(str(root / "warm_adam" / "checkpoints")).restore(0, shapes)


def test_weights_and_moments_keep_their_bits(run):
    root, before = run
    after, _ = restored(root)
    for part in ("params", "mu", "nu"):
        same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), before[part], after[part])
        assert jax.tree.all(same)
    assert int(after["count"]) == 399


def test_counters_and_window_begin_again(run):
    after, meta = restored(run[0])
    assert (int(after["step"]), int(after["seen"])) == (0, 0)
    assert not after["losses"].any() and not after["grad_norms"].any()
    assert (meta["adam_count"], meta["schedule_count"], meta["tokens_seen"]) == (399, 0, 0)
    assert "data" not in meta


def test_the_table_lists_everything_once(run):
    rows = {
        row["what"]: row for row in json.loads((run[0] / "warm_adam" / "surgery.json").read_text())
    }
    assert {what: row["rule"] for what, row in rows.items()} == {
        "weights": "taken",
        "first moments (mu)": "taken",
        "second moments (nu)": "taken",
        "Adam count": "taken",
        "schedule count": "reset",
        "run step": "reset",
        "tokens seen": "reset",
        "learning rate": "from recipe",
        "optimizer settings": "from recipe",
        "data position": "from recipe",
        "skip window": "reset",
        "random generators": "reset",
    }
    assert (rows["Adam count"]["before"], rows["Adam count"]["after"]) == ("399", "399")
    assert (rows["run step"]["before"], rows["run step"]["after"]) == ("400", "0")
    assert rows["data position"]["before"].startswith(f"seed {LAPTOP.stage1.data.seed}, epoch 1")
    assert rows["data position"]["after"].startswith(
        f"seed {LAPTOP.stage2.data.seed}, epoch 1, batch 0"
    )
    result = read_result(str(run[0]), "warm_adam")
    assert result is not None and result.figures["Adam count"] == 399
    assert set(result.notes) == set(rows)


def test_first_update_has_the_size_of_a_continued_count(run):
    """With the count at zero it would be 2.24 times too large, with a kept schedule it would be
    0.
    """
    after, _ = restored(run[0])
    stage = LAPTOP.stage2
    optimizer = skip_step_adamw(stage.optimizer)
    grads = jax.tree.map(lambda m: 10 * m, after["mu"])
    rate = jnp.float32(learning_rate(stage, 1))
    assert float(rate) == pytest.approx(stage.schedule.peak, rel=0.02)

    @jax.jit
    def update(count):
        fields = {name: after[name] for name in SkipStepAdamWState._fields} | {"count": count}
        state = SkipStepAdamWState(**fields)
        loss = jnp.float32(3)
        updates, _ = optimizer.update(grads, state, after["params"], loss=loss, learning_rate=rate)
        # Weight decay does not depend on the count; the embedding has none.
        return updates["embed"]["weight"]

    continued, zero = (np.asarray(update(jnp.int32(n))) for n in (int(after["count"]), 0))
    large = np.abs(continued) > 1e-6
    assert large.mean() > 0.9
    np.testing.assert_allclose(
        np.median(zero[large] / continued[large]), np.sqrt(0.05) / 0.1, rtol=1e-3
    )
    assert np.sqrt(0.05) / 0.1 == pytest.approx(2.236, abs=1e-3)


def test_the_reference_native_state(tmp_path):
    """Stage 2 from what OLMo-core itself left: its moments, and its Adam step."""
    native = LAPTOP.stage1.reference.native[400]
    arguments = ["--recipe", "laptop", "--run-root", str(tmp_path), "--from-native", native]
    assert main(job.JOB, arguments) == OK
    after, _ = restored(tmp_path)
    assert int(after["step"]) == 0
    head = after["mu"]["lm_head"]["weight"]
    from olmo_core_jax.checkpoint.formats.olmo_core import open_native

    found = open_native(native, LAPTOP.model)
    assert int(after["count"]) == found.adam_step
    source = found.tensors
    expected = source.read("optim.state.lm_head.w_out.weight.exp_avg", 0, head.shape[0])
    assert np.array_equal(np.asarray(head), expected) and expected.any()


def test_window_goes_along_where_the_recipe_says_so(tmp_path):
    raw = yaml.safe_load(recipes.dump_recipe(LAPTOP))
    raw["stage2"]["optimizer"]["skip"]["persist_window"] = True
    (tmp_path / "keep.yaml").write_text(yaml.safe_dump(raw))
    recipe = load_recipe(str(tmp_path / "keep.yaml"))
    save_stage1(tmp_path / "run", recipe, 400, 399)
    arguments = ["--recipe", str(tmp_path / "keep.yaml"), "--run-root", str(tmp_path / "run")]
    assert main(job.JOB, arguments) == OK
    after, _ = restored(tmp_path / "run")
    assert int(after["seen"]) == 400 and float(after["losses"][0]) == 3.0


def test_stage1_has_to_be_finished(tmp_path, capsys):
    assert main(job.JOB, ["--recipe", "laptop", "--run-root", str(tmp_path)]) == USER_ERROR
    assert "run stage1 to its end first" in capsys.readouterr().out
    assert not (tmp_path / "warm_adam" / "checkpoints").exists()


def test_another_model_is_refused(tmp_path):
    other = LAPTOP.model_copy(update={"model": LAPTOP.model.model_copy(update={"mlp_hidden": 64})})
    save_stage1(tmp_path, other, 400, 399)
    with pytest.raises(UserError, match="another model than the recipe's: mlp_hidden differ"):
        warm_adam.from_ours(str(tmp_path / "stage1_train" / "checkpoints" / "400"), LAPTOP)


def test_unknown_parts_are_refused(tmp_path):
    tree = trained_state(LAPTOP, 400, 399) | {"ema": jnp.zeros(3)}
    store = CheckpointStore(str(tmp_path))
    store.save(400, tree, {"model": LAPTOP.model.model_dump(mode="json")})
    store.close()
    with pytest.raises(UserError, match="has an unknown ema"):
        warm_adam.from_ours(str(tmp_path / "400"), LAPTOP)


def test_parameters_alone_are_no_start(tmp_path):
    store = CheckpointStore(str(tmp_path))
    params = init_params(LAPTOP.model, 0)
    store.save(400, {"params": params}, {"model": LAPTOP.model.model_dump(mode="json")})
    store.close()
    with pytest.raises(UserError, match=r"lacks (count|grad_norms|losses|mu)"):
        warm_adam.from_ours(str(tmp_path / "400"), LAPTOP)


def test_a_damaged_source_makes_no_checkpoint(tmp_path):
    """A byte that changed on the disk since stage 1 is found before the new step has its name."""
    save_stage1(tmp_path, LAPTOP, 400, 399)
    path = tmp_path / "stage1_train" / "checkpoints" / "400"
    found = warm_adam.from_ours(str(path), LAPTOP)
    sums = dict(found.checksums)
    sums["mu/lm_head/weight"] ^= 1
    with pytest.raises(UserError, match="mu/lm_head/weight is not what was saved"):
        write_step(str(tmp_path / "out"), 0, warm_adam.warm_state(found, LAPTOP.stage2), {}, sums)
    assert CheckpointStore(str(tmp_path / "out")).latest_good() is None


def test_a_killed_job_goes_on(tmp_path, capsys):
    """The checkpoint was whole but the result was not written yet."""
    save_stage1(tmp_path, LAPTOP, 400, 399)
    arguments = ["--recipe", "laptop", "--run-root", str(tmp_path)]
    assert main(job.JOB, arguments) == OK
    (tmp_path / "warm_adam" / "result.json").unlink()
    before = OrbaxStep(str(tmp_path / "warm_adam" / "checkpoints" / "0")).meta
    assert main(job.JOB, arguments) == OK
    assert "is whole already" in capsys.readouterr().out
    assert OrbaxStep(str(tmp_path / "warm_adam" / "checkpoints" / "0")).meta == before


def test_train_state_fields_are_the_table():
    """A new field of the state has to be given a rule here."""
    assert TrainState._fields == ("params", "opt", "step")
    fields = ("count", "mu", "nu", "losses", "grad_norms", "seen")
    assert SkipStepAdamWState._fields == fields
