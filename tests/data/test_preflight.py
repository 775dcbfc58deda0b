"""Preflight: every way in which data can have changed since they were indexed."""

from pathlib import Path

import numpy as np
import pytest
from mixes import EOS, VOCAB, make_recipe

from olmo_core_jax.data.order import order_uri
from olmo_core_jax.data.preflight import preflight
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.errors import UserError


@pytest.fixture
def checked(make_mix, tmp_path):
    """(mix, a call of preflight) on large and small shards."""
    mix = make_mix(lengths=(20_000, 20_000, 333, 20_000))
    recipe = make_recipe(mix, updates=30)
    index, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    return mix, lambda: preflight(index, order, recipe.stage1, "stage1")


def test_unchanged_data_pass(checked):
    _, check = checked
    assert check() == {"files": 4, "instances": 3 * 625 + 10, "epochs": 1}


def test_all_missing_and_resized_shards_are_named(checked):
    mix, check = checked
    first, second, *_ = mix.files
    Path(first).unlink()
    Path(second).write_bytes(Path(second).read_bytes() + b"\0\0")
    with pytest.raises(UserError) as e:
        check()
    assert f"{first} is missing" in str(e.value)
    assert f"{second} has 40002 bytes, 40000 when it was indexed" in str(e.value)


def test_swapped_shards_of_equal_size(checked):
    mix, check = checked
    first, second, *_ = mix.files
    mix.files[first].tofile(second)
    mix.files[second].tofile(first)
    with pytest.raises(UserError) as e:
        check()
    assert "2 problem(s)" in str(e.value)
    assert all(
        f"{p} has other content than when it was indexed" in str(e.value) for p in (first, second)
    )


def test_a_damaged_order(checked, tmp_path):
    _, check = checked
    path = Path(order_uri(str(tmp_path / "index"), 1))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="bytes instead of"):
        check()


def test_too_little_data_says_how_many_epochs(make_mix, tmp_path):
    mix = make_mix()
    recipe = make_recipe(mix, updates=60)
    with pytest.raises(UserError) as e:
        build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    assert "enough for 26 updates of 4 in 1 epoch(s)" in str(e.value)
    assert "set stage1.epochs to 3" in str(e.value)
    assert not (tmp_path / "index").exists()
    enough = make_recipe(mix, updates=60, epochs=3)
    build_stage_data(str(tmp_path / "i3"), enough, "stage1")
    assert sorted(p.name for p in (tmp_path / "i3").glob("*.u32")) == [
        f"order_epoch{e}.u32" for e in (1, 2, 3)
    ]


def test_exactly_enough_data(make_mix, tmp_path):
    recipe = make_recipe(make_mix(), updates=26)
    build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    with pytest.raises(UserError, match="enough for 26 updates"):
        build_stage_data(str(tmp_path / "i2"), make_recipe(make_mix(), updates=27), "stage1")


def test_another_eos_than_the_datas(make_mix, tmp_path):
    mix = make_mix(lengths=(2000,))
    tokens = np.full(2000, EOS - 1, "<u2")
    tokens.tofile(next(iter(mix.files)))
    with pytest.raises(UserError, match=f"no EOS {EOS} in its first 2000 tokens"):
        build_stage_data(str(tmp_path / "index"), make_recipe(mix), "stage1")
    assert EOS < VOCAB
