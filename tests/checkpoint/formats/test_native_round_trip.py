"""OLMo-core's own checkpoints: native -> ours -> native with moments and steps, and who refuses
what.
"""

import csv
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import tiny

from olmo_core_jax.checkpoint.formats import olmo_core, torch_zip
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.tree import get
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.recipes import load_recipe

LAPTOP = load_recipe("laptop")


def stage1_native(step: int) -> str:
    assert LAPTOP.stage1.reference is not None
    return LAPTOP.stage1.reference.native[step]


def adam_step(step: int) -> int:
    """What the reference's own curve says: updates less the skipped ones, and the one of step 0."""
    with open(LAPTOP.stage1.reference.curve, newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
    assert len(rows) == step
    return step - sum(int(row["optim/step skipped"]) for row in rows) + 1


def state_of(native: olmo_core.NativeCheckpoint) -> dict:
    return {
        "params": native.params("float32"),
        "mu": native.moments("mu", "float32"),
        "nu": native.moments("nu", "float32"),
        "count": np.asarray(native.adam_step, np.int32),
        "losses": np.zeros(4, np.float32),
        "grad_norms": np.zeros(4, np.float32),
        "seen": np.zeros((), np.int32),
        "step": np.asarray(native.step, np.int32),
    }


def every_tensor(native: olmo_core.NativeCheckpoint) -> dict[str, bytes]:
    """Bytes of every tensor by native name."""
    return {
        name: native.tensors.read(name, 0, spec.shape[0] if spec.shape else 1).tobytes()
        for name, spec in native.tensors.specs().items()
    }


@pytest.mark.reference
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_read_equals_what_olmo_core_saved(tmp_path, kv_heads):
    pytest.importorskip("olmo_core")
    cfg = tiny(kv_heads=kv_heads)
    saved = factory.save_native(cfg, tmp_path / "step3")
    native = olmo_core.open_native(str(tmp_path / "step3"), cfg)
    assert (native.step, native.adam_step) == (3, 3)
    assert native.trainer["data_loader"]["seed"] == 7
    trees = {"params": native.params("float32")} | {
        part: native.moments(part, "float32") for part in ("mu", "nu")
    }
    for leaf in leaves(cfg):
        for part, names in (
            ("params", olmo_core.parameter_names(leaf)),
            ("mu", olmo_core.state_names(leaf, "exp_avg")),
            ("nu", olmo_core.state_names(leaf, "exp_avg_sq")),
        ):
            array = np.asarray(get(trees[part], leaf.path))
            for c, name in enumerate(names):
                assert np.array_equal(array[c] if leaf.stacked else array, saved[name]), name


@pytest.mark.reference
def test_sharded_tensors_are_put_together(tmp_path):
    """As many ranks write: every tensor in several pieces, along either axis."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import metadata as md

    pytest.importorskip("olmo_core")
    from olmo_core.distributed.checkpoint.filesystem import _StorageInfo

    whole = np.arange(10 * 6, dtype=np.float32).reshape(10, 6)
    boxes = [((0, 0), (4, 6)), ((4, 0), (6, 2)), ((4, 2), (6, 4))]
    storage, offset, data = {}, 0, io.BytesIO()
    for (r, c), (n, m) in boxes:
        torch.save(torch.from_numpy(whole[r : r + n, c : c + m].copy()), data)
        index = md.MetadataIndex("model.x", torch.Size([r, c]))
        storage[index] = _StorageInfo("__0_0.distcp", offset, data.tell() - offset)
        offset = data.tell()
    chunks = [md.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    properties = md.TensorProperties(dtype=torch.float32)
    entry = md.TensorStorageMetadata(properties, torch.Size([10, 6]), chunks)
    (tmp_path / "__0_0.distcp").write_bytes(data.getvalue())
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(md.Metadata({"model.x": entry}, storage_data=storage))
    )
    source = olmo_core.DistributedCheckpoint(str(tmp_path))
    for start, stop in ((0, 10), (3, 5), (4, 4), (9, 10)):
        assert np.array_equal(source.read("model.x", start, stop), whole[start:stop])


@pytest.mark.reference
def test_native_ours_native(tmp_path):
    """The laptop reference's state, moments and steps included, by way of ours, into OLMo-core
    again.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo_core")
    from olmo_core.distributed.checkpoint import load_model_and_optim_state

    from olmo_core_jax.checkpoint.formats import olmo_core_write

    source = olmo_core.open_native(stage1_native(400), LAPTOP.model)
    meta = {"model": LAPTOP.model.model_dump(mode="json")}
    step = OrbaxStep(write_step(str(tmp_path / "ours"), 400, state_of(source), meta))
    written = olmo_core_write.write_native(step, LAPTOP, "stage1", str(tmp_path / "step400"))
    again = olmo_core.open_native(written, LAPTOP.model)
    assert every_tensor(again) == every_tensor(source)
    assert again.adam_step == source.adam_step == adam_step(400)

    # And OLMo-core itself loads it: the same bits as from the original.
    loaded = []
    for path in (stage1_native(400), written):
        model, _ = olmo_core_write.build_model(LAPTOP.model)
        optim = olmo_core_write._optimizer(model, LAPTOP.stage1.optimizer, LAPTOP.stage1.schedule)
        load_model_and_optim_state(
            f"{path}/model_and_optim", model, optim, flatten_optimizer_state=True
        )
        loaded.append((dict(model.named_parameters()), optim))
    (a, optim_a), (b, optim_b) = loaded
    for name in a:
        assert torch.equal(a[name], b[name])
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optim_a.state[a[name]][key], optim_b.state[b[name]][key])
    assert [g["weight_decay"] for g in optim_a.param_groups] == [
        g["weight_decay"] for g in optim_b.param_groups
    ]
    with pytest.raises(UserError, match="exists already"):
        olmo_core_write.write_native(step, LAPTOP, "stage1", written)


