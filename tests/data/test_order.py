"""AI2's order: reproducible, verified when it is read, a pure function of the step."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_core_jax.data import order as order_module
from olmo_core_jax.data.order import Order, Shuffle, build_order, order_uri
from olmo_core_jax.errors import UserError


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 instances, so that a small order has many."""
    monkeypatch.setattr(order_module, "BLOCK", 64)


def build(folder, instances=1003, seed=3, chunk=1, epochs=2, batch=8) -> Order:
    shuffle = Shuffle(instances, seed, chunk)
    for epoch in range(1, epochs + 1):
        build_order(str(folder), shuffle, epoch)
    return Order(str(folder), shuffle, batch)


def test_batches_are_rows_of_numpys_shuffle(tmp_path, small_blocks):
    order = build(tmp_path)
    for epoch in (1, 2):
        expected = np.arange(1003, dtype=np.uint32)
        np.random.Generator(np.random.PCG64(3 + epoch)).shuffle(expected)
        rows = expected[: 1003 // 8 * 8].reshape(-1, 8)
        steps = range((epoch - 1) * 125 + 1, epoch * 125 + 1)
        assert np.array_equal([order.batch(s) for s in steps], rows)
    assert order.locate(125) == (1, 124) and order.locate(126) == (2, 0)


@pytest.mark.parametrize("chunk", [2, 4, 5])
def test_chunks_stay_together(tmp_path, chunk):
    ids = Shuffle(1003, 3, chunk).compute(1)
    assert len(ids) == 1003 // chunk * chunk and len(np.unique(ids)) == len(ids)
    groups = ids.reshape(-1, chunk)
    assert (groups[:, 0] % chunk == 0).all()
    assert (np.diff(groups, axis=1) == 1).all()


def test_every_epoch_has_its_own_permutation(tmp_path):
    order = build(tmp_path, instances=1000, epochs=3)
    read = [order.epoch(e).read(0, 1000) for e in (1, 2, 3)]
    assert all(np.array_equal(np.sort(r), np.arange(1000)) for r in read)
    assert len({r.tobytes() for r in read}) == 3


def test_another_process_finds_the_same_order(tmp_path):
    order = build(tmp_path)
    program = (
        "from olmo_core_jax.data.order import Shuffle; import sys;"
        "sys.stdout.buffer.write(Shuffle(1003, 3).compute(2).tobytes())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert other == order.epoch(2).read(0, 1003).tobytes()


def test_the_stored_file_is_headerless_uint32(tmp_path):
    build(tmp_path)
    stored = np.fromfile(order_uri(str(tmp_path), 1), "<u4")
    assert np.array_equal(stored, Shuffle(1003, 3).compute(1))


def test_building_again_writes_nothing(tmp_path):
    build(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    build(tmp_path)
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def test_an_interrupted_build_is_done_again(tmp_path):
    build(tmp_path, epochs=1)
    uri = Path(order_uri(str(tmp_path), 1))
    whole = uri.read_bytes()
    uri.write_bytes(whole[:100])
    Path(f"{uri}.json").unlink()
    build(tmp_path, epochs=1)
    assert uri.read_bytes() == whole


def test_damage_is_told_and_only_where_it_is(tmp_path, small_blocks):
    order = build(tmp_path)
    with open(order_uri(str(tmp_path), 1), "r+b") as f:
        f.seek(4 * 200)
        f.write(b"\xff\xff\x00\x00")
    assert len(order.batch(1)) == 8
    with pytest.raises(UserError, match=r"damaged .block 3 has another digest"):
        order.batch(26)


@pytest.mark.parametrize("size", [0, 4000, 4016])
def test_another_size_is_refused(tmp_path, size):
    order = build(tmp_path)
    path = Path(order_uri(str(tmp_path), 1))
    path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
    with pytest.raises(UserError, match=f"has {size} bytes instead of 4012"):
        order.batch(1)


def test_another_order_is_refused(tmp_path):
    build(tmp_path)
    with pytest.raises(UserError, match=r"another order .seed 3 instead of 4"):
        Order(str(tmp_path), Shuffle(1003, 4), 8).batch(1)
    with pytest.raises(UserError, match="instances 1003 instead of 1002"):
        build_order(str(tmp_path), Shuffle(1002, 3), 1)


def test_a_description_that_is_none_is_refused(tmp_path):
    order = build(tmp_path)
    path = Path(order_uri(str(tmp_path), 1) + ".json")
    whole = json.loads(path.read_text())
    for bad in ("[]", "null", json.dumps({k: v for k, v in whole.items() if k != "length"})):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"order_epoch1\.u32.*move it"):
            order.batch(1)
    for changes in ({"block": 0}, {"digests": []}, {"digests": 5}, {"length": "x"}):
        path.write_text(json.dumps(whole | changes))
        with pytest.raises(UserError, match="does not describe an order"):
            order.batch(1)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"u32\.json cannot be read: Is a directory"):
        order.batch(1)


def test_a_missing_epoch_says_what_to_run(tmp_path):
    with pytest.raises(UserError, match="run build_index with enough epochs"):
        build(tmp_path, epochs=1).batch(126)


def test_less_than_a_batch_is_refused(tmp_path):
    with pytest.raises(UserError, match="7 instances, less than one batch of 8"):
        build(tmp_path, instances=7)


def test_steps_count_from_one(tmp_path):
    with pytest.raises(ValueError, match="count from 1"):
        build(tmp_path).batch(0)
