import contextlib
import dataclasses
import json
import logging
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import yaml

from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import Diverged, Preempted, UserError
from olmo_core_jax.jobs import train as jobs_train
from olmo_core_jax.train.run_log import MetricsWriter

UPDATES = 30


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(recipe, run root) of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("unbroken")
    recipe = tiny.write_recipe(folder / "recipe", UPDATES)
    tiny.train(tiny.context(recipe, folder / "run"))
    return recipe, folder / "run"


def test_stopped_after_every_single_update(unbroken, tmp_path):
    recipe, whole = unbroken
    for _ in range(UPDATES):
        tiny.train(tiny.context(recipe, tmp_path), stop_after=1)
    tiny.assert_same_run(whole, tmp_path, UPDATES)
    assert {row["attempt"] for row in tiny.rows(tmp_path)} == set(range(1, UPDATES + 1))


@pytest.mark.parametrize("reported", [9, 10])
def test_a_stop_that_comes_while_a_checkpoint_is_due_is_that_checkpoint(
    unbroken, tmp_path, monkeypatch, reported
):
    """Told while the host waits for what update 9 or 10 reports: nothing is made or saved beyond 10."""
    recipe, whole = unbroken
    at = tiny.context(recipe, tmp_path)
    write = MetricsWriter.write

    def told(self, step, values):
        write(self, step, values)
        if step == reported:
            at.stop.request()

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", told)
        with contextlib.ExitStack() as open_things:
            trainer = jobs_train._trainer(at, open_things)
            with pytest.raises(Preempted, match="checkpoint 10 is saved"):
                trainer.run()
    assert [row["step"] for row in tiny.rows(tmp_path)] == [*range(1, 11)]
    assert CheckpointStore(str(tmp_path / "stage1_train/checkpoints")).good_steps() == [10]
    tiny.train(tiny.context(recipe, tmp_path))
    tiny.assert_same_run(whole, tmp_path, UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", range(1, UPDATES))
def test_stopped_once_anywhere(unbroken, tmp_path, stop_after):
    recipe, whole = unbroken
    tiny.train(tiny.context(recipe, tmp_path), stop_after=stop_after)
    tiny.train(tiny.context(recipe, tmp_path))
    tiny.assert_same_run(whole, tmp_path, UPDATES)


def test_lost_updates_are_repeated_exactly(unbroken, tmp_path):
    """The newest checkpoint is lost: updates 11 to 20 are made, and logged, a second time."""
    recipe, whole = unbroken
    tiny.train(tiny.context(recipe, tmp_path), stop_after=20)
    files = (tmp_path / "stage1_train/checkpoints/20/state").rglob("*")
    max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size).unlink()
    tiny.train(tiny.context(recipe, tmp_path))
    tiny.assert_same_run(whole, tmp_path, UPDATES)
    steps = [row["step"] for row in tiny.rows(tmp_path)]
    assert steps == [*range(1, 21), *range(11, 31)]
    by_attempt = {(r["step"], r["attempt"]): r["train/CE loss"] for r in tiny.rows(tmp_path)}
    for step in range(11, 21):
        assert by_attempt[step, 1] - by_attempt[step, 2] == 0
    names = [p.name for p in (tmp_path / "stage1_train/checkpoints").iterdir()]
    assert any(name.startswith("20.damaged-") for name in names)


def test_label_is_updates_schedule_and_batches(unbroken):
    _, whole = unbroken
    store = CheckpointStore(str(whole / "stage1_train/checkpoints"))
    assert store.good_steps() == [20, 30]
    for step in (20, 30):
        meta, arrays = store.meta(step), tiny.final_arrays(whole, step)
        assert int(arrays["step"]) == meta["schedule_count"] == meta["step"] == step
        assert meta["data"]["next_step"] - 1 == meta["data"]["iterator"] == step
        # Adam counts from 1 in this recipe, and not the skipped updates.
        assert int(arrays["count"]) == meta["adam_count"] == 1 + step - meta["skipped"]
        assert meta["tokens_seen"] == step * tiny.SEQUENCE * tiny.BATCH


