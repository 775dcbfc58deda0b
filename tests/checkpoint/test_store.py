import json
import logging
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from processes import run_python
from states import state

from olmo_core_jax.checkpoint.checksums import array_checksum, checksums
from olmo_core_jax.checkpoint.store import CheckpointStore, Damaged
from olmo_core_jax.errors import CRASH, Diverged, JobError, UserError

TOKENS = 5_929_965_715_456  # of the published run's last update; an int32 wraps at update 512


def saved(directory, *steps: int, **options) -> CheckpointStore:
    store = CheckpointStore(str(directory), **options)
    for step in steps:
        assert store.save(step, state(step), {"tokens_seen": TOKENS})
    store.wait()
    return store


def same(a, b) -> bool:
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b)
    )


def array_file(directory, step: int) -> Path:
    """The file that holds the bulk of a step's arrays."""
    files = [p for p in Path(directory, str(step), "state").rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(bytes(data))


def test_round_trip(tmp_path):
    store = saved(tmp_path, 7)
    restored, meta = store.restore(7, state())
    assert same(restored, state(7))
    assert meta["tokens_seen"] == TOKENS and meta["step"] == 7
    params, _ = store.restore_params(7, state()["params"])
    assert same(params, state(7)["params"])


def test_nothing_there(tmp_path):
    store = CheckpointStore(str(tmp_path / "none"))
    assert store.latest_good() is None and store.problem(3) == "it does not exist"
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="none/3: it does not exist"):
        store.restore(3, state())


def test_half_steps_are_skipped_kept_and_do_not_block(tmp_path, caplog):
    saved(tmp_path, 100, 200).close()
    array_file(tmp_path, 200).unlink()
    (tmp_path / "300.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "300.orbax-checkpoint-tmp" / "state" / "part").write_text("half")
    (tmp_path / "400").mkdir()
    (tmp_path / "notes").write_text("not a step")
    store = CheckpointStore(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert store.latest_good() == 100
    text = caplog.text
    assert "200 skipped: state/" in text and "is missing" in text
    assert "300.orbax-checkpoint-tmp skipped: it was never committed" in text
    assert "400 skipped: it is incomplete or not ours" in text
    for step in (200, 300, 400):
        assert store.save(step, state(step), {})
    store.close()
    assert CheckpointStore(str(tmp_path)).latest_good() == 400
    names = os.listdir(tmp_path)
    assert any(n.startswith("200.damaged-") for n in names)
    (half,) = [n for n in names if n.startswith("300.incomplete-")]
    assert (tmp_path / half / "state" / "part").read_text() == "half"


@pytest.mark.parametrize("harm", ["truncate", "grow", "meta", "rename", "format"])
def test_other_damage_is_seen_without_reading_arrays(tmp_path, harm):
    saved(tmp_path, 1, 2).close()
    meta = tmp_path / "2" / "meta" / "metadata"
    if harm == "truncate":
        os.truncate(array_file(tmp_path, 2), 100)
    elif harm == "grow":
        with open(array_file(tmp_path, 2), "ab") as f:
            f.write(b"x")
    elif harm == "meta":
        meta.write_text(meta.read_text()[:20])
    elif harm == "rename":
        shutil.move(tmp_path / "2", tmp_path / "9")
    else:
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 99}))
    assert CheckpointStore(str(tmp_path)).latest_good() == 1


@pytest.mark.parametrize("file", ["metadata", "files"])
@pytest.mark.parametrize("content", ["[]", "[1]", "{}", "null", '{"format": 1, "step": 2}', None])
def test_metadata_that_is_none_is_passed_over(tmp_path, caplog, file, content):
    """None: a folder in the file's place."""
    saved(tmp_path, 1, 2).close()
    path = tmp_path / "2" / "meta" / file
    path.unlink()
    path.mkdir() if content is None else path.write_text(content)
    assert CheckpointStore(str(tmp_path)).latest_good() == 1
    assert re.search(r"/2 skipped: (its (metadata|format)|state/)", caplog.text)


def test_a_flipped_bit_is_found_and_the_step_before_is_used(tmp_path, caplog):
    saved(tmp_path, 1, 2).close()
    flip_a_bit(array_file(tmp_path, 2))
    store = CheckpointStore(str(tmp_path))
    assert store.latest_good() == 2  # sizes cannot tell
    with pytest.raises(Damaged, match="params/layer_"):
        store.restore(2, state())
    restored, meta = store.restore_latest(state(), lambda step, meta: None)
    assert meta["step"] == 1 and same(restored, state(1))
    assert "not what was saved" in caplog.text
    assert store.save(2, state(2), {}) and store.close() is None
    assert CheckpointStore(str(tmp_path)).restore_latest(state(), lambda *_: None)[1]["step"] == 2


