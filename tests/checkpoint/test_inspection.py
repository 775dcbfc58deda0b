"""olmo-jax checkpoint ls | show | diff | verify, and parity of two checkpoints of any kind."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import TOKENIZER, tiny, to_ours, write_hf

from olmo_core_jax.checkpoint import inspection
from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.errors import UserError
from olmo_core_jax.parity import checks

CFG = tiny()


@pytest.fixture
def pair(tmp_path):
    """(HF folder, our step) of the same weights."""
    source = write_hf(CFG, tmp_path / "hf")
    return source, to_ours(CFG, source, tmp_path / "run" / "convert_weights" / "checkpoints")


def test_ls_finds_every_step_and_says_what_is_wrong(tmp_path, pair):
    _, step = pair
    folder = Path(step).parent
    shutil.copytree(step, folder / "3")  # calls itself step 0
    shutil.copytree(step, folder / "5.orbax-checkpoint-tmp")
    for place in (tmp_path / "run", tmp_path / "run" / "convert_weights", folder):
        found = inspection.list_checkpoints(str(place))
        assert [s.step for s in found.steps] == [0, 3, 5]
        assert [bool(s.problem) for s in found.steps] == [False, True, True]
        assert "calls itself step 0" in str(found) and "never committed" in str(found)
    with pytest.raises(UserError, match="no checkpoint under"):
        inspection.list_checkpoints(str(tmp_path / "hf"))


def test_show(pair):
    source, step = pair
    for path, kind in ((source, "hf"), (step, "ours")):
        shown = inspection.show(str(path))
        assert shown.kind == kind and len(shown.arrays) == 47
        parameters = sum(x.size for x in factory.random_params(CFG).values())
        assert f"47 arrays, {4 * parameters:,} bytes" in str(shown)
    assert "n_layers 8" in str(inspection.show(step))


def test_diff_names_the_tensor(tmp_path, pair):
    source, step = pair
    assert inspection.diff(step, str(source)).same
    tensors = factory.random_params(CFG)
    tensors["model.layers.6.mlp.up_proj.weight"][3, 5] += 0.25
    other = write_hf(CFG, tmp_path / "other", tensors)
    found = inspection.diff(step, str(other))
    assert not found.same
    (wrong,) = [d for d in found.arrays if d.different]
    assert wrong.name == "params/cycles/layer_2/mlp/up"
    assert (wrong.different, wrong.tensor) == (1, "model.layers.6.mlp.up_proj.weight")
    assert wrong.max_abs == pytest.approx(0.25, rel=1e-5)
    assert "46 of 47 arrays bit-equal" in str(found)


def test_diff_of_other_shapes_and_sections(tmp_path, pair):
    source, _ = pair
    wide = tiny(width=128)
    found = inspection.diff(str(source), str(write_hf(wide, tmp_path / "wide")))
    assert not found.same and len(found.shapes) == 47


def test_verify_finds_a_changed_byte(pair):
    """Every file has its size, so only reading can tell."""
    _, step = pair
    assert not inspection.verify(step).problems
    values = OrbaxStep(step).value(("params", "lm_head", "weight"))
    needle, changed = values[100].tobytes(), 0
    for file in Path(step).rglob("*"):
        if file.is_file() and needle in (data := file.read_bytes()):
            file.write_bytes(data.replace(needle, needle[:-1] + b"\x3e"))
            changed += 1
    assert changed == 1
    found = inspection.verify(step)
    assert len(found.problems) == 1
    assert "params/lm_head/weight is not what was saved: its checksum" in found.problems[0]
    assert "NOT sound" in str(found)
    with pytest.raises(UserError, match=r"lm_head.weight is not what was saved"):
        hf.export_hf(OrbaxStep(step), CFG, TOKENIZER, f"{step}_export", context=512)
    assert not list(Path(f"{step}_export").glob("*"))


def test_verify_finds_what_is_not_finite(tmp_path):
    tensors = factory.random_params(CFG)
    tensors["model.norm.weight"][1] = np.nan
    found = inspection.verify(str(write_hf(CFG, tmp_path / "hf", tensors)))
    assert len(found.problems) == 1 and "model.norm.weight" in found.problems[0]


def test_what_is_no_checkpoint(tmp_path):
    for verb in (inspection.show, inspection.verify):
        with pytest.raises(UserError, match="is no checkpoint"):
            verb(str(tmp_path))


def test_parity_of_two_of_ours(tmp_path, pair):
    _, step = pair
    tensors = factory.random_params(CFG)
    name = "model.layers.3.self_attn.v_proj.weight"
    tensors[name] = tensors[name] * 1.01
    other = to_ours(CFG, write_hf(CFG, tmp_path / "other", tensors), tmp_path / "b")
    assert checks.compare_checkpoints(step, step).ok
    verdict = checks.compare_checkpoints(step, other, length=24)
    assert not verdict.ok
    assert "first departs at layer 3, attn" in verdict.failures[0]
    with pytest.raises(UserError, match="float16"):
        checks.compare_checkpoints(step, other, dtype="float16")


def test_parity_takes_stored_tokens(tmp_path, pair, caplog):
    _, step = pair
    np.save(tmp_path / "t.npy", factory.tokens(CFG, length=8))
    assert checks.compare_checkpoints(step, step, tokens=str(tmp_path / "t.npy")).ok
    assert "its width is not tested" in caplog.text
    np.save(tmp_path / "flat.npy", np.arange(5))
    with pytest.raises(UserError, match=r"tokens \[B, S\] are expected"):
        checks.compare_checkpoints(step, step, tokens=str(tmp_path / "flat.npy"))
