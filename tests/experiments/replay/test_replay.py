"""Replay: the reference's own stretch is the same run here, and what is not the same run is told."""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from olmo_core_jax.checkpoint.formats.olmo_core import open_native
from olmo_core_jax.compare.curves import read_csv
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.errors import OK, USER_ERROR, UserError
from olmo_core_jax.experiments.replay import comparison, job, states
from olmo_core_jax.experiments.replay.card import window_table
from olmo_core_jax.experiments.replay.plan import (
    Window,
    all_windows,
    describe_windows,
    parse_windows,
    plan_windows,
)
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.jobs.common import main
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.plan import Assumptions
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.results import read_result
from olmo_core_jax.train import mesh, step

LAPTOP = load_recipe("laptop")
STAGE = LAPTOP.stage1
NATIVE = STAGE.reference.native
CURVE = read_csv(STAGE.reference.curve)
LAST = max(NATIVE)
FIRST = min(NATIVE)
WINDOW = Window("stage1", FIRST, LAST - FIRST)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """(mesh, compiled step, index, order) of the laptop's stage 1."""
    folder = tmp_path_factory.mktemp("index")
    index, order = build_stage_data(str(folder), LAPTOP, "stage1")
    grid = mesh.make_mesh(Topology().mesh)
    update = step.make_train_step(LAPTOP.model, STAGE, LAPTOP.precision, Topology(), grid)
    return grid, update, index, order


def start_state(grid):
    native = open_native(NATIVE[FIRST], LAPTOP.model)
    history = states.skip_history(CURVE, FIRST, STAGE)
    return states.native_state(native, grid, STAGE, LAPTOP.precision, history)


def take(machine, state, updates: int, shift: int = 0) -> tuple:
    """(state, gaps) after some updates; shift: of the batches, as an off-by-one loader would."""
    grid, update, index, order = machine
    rows, gaps = np.arange(STAGE.batch_instances), []
    last = FIRST + updates
    with closing(
        Loader(index, order, first_step=FIRST + 1 + shift, last_step=last + shift)
    ) as loader:
        for n, (_, _, batch) in enumerate(loader, FIRST + 1):
            whole = mesh.global_batch(grid, STAGE.batch_instances, rows, batch)
            state, metrics = update(state, whole, np.float32(learning_rate(STAGE, n)))
            gaps.append(comparison.compare_update(n, STAGE, metrics, CURVE[n]))
    return state, gaps


def verdict(machine, state, gaps) -> comparison.Replayed:
    end = open_native(NATIVE[FIRST + len(gaps)], LAPTOP.model)
    gap = states.compare_state(state, end, machine[0], LAPTOP.precision)
    return comparison.Replayed(WINDOW, gaps, gap, "float32")


def test_the_references_own_stretch(machine):
    """Weights, moments, Adam step, batches and rates from the reference: 20 updates, one skipped."""
    done = verdict(machine, *take(machine, start_state(machine[0]), WINDOW.updates))
    assert done.failures() == []
    figures = done.figures()
    assert figures["updates"] == figures["updates compared"] == 20
    assert figures["CE difference, largest"] < 1e-5
    assert figures["gradient norm, largest relative difference"] < 1e-3
    assert figures["LR, largest relative difference"] == 0
    assert figures["params at the end, relative difference"] < 1e-5
    assert figures["Adam count"] == figures["Adam count (reference)"]
    assert figures["skipped here"] == figures["skipped there"] == 1
    # torch's own fp32 norm is no nearer to the exact one than ours
    theirs = max(
        abs(
            CURVE[u.step]["optim/total grad norm"] / CURVE[u.step]["optim/total grad norm (fp64)"]
            - 1
        )
        for u in done.updates
    )
    assert figures["gradient norm against fp64, largest relative difference"] < max(2e-6, theirs)


def test_a_batch_off_by_one_is_told(machine):
    _, gaps = take(machine, start_state(machine[0]), 2, shift=1)
    assert gaps[0].ce_gap > 1e-3


def test_an_adam_count_off_by_one_is_told(machine):
    """At update 380 it changes a step by half a per cent of nothing: only the count itself shows it."""
    state = start_state(machine[0])
    state = state._replace(opt=state.opt._replace(count=state.opt.count + 1))
    done = verdict(machine, *take(machine, state, WINDOW.updates))
    assert any(f.startswith("Adam count") for f in done.failures())


def test_lost_moments_are_told(machine):
    state = start_state(machine[0])
    head = {"weight": jnp.zeros_like(state.opt.mu["lm_head"]["weight"])}
    state = state._replace(opt=state.opt._replace(mu=state.opt.mu | {"lm_head": head}))
    _, gaps = take(machine, state, 3)
    assert gaps[0].ce_gap < 1e-5  # the first loss is before the first update
    assert gaps[2].ce_gap > 1e-5


def test_without_the_history_the_skip_is_missed(machine):
    state = start_state(machine[0])
    forgotten = state.opt._replace(seen=jnp.zeros((), jnp.int32))
    _, gaps = take(machine, state._replace(opt=forgotten), WINDOW.updates)
    (skipped,) = [u.step for u in gaps if u.reference_skipped]
    assert [u.step for u in gaps if u.skipped] == []
    end = comparison.StateGap(
        1, 1, [comparison.TensorGap(part, "x", 0.0, 0.0) for part in comparison.PARTS]
    )
    failures = comparison.Replayed(WINDOW, gaps, end, "float32").failures()
    assert f"update {skipped}: skipped there only" in failures
    assert any(f.startswith(f"update {skipped + 2}: CE differs by") for f in failures)


