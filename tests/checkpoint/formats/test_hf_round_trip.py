"""Hugging Face -> ours -> Hugging Face: the bytes of every tensor, and ours -> Hugging Face ->
ours.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import TOKENIZER, raw_bytes, tiny, to_ours, write_hf

from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep, lazy_section
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.olmo3 import abstract_params, init_params
from olmo_core_jax.model.tree import flatten


def export(step: str, cfg, folder, **options) -> hf.Export:
    return hf.export_hf(OrbaxStep(step), cfg, TOKENIZER, str(folder), context=512, **options)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("rows", ["padded", "released"])
@pytest.mark.parametrize("shards", [1, 3])
def test_bytes_survive_the_round_trip(tmp_path, kv_heads, rows, shards):
    cfg = tiny(kv_heads=kv_heads)
    tensors = factory.random_params(cfg)
    if rows == "released":
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][: cfg.vocab_size]
    source = write_hf(cfg, tmp_path / "hf", tensors, shards)
    step = to_ours(cfg, source, tmp_path / "ours")
    count = cfg.vocab_size if rows == "released" else None
    written = export(
        step, cfg, tmp_path / "back", rows=count, shard_bytes=10**9 if shards == 1 else 400_000
    )
    assert raw_bytes(tmp_path / "back") == raw_bytes(source)
    assert written.changed == 0
    assert (len(written.files) > 2) == (shards > 1)


def test_bfloat16_is_kept_and_widened_exactly(tmp_path):
    cfg = tiny()
    fine = factory.random_params(cfg)
    source = tmp_path / "hf"
    write_hf(cfg, source, {name: x.astype(ml_dtypes.bfloat16) for name, x in fine.items()})
    assert {kind for kind, _, _ in raw_bytes(source).values()} == {"BF16"}

    for dtype in ("bfloat16", "float32"):
        step = to_ours(cfg, source, tmp_path / dtype, dtype)
        kinds = {spec.dtype.name for spec in OrbaxStep(step).specs().values()}
        assert kinds == {dtype}
        kept = export(step, cfg, tmp_path / f"{dtype}_kept")
        assert kept.dtype == dtype
        back = export(step, cfg, tmp_path / f"{dtype}_back", dtype="bfloat16")
        assert back.changed == 0
        assert raw_bytes(tmp_path / f"{dtype}_back") == raw_bytes(source)


def test_rounding_is_refused_unless_asked_for_and_then_counted(tmp_path):
    cfg = tiny()
    source = write_hf(cfg, tmp_path / "hf")
    with pytest.raises(UserError, match=r"is float32, which bfloat16 does not hold exactly"):
        to_ours(cfg, source, tmp_path / "no", "bfloat16")
    step = to_ours(cfg, source, tmp_path / "ours")
    written = export(step, cfg, tmp_path / "coarse", dtype="bfloat16")
    fine = factory.random_params(cfg)
    changed = sum(
        int(np.sum(x.astype(ml_dtypes.bfloat16).astype(np.float32) != x)) for x in fine.values()
    )
    assert written.changed == changed > 0


def test_ours_to_hf_to_ours(tmp_path):
    cfg = tiny(kv_heads=2)
    params = {"params": {}}
    params["params"] = _numpy(init_params(cfg, 3))
    meta = {"model": cfg.model_dump(mode="json")}
    step = write_step(str(tmp_path / "a"), 0, params, meta)
    export(step, cfg, tmp_path / "hf")
    again = to_ours(cfg, tmp_path / "hf", tmp_path / "b")
    a, b = (dict(flatten(lazy_section(OrbaxStep(s), "params"))) for s in (step, again))
    assert a.keys() == b.keys()
    assert all(np.array_equal(np.asarray(a[k]), np.asarray(b[k])) for k in a)


def _numpy(tree):
    return {k: _numpy(v) if isinstance(v, dict) else np.asarray(v) for k, v in tree.items()}


def test_what_is_streamed_is_a_checkpoint_like_any_other(tmp_path):
    cfg = tiny(kv_heads=2)
    tensors = factory.random_params(cfg)
    step = to_ours(cfg, write_hf(cfg, tmp_path / "hf", tensors), tmp_path / "ours")
    store = CheckpointStore(str(tmp_path / "ours"))
    assert store.latest_good() == 0
    params, meta = store.restore_params(0, abstract_params(cfg))  # checks every checksum
    assert len(meta["checksums"]) == len(list(flatten(params)))
    for i in range(cfg.n_layers):
        layer = params["cycles"][f"layer_{i % 4}"]
        expected = tensors[f"model.layers.{i}.self_attn.k_proj.weight"]
        assert np.array_equal(np.asarray(layer["attn"]["k"][i // 4]), expected)
    assert step.endswith("/0")


def test_padding_rows_that_a_release_lacks_become_zeros(tmp_path):
    cfg = tiny()
    tensors = factory.random_params(cfg)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][: cfg.vocab_size]
    step = OrbaxStep(to_ours(cfg, write_hf(cfg, tmp_path / "hf", tensors), tmp_path / "ours"))
    head = step.value(("params", "lm_head", "weight"))
    assert head.shape[0] == cfg.padded_vocab_size
    assert not head[cfg.vocab_size :].any()
    assert np.array_equal(head[: cfg.vocab_size], tensors["lm_head.weight"])


def test_pieces_smaller_than_a_tensor(tmp_path, monkeypatch):
    """What a large model does: many pieces a tensor, chunks on disk that are parts of a layer."""
    from olmo_core_jax.checkpoint import tensors as pieces

    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    cfg = tiny()
    source = write_hf(cfg, tmp_path / "hf")
    step = to_ours(cfg, source, tmp_path / "ours")
    array = OrbaxStep(step).array(("params", "cycles", "layer_0", "mlp", "gate"))
    assert array.chunk_layout.read_chunk.shape == (1, 16, 64)
    export(step, cfg, tmp_path / "back")
    assert raw_bytes(tmp_path / "back") == raw_bytes(source)
    CheckpointStore(str(tmp_path / "ours")).restore_params(0, abstract_params(cfg))


def test_a_trainers_own_checkpoint_is_exported(tmp_path):
    """Orbax cuts whole arrays differently: all cycles in one chunk."""
    cfg = tiny()
    store = CheckpointStore(str(tmp_path / "run"))
    store.save(7, {"params": init_params(cfg, 1)}, {"model": cfg.model_dump(mode="json")})
    store.close()
    export(str(tmp_path / "run" / "7"), cfg, tmp_path / "hf")
    ours = dict(flatten(init_params(cfg, 1)))
    theirs = raw_bytes(tmp_path / "hf")
    for leaf in hf.leaves(cfg):
        for c, name in enumerate(leaf.hf):
            value = np.asarray(ours[leaf.path])
            assert theirs[name][2] == (value[c] if leaf.stacked else value).tobytes()


def test_tokenizer_files_go_along(tmp_path):
    cfg = tiny()
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (tmp_path / "tok" / "notes.md").write_text("no part of a tokenizer")
    step = to_ours(cfg, write_hf(cfg, tmp_path / "hf"), tmp_path / "ours")
    tokenizer = TOKENIZER.model_copy(update={"path": str(tmp_path / "tok")})
    hf.export_hf(OrbaxStep(step), cfg, tokenizer, str(tmp_path / "out"), context=512)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_an_export_never_touches_what_is_there(tmp_path):
    cfg = tiny()
    step = to_ours(cfg, write_hf(cfg, tmp_path / "hf"), tmp_path / "ours")
    before = raw_bytes(tmp_path / "hf")
    with pytest.raises(UserError, match="not empty"):
        export(step, cfg, tmp_path / "hf")
    assert raw_bytes(tmp_path / "hf") == before


def test_another_recipes_checkpoint_is_not_cut_to_size(tmp_path):
    """Slices of a larger array would read well and be wrong."""
    cfg = tiny()
    step = to_ours(cfg, write_hf(cfg, tmp_path / "hf"), tmp_path / "ours")
    smaller = cfg.model_copy(update={"mlp_hidden": cfg.mlp_hidden // 2})
    with pytest.raises(UserError, match=r"layer_0\.mlp\.gate is .* the recipe's model has"):
        export(step, smaller, tmp_path / "out")
    assert not (tmp_path / "out").exists()
