"""A stage whose run root and data are in a bucket, against an emulator that others wrote."""

import socket

import numpy as np
import pytest
from mixes import make_recipe, make_run_root

pytest.importorskip("google.cloud.storage")
pytest.importorskip("gcp_storage_emulator")

from gcp_storage_emulator.server import create_server

from olmo_core_jax import recipes, storage
from olmo_core_jax.data.audit import audit, log_uri
from olmo_core_jax.data.instance_log import Line, digest
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.mirror import mirror
from olmo_core_jax.data.preflight import preflight
from olmo_core_jax.data.stage_data import build_stage_data, open_stage_data
from olmo_core_jax.data.where import where
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage import files, gcs


@pytest.fixture
def bucket(monkeypatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="b")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    for client in (gcs._client, files._client):
        client.cache_clear()
    server.start()
    yield "gs://b"
    server.stop()
    for client in (gcs._client, files._client):
        client.cache_clear()


def test_a_stage_in_a_bucket(bucket, make_mix, tmp_path):
    mix = make_mix()
    what = (str(mix.manifest), "tiny", str(mix.base), f"{bucket}/data")
    copied = mirror(*what)
    assert len(copied) == 5 and mirror(*what) == copied
    recipe = make_recipe(mix, updates=40, epochs=2, base=f"{bucket}/data")
    root = f"{bucket}/run"
    folder = make_run_root(root, recipe)
    build_stage_data(folder, recipe, "stage1")
    build_stage_data(folder, recipe, "stage1")  # again: nothing changes
    index, order = open_stage_data(folder, recipe.stage1)
    here = make_recipe(mix, updates=40, epochs=2)
    local_index, local_order = build_stage_data(str(tmp_path / "index"), here, "stage1")
    assert index.fingerprint == local_index.fingerprint
    assert preflight(index, order, recipe.stage1, "stage1")["epochs"] == 2
    lines = []
    with (
        Loader(index, order, last_step=40, workers=2) as remote,
        Loader(local_index, local_order, last_step=40) as local,
    ):
        for (step, ids, one), (_, other, two) in zip(remote, local, strict=True):
            assert np.array_equal(ids, other) and np.array_equal(one.tokens, two.tokens)
            lines.append(Line(step, 1, digest(ids)).dump())
    storage.write_text(log_uri(root, "stage1"), "\n".join(lines) + "\n")
    assert [a.ok for a in audit(root)] == [True]
    assert where(root, 40, row=2)[0].file.startswith("gs://b/data/tiny/")
    assert recipes.load_recipe(f"{root}/recipe.yaml") == recipe


def test_damage_in_a_bucket_is_told(bucket, make_mix):
    mix = make_mix()
    mirror(str(mix.manifest), "tiny", str(mix.base), f"{bucket}/data")
    recipe = make_recipe(mix, base=f"{bucket}/data")
    index, order = build_stage_data(f"{bucket}/index", recipe, "stage1")
    path = f"{bucket}/data/tiny/code/part-02.npy"
    changed = bytearray(storage.read_bytes(path))
    changed[100] ^= 1
    storage.write_bytes(path, bytes(changed))
    with pytest.raises(UserError, match=f"{path} has other content"):
        preflight(index, order, recipe.stage1, "stage1")
    storage.write_bytes(path, bytes(changed[:-2]))
    with pytest.raises(UserError, match=f"{path} has 3998 bytes, 4000 when it was indexed"):
        preflight(index, order, recipe.stage1, "stage1")