def test_checksum_sees_every_bit_and_place():
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    base = array_checksum(x)
    assert checksums({"x": jnp.asarray(x)}) == {"x": base}
    for i in range(x.size):
        y = x.copy()
        y.reshape(-1).view(np.uint32)[i] ^= 1 << (i % 32)
        assert array_checksum(y) != base
    assert array_checksum(x[:, ::-1]) != base
    ones = np.ones(4096, np.float32)
    assert len({array_checksum(v) for v in (ones, 0 * ones, -ones, ones[:2048])}) == 4
    bf16 = jnp.asarray(x, jnp.bfloat16)
    assert checksums({"x": bf16})["x"] == array_checksum(np.asarray(bf16))


@pytest.mark.parametrize("there, wanted", [(3, 2), (2, 3)])
def test_another_structure_is_refused_by_name(tmp_path, there, wanted):
    store = CheckpointStore(str(tmp_path))
    store.save(1, state(1, there), {})
    store.wait()
    verb = "is not expected" if there > wanted else "is missing"
    with pytest.raises(UserError, match=f"params/layer_2 {verb}"):
        store.restore(1, state(1, wanted))
    with pytest.raises(UserError, match=f"params/layer_2 {verb}"):
        store.restore_params(1, state(1, wanted)["params"])


def test_another_shape_or_dtype_is_refused(tmp_path):
    store = saved(tmp_path, 1)
    like = state()
    like["params"]["gain"] = jnp.ones(32)
    like["step"] = jnp.float32(0)
    with pytest.raises(UserError) as error:
        store.restore(1, like)
    assert "params/gain is float32[64], expected float32[32]" in str(error.value)
    assert "step is int32[], expected float32[]" in str(error.value)


def test_retention_keeps_newest_landmarks_and_whatever_is_damaged(tmp_path):
    store = saved(tmp_path, *range(1, 6), keep=2, landmarks=(2,))
    assert store.good_steps() == [2, 4, 5]
    array_file(tmp_path, 5).unlink()
    store.save(6, state(6), {})
    store.wait()
    # 5 is damaged: it does not count, so 4 stays; and it is not deleted.
    assert store.good_steps() == [2, 4, 6] and (tmp_path / "5").exists()


def test_the_last_good_step_outlives_a_damaged_newer_one(tmp_path):
    store = saved(tmp_path, 1, 2, keep=1)
    array_file(tmp_path, 2).unlink()
    for step in (3, 4):
        store.save(step, state(step), {})
        store.wait()
        array_file(tmp_path, step).unlink()
        assert store.latest_good() == 1