def test_a_finished_stage_changes_nothing(unbroken, caplog):
    recipe, whole = unbroken
    before = {p: p.stat().st_mtime_ns for p in (whole / "stage1_train").rglob("*") if p.is_file()}
    with caplog.at_level(logging.INFO):
        tiny.train(tiny.context(recipe, whole))
    assert "nothing left to do: 30 updates" in caplog.text
    after = {p: p.stat().st_mtime_ns for p in (whole / "stage1_train").rglob("*") if p.is_file()}
    assert after == before


def test_spike_after_a_resume_is_skipped_as_in_an_unbroken_run(tmp_path):
    """The guard's window comes back with the checkpoint."""
    skip = {"window": 8, "sigma": 3.0}
    recipe = tiny.write_recipe(tmp_path / "recipe", 20, optimizer={"skip": skip})

    def spike(step_fn, state, batch, rate):
        if int(state.step) + 1 == 13:
            batch = batch._replace(tokens=batch.tokens * 0 + tiny.PAD)
        return step_fn(state, batch, rate)

    tiny.train(tiny.context(recipe, tmp_path / "a"), around=spike)
    tiny.train(tiny.context(recipe, tmp_path / "b"), stop_after=12)
    tiny.train(tiny.context(recipe, tmp_path / "b"), around=spike)
    tiny.assert_same_run(tmp_path / "a", tmp_path / "b", 20)
    assert tiny.curve(tmp_path / "b")[13]["optim/step skipped"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["stage1"]["schedule"].update(peak=1e-3),
        lambda r: r["stage1"].update(max_tokens=r["stage1"]["max_tokens"] * 2),
        lambda r: r["model"].update(mlp_hidden=48),
        lambda r: r["stage1"]["data"].update(seed=6),
    ],
    ids=["peak", "length", "model", "seed"],
)
def test_another_recipe_is_refused(unbroken, tmp_path, change):
    recipe, whole = unbroken
    changed = yaml.safe_load(Path(recipe).read_text())
    change(changed)
    other = Path(recipe).with_name("other.yaml")
    other.write_text(yaml.safe_dump(changed))
    at = tiny.context(str(other), tmp_path / "index_only")
    at = dataclasses.replace(at, folder=str(whole / "stage1_train"))
    with pytest.raises(UserError, match=r"is of another (recipe|model): .* there, .* here"):
        tiny.train(at)


def test_other_data_is_refused_unless_accepted(unbroken, tmp_path, caplog):
    """The same recipe text, but another file behind it."""
    recipe = tiny.write_recipe(tmp_path / "recipe", UPDATES)
    tiny.train(tiny.context(recipe, tmp_path / "run"), stop_after=3)
    file = tmp_path / "recipe" / "b.npy"
    tokens = np.fromfile(file, "<u2")
    tokens[:-64].tofile(file)
    for old in (tmp_path / "run/build_index/stage1").iterdir():
        old.unlink()
    tiny.build_index(tmp_path / "run", tiny.context(recipe, tmp_path / "run").recipe)
    at = tiny.context(recipe, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"trained on other data .fingerprint \w+ in the .*, \w+ now"
    ):
        tiny.train(at)
    at.args.accept_other_data = True
    with caplog.at_level(logging.WARNING):
        tiny.train(at, stop_after=1)
    assert "data order not reproducible: fingerprint" in caplog.text
    tiny.train(
        tiny.context(recipe, tmp_path / "run"), stop_after=1
    )  # from here on it is the run's data
    folder = tmp_path / "run/stage1_train"
    metas = [CheckpointStore(str(folder / "checkpoints")).meta(step) for step in (4, 5)]
    (note,) = json.loads((folder / "attempts/00002.json").read_text())["data_notes"]
    assert all(m["data_notes"] == [note] for m in metas)
    assert metas[0]["data"]["fingerprint"] in note
    assert "data_notes" not in json.loads((folder / "attempts/00001.json").read_text())


def test_nan_updates_in_a_row_end_the_run(tmp_path):
    recipe = tiny.write_recipe(tmp_path / "recipe", UPDATES, every=5)
    with pytest.raises(Diverged, match=r"updates 8 to 12 .* last good checkpoint: .*/10$"):
        train_with_nan(tiny.context(recipe, tmp_path / "run"), range(8, 100))
    assert [row["step"] for row in tiny.rows(tmp_path / "run")] == [*range(1, 13)]


