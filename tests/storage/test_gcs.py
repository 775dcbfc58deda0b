"""gs:// through Google's own client: against a loopback server that fails on demand."""

import time
from pathlib import Path

import numpy as np
import pytest
from fake_gcs import FakeGcs
from mixes import TOKENIZER, VOCAB, make_recipe

from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage import files, gcs, readers

pytest.importorskip("google.cloud.storage")


@pytest.fixture
def bucket(monkeypatch):
    """A loopback bucket; clients made before or after the test do not know of it."""
    store = FakeGcs()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    monkeypatch.setattr(readers, "TRY_SECONDS", 1.0)
    for client in (gcs._client, files._client):
        client.cache_clear()
    yield store
    for client in (gcs._client, files._client):
        client.cache_clear()
    store.close()


@pytest.fixture
def mirrored(bucket, make_mix):
    """The same mix in a folder and in the bucket: (local mix, data section of the bucket's)."""
    mix = make_mix(lengths=(5000, 3333, 20_000, 31, 6400))
    for path in mix.files:
        name = "base/" + str(Path(path).relative_to(mix.base))
        bucket.objects[name] = Path(path).read_bytes()
    return mix, mix.data(base="gs://b/base")


def test_the_same_index_as_from_a_folder(mirrored):
    mix, remote = mirrored
    here = build_index(mix.data(), TOKENIZER, VOCAB)
    there = build_index(remote, TOKENIZER, VOCAB)
    assert there.fingerprint == here.fingerprint and there.shards == here.shards
    assert there.base == "gs://b/base"


def test_missing_objects_are_all_named(mirrored, bucket):
    for name in ("base/tiny/web/part-01.npy", "base/tiny/code/part-04.npy"):
        del bucket.objects[name]
    with pytest.raises(UserError) as e:
        build_index(mirrored[1], TOKENIZER, VOCAB)
    assert "2 problem(s)" in str(e.value)
    assert "gs://b/base/tiny/web/part-01.npy does not exist" in str(e.value)


def test_folders_are_listed_not_files_asked(mirrored, bucket):
    build_index(mirrored[1], TOKENIZER, VOCAB)
    assert sorted(r.name for r in bucket.requests if r.kind == "list") == [
        "base/tiny/code/",
        "base/tiny/web/",
    ]
    assert not [r for r in bucket.requests if r.kind == "metadata"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_stream_as_from_a_folder(mirrored, tmp_path, bucket, workers):
    mix, _ = mirrored
    recipe = make_recipe(mix, updates=100)
    index, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    bucket.requests.clear()
    with (
        Loader(index, order, last_step=100) as local,
        Loader(index.at("gs://b/base"), order, last_step=100, workers=workers) as remote,
    ):
        for (_, ids, one), (_, other_ids, two) in zip(local, remote, strict=True):
            assert np.array_equal(ids, other_ids) and np.array_equal(one.tokens, two.tokens)
    assert len(bucket.requests) == len(bucket.media()) == 400
    assert all(r.length == 64 for r in bucket.media())


def test_random_windows_cost_one_request_each(bucket):
    bucket.objects["big.npy"] = np.random.default_rng(0).bytes(1 << 22)
    reader, used = gcs.GcsReader(), 0
    for offset in np.random.default_rng(1).integers(0, (1 << 22) - 32_768, 1000).tolist():
        data = reader.read("gs://b/big.npy", offset, 32_768)
        assert data == bucket.objects["big.npy"][offset : offset + 32_768]
        used += len(data)
    assert len(bucket.requests) <= 1000
    assert {r.kind for r in bucket.requests} == {"media"}
    assert sum(r.sent for r in bucket.requests) <= 2 * used


@pytest.mark.parametrize("fault", ["503", "reset", "half", "slow"])
def test_passing_faults_are_tried_again(bucket, fault):
    bucket.objects["a"] = bytes(range(256)) * 16
    bucket.faults = [fault, None, fault, fault]
    reader = gcs.GcsReader()
    assert reader.read("gs://b/a", 100, 1000) == bucket.objects["a"][100:1100]
    assert len(bucket.media()) == 2
    assert reader.read("gs://b/a", 0, 10) == bucket.objects["a"][:10]
    assert reader.read("gs://b/a", 0, 10) == bucket.objects["a"][:10]
    assert sum(r.sent for r in bucket.media()) <= 2 * 1020


@pytest.mark.parametrize("fault", ["503", "reset", "half"])
def test_a_lasting_fault_is_one_error_within_the_deadline(bucket, monkeypatch, fault):
    monkeypatch.setattr(readers, "DEADLINE_SECONDS", 2.0)
    bucket.objects["a"] = bytes(100)
    bucket.always = fault
    begun = time.monotonic()
    with pytest.raises(
        readers.ReadFailed, match=r"gs://b/a at byte 8 could not be read within 2 s"
    ):
        gcs.GcsReader().read("gs://b/a", 8, 8)
    assert time.monotonic() - begun < 4
    assert len(bucket.media()) > 2


def test_a_missing_object_is_not_tried_again(bucket):
    with pytest.raises(UserError, match="gs://b/none does not exist"):
        gcs.GcsReader().read("gs://b/none", 0, 8)
    assert len(bucket.requests) <= 1


def test_a_shorter_object_is_told(bucket):
    bucket.objects["a"] = bytes(100)
    with pytest.raises(UserError, match="gs://b/a is truncated"):
        gcs.GcsReader().read("gs://b/a", 96, 8)
    with pytest.raises(UserError, match="gs://b/a is truncated"):
        gcs.GcsReader().read("gs://b/a", 200, 8)


def test_a_stage_survives_a_bad_network(mirrored, tmp_path, bucket):
    """Index, order and batches while every fifth answer is a fault."""
    mix, _ = mirrored
    recipe = make_recipe(mix, updates=50, base="gs://b/base")
    bucket.faults = [None, "503", None, None, "reset", None, None, "half", None, None] * 60
    index, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    with (
        Loader(index, order, last_step=50) as loader,
        Loader(index.at(str(mix.base)), order, last_step=50) as local,
    ):
        for (_, _, one), (_, _, two) in zip(loader, local, strict=True):
            assert np.array_equal(one.tokens, two.tokens)


def test_requests_in_flight_are_bounded_and_ahead(mirrored, tmp_path, bucket):
    mix, _ = mirrored
    recipe = make_recipe(mix, batch=64, updates=10)
    index, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    bucket.requests.clear()
    bucket.delay = 0.02
    with Loader(index.at("gs://b/base"), order, last_step=10, prefetch=4) as loader:
        next(loader)
        end = time.monotonic() + 10
        while len(bucket.media()) < 5 * 64 and time.monotonic() < end:
            time.sleep(0.05)
        # The coming four updates are read before anybody asks for them.
        assert len(bucket.media()) == 5 * 64
    assert 1 < bucket.most_in_flight <= readers.CONNECTIONS
