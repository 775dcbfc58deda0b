"""The loader: one stream, whatever workers, hosts and restarts there are; nothing left behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mixes import VOCAB, make_recipe

from olmo_core_jax import recipes
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.order import Order, Shuffle
from olmo_core_jax.data.repetition import RepetitionFilter
from olmo_core_jax.data.resume import check_state, data_state
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.errors import UserError


@pytest.fixture
def data(make_mix, tmp_path):
    """(index, order) of 26 updates an epoch, two epochs."""
    recipe = make_recipe(make_mix(), updates=50, epochs=2)
    return build_stage_data(str(tmp_path / "index"), recipe, "stage1")


def stream(index, order, **options) -> list[tuple[int, bytes, bytes, bytes]]:
    with Loader(index, order, **{"last_step": 40, **options}) as loader:
        return [
            (s, i.tobytes(), b.tokens.tobytes(), b.instance_mask.tobytes()) for s, i, b in loader
        ]


def test_ids_are_the_orders_and_tokens_the_files(data):
    index, order = data
    assert order.steps_per_epoch == 26
    with Loader(index, order, last_step=30) as loader:
        for step, ids, batch in loader:
            assert np.array_equal(ids, order.batch(step))
            for row, instance in enumerate(ids):
                place = index.place(int(instance))
                tokens = np.fromfile(place.uri, "<u2", 32, offset=place.offset)
                assert np.array_equal(batch.tokens[row], tokens)
    assert step == 30


SLOW = pytest.mark.slow


@pytest.mark.parametrize("workers", [pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW)])
def test_workers_do_not_change_the_stream(data, workers):
    assert stream(*data, workers=workers) == stream(*data)


def test_prefetching_does_not_change_the_stream(data):
    assert stream(*data, prefetch=0) == stream(*data, prefetch=16)


def test_resume_at_any_step(data):
    whole = stream(*data)
    for start in range(1, 41):
        assert stream(*data, first_step=start) == whole[start - 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "start"), [(2, 2), (1, 27), (3, 40)])
def test_resume_with_other_workers(data, workers, start):
    assert stream(*data, workers=workers, first_step=start) == stream(*data)[start - 1 :]


def test_hosts_divide_the_rows(data):
    index, order = data
    whole = stream(index, order)
    for hosts in (1, 2, 4):
        # Strided, as OLMo-core's ranks.
        parts = [stream(index, order, rows=np.arange(h, 4, hosts)) for h in range(hosts)]
        for update, (_, ids, tokens, _) in enumerate(whole):
            joined = np.empty((4,), np.uint32)
            joined_tokens = np.empty((4, 32), np.int32)
            for h in range(hosts):
                joined[h::hosts] = np.frombuffer(parts[h][update][1], np.uint32)
                joined_tokens[h::hosts] = np.frombuffer(parts[h][update][2], np.int32).reshape(
                    -1, 32
                )
            assert (joined.tobytes(), joined_tokens.tobytes()) == (ids, tokens)


def test_the_filter_masks_but_keeps(make_mix, tmp_path):
    mix = make_mix(lengths=(64 * 40,))
    path = next(iter(mix.files))
    tokens = mix.files[path].copy()
    tokens[64 * 7 : 64 * 8] = 5
    tokens.tofile(path)
    recipe = make_recipe(mix, updates=10, sequence_length=64)
    index, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    for rule in (None, RepetitionFilter()):
        with Loader(index, order, last_step=10, repetition=rule) as loader:
            for _, ids, batch in loader:
                assert batch.instance_mask.tolist() == [rule is None or i != 7 for i in ids]
                assert batch.tokens.shape == (4, 64)


class TestState:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_grains_count_agrees_with_the_step(self, data, workers):
        index, order = data
        with Loader(index, order, last_step=30, first_step=5, workers=workers) as loader:
            assert loader.state()["iterator"] == 4
            for step, _, _ in loader:
                state = loader.state()
                assert state["iterator"] == step
                assert state == data_state(index, order, step + 1) | {"iterator": step}
                assert check_state(state, index, order, step) == []
        assert data_state(index, order, 27)["epoch"] == 2
        assert data_state(index, order, 27)["batches_processed"] == 0

    def test_a_disagreeing_iterator_is_noticed(self, data):
        with Loader(*data, last_step=30) as loader:
            next(loader)
            loader.step += 1
            with pytest.raises(RuntimeError, match="stands at update 2, the loader at 3"):
                loader.state()
            with pytest.raises(RuntimeError, match="delivered update 2 instead of 3"):
                next(loader)

    def test_a_position_off_by_one_is_refused(self, data):
        state = data_state(*data, next_step=5)
        with pytest.raises(UserError, match="damaged"):
            check_state(state, *data, step=5)
        with pytest.raises(UserError, match="iterator 3"):
            check_state(state | {"iterator": 3}, *data, step=4)

    @pytest.mark.parametrize("field", ["seed", "chunk", "sequence_length", "batch_instances"])
    def test_another_cut_is_refused(self, data, field):
        state = data_state(*data, next_step=5)
        with pytest.raises(UserError, match=f"{field} {state[field] + 1} in the check"):
            check_state(state | {field: state[field] + 1}, *data, step=4)

    def test_another_mix_is_refused_unless_accepted(self, data, make_mix, tmp_path):
        state = data_state(*data, next_step=5)
        recipe = make_recipe(make_mix(name="other", seed=9), updates=50, epochs=2)
        other = build_stage_data(str(tmp_path / "other_index"), recipe, "stage1")
        with pytest.raises(UserError, match=r"trained on other data .fingerprint"):
            check_state(state, *other, step=4)
        notes = check_state(state, *other, step=4, accept_other_data=True)
        assert len(notes) == 1 and notes[0].startswith("data order not reproducible")
        assert data[0].fingerprint in notes[0] and other[0].fingerprint in notes[0]


def test_index_and_order_of_different_data(data, tmp_path):
    index, _ = data
    with pytest.raises(UserError, match="they are of different data"):
        Loader(index, Order(str(tmp_path), Shuffle(50, 7), 4), last_step=3)


@pytest.mark.parametrize("workers", [0, 2])
def test_faults_in_workers_are_told(data, workers):
    index, order = data
    path = index.place(0).uri
    tokens = np.fromfile(path, "<u2")
    tokens[:] = VOCAB + 1
    tokens.tofile(path)
    with (
        pytest.raises(UserError, match=f"{path} holds id {VOCAB + 1} at byte"),
        Loader(index, order, last_step=26, workers=workers) as loader,
    ):
        list(loader)


def test_all_parts_can_be_sent_to_workers(data):
    index, order = pickle.loads(pickle.dumps(data))
    assert index == data[0] and np.array_equal(order.batch(3), data[1].batch(3))


ENTRY = """
import sys, time, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
import process_children as p
from olmo_core_jax import recipes
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.stage_data import open_stage_data