def test_saving_a_good_step_again_changes_nothing(tmp_path):
    saved(tmp_path, 1).close()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    store = CheckpointStore(str(tmp_path))
    assert not store.save(1, state(99), {})
    store.close()
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_failed_save_surfaces_at_the_next_one_at_the_latest(tmp_path, monkeypatch):
    store = saved(tmp_path, 10)
    monkeypatch.setattr(
        "olmo_core_jax.checkpoint.layout.MetaHandler.finalize",
        lambda self, directory: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    store.save(20, state(20), {})
    with pytest.raises(JobError, match=r"No space left.*last good checkpoint: .*/10$") as error:
        store.save(30, state(30), {})
    assert error.value.exit_code == CRASH
    assert CheckpointStore(str(tmp_path)).latest_good() == 10


def test_an_unwritable_directory_is_an_error_at_once(tmp_path):
    code = """
import os, shutil, sys
from pathlib import Path
from states import state
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import JobError
folder = Path(sys.argv[1])
store = CheckpointStore(str(folder))
shutil.move(folder, folder.with_name("kept"))
folder.write_text("a file where the folder was")
try:
    store.save(20, state(20), {})
    store.wait()
except JobError as e:
    print("refused:", e, flush=True)
    os._exit(0)  # threads of Orbax would wait for minutes
"""
    saved(tmp_path / "c", 10).close()
    assert "refused: a checkpoint under" in run_python(code, str(tmp_path / "c"), timeout=60)
    assert CheckpointStore(str(tmp_path / "kept")).latest_good() == 10


def test_exit_right_after_the_last_save_leaves_it_whole(tmp_path):
    code = """
import sys
from states import state
from olmo_core_jax.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(5, state(5), {})
store.close()
"""
    run_python(code, str(tmp_path))
    restored, _ = CheckpointStore(str(tmp_path)).restore(5, state())
    assert same(restored, state(5))


def test_reshard_8_4_2_1_without_warnings(tmp_path):
    code = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from olmo_core_jax.checkpoint.store import CheckpointStore
n = int(sys.argv[2])
mesh = Mesh(np.array(jax.devices()[:n]), "x")
value = np.arange(64 * 24, dtype=np.float32).reshape(64, 24)
store = CheckpointStore(sys.argv[1])
sharding = NamedSharding(mesh, P(None, "x"))
if n == 8:
    store.save(1, {"a": jax.device_put(value, sharding)}, {})
    store.close()
else:
    like = {"a": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}
    state, _ = store.restore(1, like)
    assert state["a"].sharding == sharding and (np.asarray(state["a"]) == value).all()
"""
    for n in (8, 4, 2, 1):
        out = run_python(code, str(tmp_path), str(n), devices=8)
        assert "sharding" not in out.lower() and "warn" not in out.lower(), out


GOLDEN = Path(__file__).parent / "golden"


def golden_state() -> dict:
    """What the stored checkpoint holds, by formula."""
    weight = jnp.arange(12, dtype=jnp.float32).reshape(3, 4) / 7
    return {
        "params": {"embed": {"weight": weight}, "gain": jnp.ones(4) * 1.5},
        "mu": {"embed": {"weight": -weight}, "gain": jnp.zeros(4)},
        "half": jnp.linspace(0, 1, 5).astype(jnp.bfloat16),
        "count": jnp.int32(5),
    }


def test_a_stored_checkpoint_still_loads(tmp_path):
    """Written with orbax-checkpoint 0.12.8 on jax 0.10.2; an upgrade must not lose anybody's run."""
    shutil.copytree(GOLDEN, tmp_path / "c")
    restored, meta = CheckpointStore(str(tmp_path / "c")).restore(4, golden_state())
    assert same(restored, golden_state())
    assert meta["tokens_seen"] == TOKENS
    assert meta["checksums"] == checksums(golden_state())


def test_nothing_begins_anew_where_no_step_can_be_read(tmp_path):
    """Damage and a storage that is away look alike, and a run that begins anew throws its updates away."""
    saved(tmp_path, 1, 2).close()
    for step in (1, 2):
        flip_a_bit(array_file(tmp_path, step))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(JobError, match=r"no checkpoint .* can be read back \(2: .*move the folder"):
        CheckpointStore(str(tmp_path)).restore_latest(state(), lambda *_: None)
    assert sorted(os.listdir(tmp_path)) == before
    assert CheckpointStore(str(tmp_path / "new")).restore_latest(state(), lambda *_: None) is None


@pytest.mark.parametrize(
    "error",
    [MemoryError("host"), OSError("away"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")],
)
def test_what_says_nothing_about_the_step_is_no_damage(tmp_path, monkeypatch, error):
    saved(tmp_path, 1, 2).close()

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
    with pytest.raises(type(error)):
        CheckpointStore(str(tmp_path)).restore_latest(state(), lambda *_: None)


def test_a_damaged_step_is_named_and_no_crash(tmp_path):
    saved(tmp_path, 1).close()
    flip_a_bit(array_file(tmp_path, 1))
    with pytest.raises(UserError, match=r"checkpoint .*/1: .*params/layer_"):
        CheckpointStore(str(tmp_path)).restore(1, state())


@pytest.mark.parametrize("where", ["params", "mu", "nu"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_poisoned_state_is_not_saved_and_pushes_nothing_out(tmp_path, where, value):
    """Such a step would be read back whole, be the newest, and be gone on from for ever."""
    store = saved(tmp_path, 1, 2, keep=2)
    bad = state(3) | {"mu": {"gain": jnp.ones(4)}, "nu": {"gain": jnp.ones(4)}}
    bad[where]["gain"] = bad[where]["gain"].at[1].set(value)
    with pytest.raises(Diverged, match=rf"{where}/gain hold.* last good checkpoint: .*/2$"):
        store.save(3, bad, {})
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_poisoned_step_of_old_is_not_gone_on_from(tmp_path, monkeypatch, caplog):
    bad = state(2)
    bad["params"]["gain"] = bad["params"]["gain"].at[0].set(np.nan)
    store = saved(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_require_sound", lambda *_: None)
        store.save(2, bad, {"tokens_seen": TOKENS})
        store.close()
    _, meta = CheckpointStore(str(tmp_path)).restore_latest(state(), lambda *_: None)
    assert meta["step"] == 1 and "params/gain holds values that are not finite" in caplog.text


def test_a_step_that_replaces_a_damaged_one_counts_as_good(tmp_path):
    saved(tmp_path, 1, 2).close()
    flip_a_bit(array_file(tmp_path, 2))
    store = CheckpointStore(str(tmp_path))
    store.restore_latest(state(), lambda *_: None)
    assert store.save(2, state(2), {})
    store.wait()
    assert store.latest_good() == 2 and not store.save(2, state(2), {})
    store.close()
    assert sum("damaged" in name for name in os.listdir(tmp_path)) == 1


def test_a_file_where_checkpoints_go_is_named_before_anything_runs(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints is not a folder"):
        CheckpointStore(str(tmp_path / "checkpoints"))
