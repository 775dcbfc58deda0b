"""Weights that are not what they seem: one error that names the file or tensor, and no
checkpoint.
"""

import errno
import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import TOKENIZER, tiny, to_ours, write_hf

from olmo_core_jax.checkpoint.formats import hf, safetensors
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import UserError


def refused(cfg, folder: Path, out: Path, pattern: str) -> None:
    """The conversion ends with one error, and nothing that could pass for a checkpoint is left."""
    with pytest.raises(UserError, match=pattern):
        to_ours(cfg, folder, out)
    assert CheckpointStore(str(out)).latest_good() is None


@pytest.mark.parametrize("lost", [1, 1000])
def test_truncated(tmp_path, lost):
    folder = write_hf(tiny(), tmp_path / "hf")
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - lost)
    expected = rf"model.safetensors has {whole - lost} bytes where its header describes {whole}"
    refused(tiny(), folder, tmp_path / "out", expected)


@pytest.mark.parametrize("length", [2**40, 0, 7])
def test_wrong_header_length(tmp_path, length):
    folder = write_hf(tiny(), tmp_path / "hf")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + data[8:])
    refused(
        tiny(), folder, tmp_path / "out", r"model.safetensors is not a safetensors file: its header"
    )


def test_header_that_overlaps(tmp_path):
    folder = write_hf(tiny(), tmp_path / "hf")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["lm_head.weight"]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    refused(tiny(), folder, tmp_path / "out", r"starts at byte \d+, not \d+")


def test_missing_shard(tmp_path):
    folder = write_hf(tiny(), tmp_path / "hf", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(
        tiny(),
        folder,
        tmp_path / "out",
        r"there is no model-00002-of-00003.safetensors that its index",
    )


def test_index_and_shard_disagree(tmp_path):
    folder = write_hf(tiny(), tmp_path / "hf", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tiny(), folder, tmp_path / "out", r"lm_head.weight is in the index or in the file")


def test_no_weights_at_all(tmp_path):
    folder = write_hf(tiny(), tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    refused(tiny(), folder, tmp_path / "out", r"there is no model.safetensors \(nor an index")


@pytest.mark.parametrize(
    "change, pattern",
    [
        (
            lambda t: t.pop("model.layers.5.mlp.up_proj.weight"),
            r"layers.5.mlp.up_proj.weight is missing",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
            r"no part of the recipe's model takes: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update(
                {"model.layers.2.self_attn.k_proj.weight": np.zeros((32, 64), np.float32)}
            ),
            r"layers.2.self_attn.k_proj.weight has shape \[32, 64\], the recipe's model has \[64",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones((64, 1), np.float32)}),
            r"model.norm.weight has shape \[64, 1\]",
        ),
        (
            lambda t: t["model.layers.3.mlp.down_proj.weight"].__setitem__((17, 3), np.nan),
            r"layers.3.mlp.down_proj.weight holds a value that is not finite, in row 17",
        ),
        (
            lambda t: t["model.norm.weight"].__setitem__(5, np.inf),
            r"model.norm.weight holds a value that is not finite, in row 5",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(64, np.float64)}),
            r"model.norm.weight is float64, which float32 does not hold exactly",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(64, np.int32)}),
            r"model.norm.weight is int32, which float32 does not hold exactly",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}),
            r"lm_head.weight has 255 rows, config.json says vocab_size 256",
        ),
    ],
)
def test_wrong_tensors(tmp_path, change, pattern):
    tensors = factory.random_params(tiny())
    change(tensors)
    refused(tiny(), write_hf(tiny(), tmp_path / "hf", tensors), tmp_path / "out", pattern)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_not_finite_in_bfloat16(tmp_path, value):
    tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in factory.random_params(tiny()).items()}
    largest = ml_dtypes.finfo(ml_dtypes.bfloat16).max
    tensors["model.layers.3.mlp.down_proj.weight"][17, 4] = -largest
    folder = write_hf(tiny(), tmp_path / "hf", tensors)
    to_ours(tiny(), folder, tmp_path / "fine")
    tensors["model.layers.3.mlp.down_proj.weight"][17, 3] = value
    folder = write_hf(tiny(), tmp_path / "bad", tensors)
    expected = r"layers.3.mlp.down_proj.weight holds a value that is not finite, in row 17"
    refused(tiny(), folder, tmp_path / "out", expected)


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"model_type": "olmo2"}, r"is of type 'olmo2'; only Olmo 3"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is True"),
        ({"attention_bias": True}, r"attention_bias is True"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ({"sliding_window": 13}, r"has windows \[13, 13, 13, -1\] by layer"),
        ({"layer_types": ["full_attention"] * 8}, r"has windows \[-1\]"),
        ({"rope_theta": 10000.0}, r"says rope_theta = 10000.0"),
        ({"rms_norm_eps": 1e-5}, r"says norm_eps = 1e-05"),
        ({"num_hidden_layers": 4}, r"says n_layers = 4"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                }
            },
            r"says rope_scaling = ",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, r"scaling of type 'linear'"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            r"rope_theta differs between sliding and full",
        ),
    ],
)
def test_config_of_another_model(tmp_path, fields, pattern):
    refused(tiny(), write_hf(tiny(), tmp_path / "hf", **fields), tmp_path / "out", pattern)


def test_vocabulary_smaller_than_the_tokenizer(tmp_path):
    cfg = tiny()
    tensors = factory.random_params(cfg)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][: cfg.vocab_size - 1]
    folder = write_hf(cfg, tmp_path / "hf", tensors)
    refused(
        cfg, folder, tmp_path / "out", r"vocabulary of 199 rows; the recipe's tokenizer needs 200"
    )


def test_tokenizer_file_larger_than_the_vocabulary(tmp_path):
    folder = write_hf(tiny(), tmp_path / "hf")
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 256, "content": "<|x|>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(tiny(), folder, tmp_path / "out", r"token id 256, the embedding only 256 rows")


def test_disk_full_in_the_middle(tmp_path, monkeypatch):
    """No half checkpoint is ever seen as whole, and a second try succeeds."""
    cfg = tiny()
    folder = write_hf(cfg, tmp_path / "hf")
    real, calls = safetensors.SafetensorsFile.read, []

    def full(self, name, start, stop):
        calls.append(name)
        if len(calls) == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, name, start, stop)

    monkeypatch.setattr(safetensors.SafetensorsFile, "read", full)
    refused(cfg, folder, tmp_path / "out", r"cannot be written: .*No space left")
    monkeypatch.undo()
    to_ours(cfg, folder, tmp_path / "out")
    assert CheckpointStore(str(tmp_path / "out")).latest_good() == 0


def test_disk_full_in_an_export(tmp_path, monkeypatch):
    cfg = tiny()
    step = OrbaxStep(to_ours(cfg, write_hf(cfg, tmp_path / "hf"), tmp_path / "ours"))
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) == 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"export .* cannot be written: No space left"):
        hf.export_hf(step, cfg, TOKENIZER, str(tmp_path / "back"), context=512)
    monkeypatch.undo()
    assert list((tmp_path / "back").iterdir()) == []
    hf.export_hf(step, cfg, TOKENIZER, str(tmp_path / "back"), context=512)


def test_a_checkpoint_is_never_overwritten(tmp_path):
    cfg = tiny()
    folder = write_hf(cfg, tmp_path / "hf")
    to_ours(cfg, folder, tmp_path / "out")
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*"))
    with pytest.raises(UserError, match="exists already"):
        to_ours(cfg, folder, tmp_path / "out")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*"))