def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "step400"
    shutil.copytree(stage1_native(400), folder)
    return folder


def refused(folder: Path, pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        every_tensor(olmo_core.open_native(str(folder), LAPTOP.model))


def test_a_pickle_that_names_os_system_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/was_run",)

    folder = copied(tmp_path)
    (folder / "model_and_optim" / ".metadata").write_bytes(pickle.dumps(Evil()))
    refused(folder, r"asks for (posix|os).system, which has no place in a checkpoint")
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    "call",
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("torch", "load"),
        ("subprocess", "Popen"),
    ],
)
def test_no_other_name_either(tmp_path, call):
    folder = copied(tmp_path)
    module, name = call
    payload = f"c{module}\n{name}\n(S'1'\ntR.".encode()
    (folder / "model_and_optim" / ".metadata").write_bytes(payload)
    refused(folder, rf"asks for {module}.{name}")


def test_evil_inside_a_tensor_file(tmp_path):
    """The pieces are pickles too."""
    file = tmp_path / "x.distcp"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match=r"asks for os.system"):
        torch_zip.open_tensor(str(file), 0, file.stat().st_size, "x")


def test_a_changed_byte_is_noticed(tmp_path):
    folder = copied(tmp_path)
    source = olmo_core.open_native(stage1_native(400), LAPTOP.model)
    value = source.tensors.read("model.blocks.3.feed_forward.w1.weight", 7, 8).tobytes()
    for file in (folder / "model_and_optim").glob("*.distcp"):
        file.write_bytes(file.read_bytes().replace(value, value[:-1] + b"\x3c"))
    refused(folder, r"have changed \(CRC-32\)")


def test_unknown_trainer_state_costs_only_the_counters(tmp_path, caplog):
    folder = copied(tmp_path)
    with zipfile.ZipFile(folder / "train" / "rank0.pt", "w") as archive:
        archive.writestr("rank0/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    native = olmo_core.open_native(str(folder), LAPTOP.model)
    assert native.trainer == {} and native.step == 400 and native.adam_step == adam_step(400)
    assert "os.system" in caplog.text


def test_not_whole(tmp_path):
    folder = copied(tmp_path)
    (folder / ".metadata.json").unlink()
    refused(folder, r"not a whole OLMo-core checkpoint: it has no .metadata.json")


def test_truncated_piece(tmp_path):
    folder = copied(tmp_path)
    file = folder / "model_and_optim" / "__0_3.distcp"
    os.truncate(file, file.stat().st_size - 100)
    refused(folder, r"__0_3.distcp is truncated: it has \d+ of at least \d+ bytes")


def test_missing_piece(tmp_path):
    folder = copied(tmp_path)
    (folder / "model_and_optim" / "__0_2.distcp").unlink()
    refused(folder, r"__0_2.distcp is missing: \d+ bytes of it are listed")


def test_metadata_that_is_no_metadata(tmp_path):
    folder = copied(tmp_path)
    (folder / "model_and_optim" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused(folder, r"not the metadata of a distributed checkpoint")
    (folder / "model_and_optim" / ".metadata").write_bytes(b"\x80\x04garbage")
    refused(folder, r".metadata cannot be read")


def test_config_of_another_model(tmp_path):
    folder = copied(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model"]["n_layers"] = 12
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, r"config.json says n_layers = 12, the recipe's model 8")


def test_another_shape(tmp_path):
    folder = copied(tmp_path)
    (folder / "config.json").unlink()
    other = LAPTOP.model.model_copy(update={"mlp_hidden": 64})
    native = olmo_core.open_native(str(folder), other)
    with pytest.raises(
        UserError, match=r"feed_forward.w1.weight has shape \[\d+, 48\].*\[64, 48\]"
    ):
        native.params("float32")


def test_a_view_is_refused(tmp_path):
    """torch.save of a slice keeps the whole storage: its rows are not where the shape says."""
    torch = pytest.importorskip("torch")
    file = tmp_path / "view.pt"
    torch.save(torch.arange(12.0).reshape(3, 4)[:, 1:3], file)
    with pytest.raises(UserError, match="not a tensor that is stored row after row"):
        torch_zip.open_tensor(str(file), 0, file.stat().st_size, "x")