def test_a_tensor_that_differs_is_named(machine):
    state = start_state(machine[0])
    state.params["cycles"]["layer_2"]["mlp"]["up"] *= 1.001
    native = open_native(NATIVE[FIRST], LAPTOP.model)
    gap = states.compare_state(state, native, machine[0], LAPTOP.precision)
    worst = gap.worst("params")
    assert worst.tensor == "cycles.layer_2.mlp.up"
    assert worst.norm == pytest.approx(1e-3, rel=1e-3)
    assert worst.value == pytest.approx(1e-3, rel=1e-3)
    assert gap.worst("mu").norm == gap.worst("nu").norm == 0
    changed = [(t.part, t.tensor) for t in gap.tensors if t.norm > 0]
    assert changed == [("params", "cycles.layer_2.mlp.up")]


def test_history_needs_the_log(machine):
    curve = {k: v for k, v in CURVE.items() if k != FIRST - 5}
    with pytest.raises(UserError, match=rf"no update {FIRST - 5}, on which skipping depends"):
        states.skip_history(curve, FIRST, STAGE)


def test_what_the_reference_does_not_have(machine):
    """As with a published run that logs few updates and keeps few checkpoints."""
    few = {k: v for k, v in CURVE.items() if k % 10 == 0}
    losses, norms, seen = states.skip_history(few, FIRST, STAGE, partial=True)
    assert seen == 0 and not losses.any() and not norms.any()
    gaps = [comparison.UpdateGap(FIRST + 10, 3.0, 3.0, 1.0, 1.0, 0.0, False, False, None)]
    done = comparison.Replayed(WINDOW, gaps, None, "float32")
    assert done.failures() == [] and done.figures()["updates compared"] == 1
    assert "Adam count" not in done.figures()
    with pytest.raises(UserError, match=f"no update {FIRST + 1} .--partial"):
        job._require_logged(WINDOW, few, partial=False)
    job._require_logged(WINDOW, few, partial=True)
    with pytest.raises(UserError, match=f"no update {FIRST + 1}"):
        job._require_logged(WINDOW, {}, partial=True)


def test_history_is_the_ring_of_an_unbroken_run():
    losses, norms, seen = states.skip_history(CURVE, FIRST, STAGE)
    window = STAGE.optimizer.skip.window
    assert seen == FIRST and len(losses) == len(norms) == window
    for update in (FIRST, FIRST - 1, FIRST - window + 1):
        assert losses[(update - 1) % window] == np.float32(CURVE[update]["train/CE loss"])
    short, _, seen = states.skip_history(CURVE, 5, STAGE)
    assert seen == 5 and np.count_nonzero(short) == 5


def test_windows():
    text = f"{FIRST}:{LAST - FIRST}, stage2/0:40"
    assert [str(w) for w in parse_windows(text, LAPTOP)] == [str(WINDOW), "stage2/0:40"]
    assert all_windows(LAPTOP) == [WINDOW]
    for bad, why in (
        ("", "no window to replay"),
        ("380", r"write \[STAGE/\]N:K"),
        ("stage3/1:2", "no training stage .stage3."),
        ("390:20", "has updates 1 to 400"),
        ("380:0", "has updates 1 to 400"),
    ):
        with pytest.raises(UserError, match=why):
            parse_windows(bad, LAPTOP)


def test_price_of_replaying_7b():
    recipe = load_recipe("olmo3_7b")
    (plan,) = plan_windows(recipe, [Window("stage1", 1000, 20)], Assumptions("v5p-256", price=4.2))
    assert plan.tokens == 20 * recipe.stage1.batch_tokens
    assert plan.share < 2e-5
    assert 150 < plan.read_gib < 170  # two states of 7.3 G parameters at 12 bytes
    assert plan.cost == pytest.approx(plan.chip_hours * 4.2)
    assert "native checkpoints to read" in describe_windows(recipe, [plan])


def test_window_without_a_checkpoint(tmp_path, capsys):
    arguments = ["--recipe", "laptop", "--run-root", str(tmp_path), "--window", f"{FIRST}:2"]
    assert main(job.JOB, arguments) == USER_ERROR
    assert f"names no native checkpoint of update {FIRST + 2}" in capsys.readouterr().out


@pytest.mark.slow
def test_job_and_flow(tmp_path):
    arguments = ["--recipe", "laptop", "--run-root", str(tmp_path), "--window", str(WINDOW)]
    assert main(job.JOB, arguments) == OK
    result = read_result(str(tmp_path), f"replay/{WINDOW.name}")
    assert result is not None and result.figures["passed"] == 1
    rows = (tmp_path / "replay" / WINDOW.name / "updates.csv").read_text().splitlines()
    assert len(rows) == 1 + WINDOW.updates
    tensors = (tmp_path / "replay" / WINDOW.name / "tensors.csv").read_text().splitlines()
    assert len(tensors) == 1 + 3 * len(leaves(LAPTOP.model))
    table = window_table({str(WINDOW): result.figures})
    assert "✓ pass" in table.markdown() and len(table.rows) == 1


@pytest.mark.slow
def test_flow_replays_and_fails_where_it_should(tmp_path):
    flow = Path(__file__).parents[3] / "flows" / "replay.py"
    out = subprocess.run(
        [sys.executable, str(flow), "run", "--windows", str(WINDOW)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path)},
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert "✓ pass" in out.stdout


def test_a_failed_window_fails_the_flow():
    from olmo_core_jax.launch.flow_entry import StageError, require_all_passed

    require_all_passed({"a": {"passed": 1.0}})
    with pytest.raises(StageError, match="not the same run: b"):
        require_all_passed({"a": {"passed": 1.0}, "b": {"passed": 0.0}})


def test_updates_are_json_and_csv_friendly(machine):
    _, gaps = take(machine, start_state(machine[0]), 1)
    assert json.dumps(dataclasses.asdict(gaps[0]))
    assert job._csv(gaps).decode().count("\n") == 2