def test_a_few_nan_updates_leave_no_trace_in_the_state(tmp_path):
    recipe = tiny.write_recipe(tmp_path / "recipe", 12)
    train_with_nan(tiny.context(recipe, tmp_path / "run"), range(5, 9))
    arrays = tiny.final_arrays(tmp_path / "run", 12)
    assert all(np.isfinite(x).all() for x in arrays.values())
    curve = tiny.curve(tmp_path / "run")
    skipped = [step for step, row in curve.items() if row["optim/step skipped"]]
    assert skipped[:4] == [5, 6, 7, 8] and np.isnan(curve[5]["train/CE loss"])
    assert int(arrays["count"]) == 1 + 12 - len(skipped)


def train_with_nan(at, steps):
    """Trains with one gain NaN while these updates are computed: so are loss and gradients."""

    def harmed(step_fn, state, batch, rate):
        if int(state.step) + 1 not in steps:
            return step_fn(state, batch, rate)
        keep = jax.tree.map(lambda x: x.copy(), state.params)
        gain = {"weight": state.params["final_norm"]["weight"] * np.nan}
        bad = state._replace(params=state.params | {"final_norm": gain})
        new, metrics = step_fn(bad, batch, rate)
        return new._replace(params=keep), metrics

    tiny.train(at, around=harmed)


def test_one_compile_no_donation_warning_and_constant_dtypes(tmp_path):
    recipe = tiny.write_recipe(tmp_path / "recipe", 10)
    seen = []

    def watched(step_fn, state, batch, rate):
        new, metrics = step_fn(state, batch, rate)
        dtypes = [x.dtype for x in jax.tree.leaves(new)]
        seen.append((step_fn._cache_size(), dtypes, [x.sharding for x in jax.tree.leaves(new)]))
        return new, metrics

    at = tiny.context(recipe, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = tiny.train(at, around=watched)
    assert [size for size, _, _ in seen] == [1] * 10
    assert all(entry[1:] == seen[0][1:] for entry in seen)
    params, opt = trainer.state.params, trainer.state.opt
    for tree in (params, opt.mu, opt.nu):
        assert {x.dtype for x in jax.tree.leaves(tree)} == {np.dtype("float32")}


def test_masked_instances_are_logged_as_the_devices_saw_them(tmp_path):
    """A process knows only the rows that its loader gave: here two of eight are masked behind its back."""
    recipe = tiny.write_recipe(tmp_path / "recipe", 6)
    raw = yaml.safe_load(Path(recipe).read_text())
    raw["stage1"]["data"]["repetition_filter"] = {"min_period": 1, "max_period": 2, "max_count": 30}
    Path(recipe).write_text(yaml.safe_dump(raw))

    def masked(step_fn, state, batch, rate):
        mask = batch.instance_mask & (np.arange(tiny.BATCH) > 1)
        return step_fn(state, batch._replace(instance_mask=mask), rate)

    tiny.train(tiny.context(recipe, tmp_path / "run"), around=masked)
    assert [row["train/masked instances (%)"] for row in tiny.rows(tmp_path / "run")] == [0.25] * 6


def test_learning_rate_list_is_the_schedule(unbroken):
    from olmo_core_jax import recipes
    from olmo_core_jax.optim.schedules import learning_rate

    recipe, whole = unbroken
    stage = recipes.load_recipe(recipe).stage1
    logged = [row["optim/LR (group 0)"] for row in tiny.rows(whole)]
    assert logged == [learning_rate(stage, n) for n in range(1, UPDATES + 1)]


def test_wrong_counters_are_never_saved(tmp_path):
    """A loader that is one batch ahead of the state is found out before a checkpoint says so."""
    recipe = tiny.write_recipe(tmp_path / "recipe", 10)

    def shifted(step_fn, state, batch, rate):
        new, metrics = step_fn(state, batch, rate)
        return new._replace(step=new.step + 1), metrics

    with pytest.raises(RuntimeError, match="checkpoint 10: 20 updates made, 10 batches given"):
        tiny.train(tiny.context(recipe, tmp_path / "run"), around=shifted)
    assert CheckpointStore(str(tmp_path / "run/stage1_train/checkpoints")).latest_good() is None