def main(folder, recipe, last, stop):
    section = recipes.load_recipe(recipe).stage1
    index, order = open_stage_data(folder, section)
    total = jax.jit(lambda x: x.sum())
    total(jnp.arange(8)).block_until_ready()
    with Loader(index, order, last_step=last, workers=2) as loader:
        for step, ids, batch in loader:
            total(batch.tokens).block_until_ready()
            if stop < 0:
                open("first_batch", "x").close()
                time.sleep(60)
            if step == stop:
                raise SystemExit(f"stopped at {step} with {p.children()} children")
    print("children", p.children())

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""
CHILDREN = """
import os
from pathlib import Path
def children():
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{p}/cmdline").read_text() for p in found]
    return sum("resource_tracker" not in line for line in lines)  # Python's own, ends with us
"""


@pytest.fixture
def entry(make_mix, tmp_path):
    """Runs a plain script (no absl app) that trains with two workers in a process that uses JAX."""
    recipe = make_recipe(make_mix(), updates=200, epochs=8)
    (tmp_path / "recipe.yaml").write_text(recipes.dump_recipe(recipe))
    build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    (tmp_path / "entry.py").write_text(ENTRY)
    (tmp_path / "process_children.py").write_text(CHILDREN)

    def run(last: int, stop: int, wait: bool = True):
        command = [sys.executable, str(tmp_path / "entry.py"), str(tmp_path / "index")]
        command += [str(tmp_path / "recipe.yaml"), str(last), str(stop)]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        if not wait:
            return subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
        options = dict(capture_output=True, text=True, timeout=120)
        return subprocess.run(command, env=env, cwd=tmp_path, **options)

    return run


@pytest.mark.slow
def test_workers_beside_jax_from_a_plain_script(entry):
    for _ in range(3):
        done = entry(200, 0)
        assert done.returncode == 0, done.stderr
        assert "children 0" in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_leaving_early_leaves_no_process(entry, tmp_path):
    done = entry(200, 10)
    assert "stopped at 10 with" in done.stderr
    assert workers_of(tmp_path) == []


@pytest.mark.slow
def test_workers_end_with_a_killed_trainer_but_not_with_its_signals(entry, tmp_path):
    with entry(200, -1, wait=False) as trainer:
        try:
            assert eventually((tmp_path / "first_batch").exists, bool)
            workers = workers_of(tmp_path)
            assert len(workers) == 2
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
                os.kill(worker, signal.SIGINT)
            time.sleep(1)
            assert workers_of(tmp_path) == workers and trainer.poll() is None
        finally:
            trainer.kill()
    assert eventually(lambda: workers_of(tmp_path), lambda found: not found) == []


def workers_of(folder: Path) -> list[int]:
    """Living data workers that work in that folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            if "spawn_main" in command and (process / "cwd").resolve() == folder:
                found.append(int(process.name))
        except OSError:
            pass
    return sorted(found)


def eventually(look, good, seconds: float = 30):
    """What `look` sees once it is good, or at the end of the time."""
    end = time.monotonic() + seconds
    while not good(seen := look()) and time.monotonic() < end:
        time.sleep(0.2)
    return seen


LEAKS = """
import os, re, sys
from pathlib import Path
from olmo_core_jax import recipes
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.stage_data import open_stage_data

def resident():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) / 1024

if __name__ == "__main__":
    section = recipes.load_recipe(sys.argv[2]).stage1
    index, order = open_stage_data(sys.argv[1], section)
    before = set(os.listdir("/dev/shm"))
    with Loader(index, order, last_step=2200, workers=int(sys.argv[3])) as loader:
        for step, ids, batch in loader:
            if step == 200:
                warm = resident()
    grown = resident() - warm
    left = [n for n in set(os.listdir("/dev/shm")) - before if str(os.getpid()) in n or "psm" in n]
    print(grown, left)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_two_thousand_batches_leak_nothing(make_mix, tmp_path, workers):
    mix = make_mix(lengths=(2048 * 100,))
    recipe = make_recipe(mix, batch=8, updates=2200, epochs=200, sequence_length=2048)
    (tmp_path / "recipe.yaml").write_text(recipes.dump_recipe(recipe))
    (tmp_path / "leaks.py").write_text(LEAKS)
    build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    command = [sys.executable, "leaks.py", str(tmp_path / "index"), "recipe.yaml", str(workers)]
    out = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=300)
    grown, left = out.split(maxsplit=1)
    assert float(grown) < 50 and left.strip() == "[]"
