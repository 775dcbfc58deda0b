"""AI2's own manifests with every file, from a bucket that answers with sizes and made-up bytes."""

import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from fake_gcs import FakeGcs, Virtual

from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.index import load_index, save_index
from olmo_core_jax.data.mix import load_mix
from olmo_core_jax.data.order import Shuffle
from olmo_core_jax.recipes import schema
from olmo_core_jax.storage import files, gcs

pytest.importorskip("olmo_core")
pytest.importorskip("google.cloud.storage")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

VOCAB, EOS, SEQUENCE = 100_278, 100_257, 8192
TOKENIZER = schema.Tokenizer(name="allenai/dolma2-tokenizer", eos_id=EOS, pad_id=100_277)


def content(offset: int, length: int) -> bytes:
    """Token ids that depend on their place, an EOS every 97."""
    first, last = offset // 4, (offset + length - 1) // 4
    ids = np.arange(first, last + 1, dtype=np.uint64) % 97 * 1031
    ids[np.arange(first, last + 1) % 97 == 5] = EOS
    return ids.astype("<u4").tobytes()[offset % 4 :][:length]


@pytest.fixture
def bucket(monkeypatch):
    store = FakeGcs()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    for client in (gcs._client, files._client):
        client.cache_clear()
    yield store
    for client in (gcs._client, files._client):
        client.cache_clear()
    store.close()


@pytest.mark.parametrize(
    ("mix", "files", "instances"),
    [
        ("OLMo-mix-0625-official", 1016, 724_000_000),
        ("OLMo-midtraining-mix-0625-100B", 11_933, 12_210_000),
    ],
)
def test_the_index_of_every_file(bucket, tmp_path, mix, files, instances):
    sources = load_mix(mix, TOKENIZER.name)
    rng = np.random.default_rng(0)
    shares = rng.lognormal(0, 0.5, len(sources))
    tokens = (shares / shares.sum() * instances * SEQUENCE).astype(int)
    for source, count in zip(sources, tokens.tolist(), strict=True):
        bucket.objects[f"ai2-llm/{source.path}"] = Virtual(4 * count, content)
    data = schema.Data(mix=mix, base="gs://b/ai2-llm", sequence_length=SEQUENCE, seed=34521)
    begun = time.monotonic()
    index = build_index(data, TOKENIZER, VOCAB)
    took = time.monotonic() - begun
    assert len(index.shards) == len(sources) == files
    assert [s.instances for s in index.shards] == [int(t) // SEQUENCE for t in tokens]
    assert not [r for r in bucket.requests if r.kind == "metadata"]
    save_index(str(tmp_path), index)
    begun = time.monotonic()
    loaded = load_index(str(tmp_path), sequence_length=SEQUENCE)
    opening = time.monotonic() - begun
    assert loaded == index and loaded.olmo_core_fingerprint == index.olmo_core_fingerprint
    for instance in rng.integers(0, index.instances, 1000).tolist():
        place = index.place(instance)
        shard = index.shards[place.file]
        begin = sum(s.instances for s in index.shards[: place.file])
        assert 0 <= instance - begin < shard.instances
        assert place.offset == (instance - begin) * SEQUENCE * 4 < shard.bytes
    print(
        f"\n{mix}: {len(sources)} files, {index.instances} instances: indexed in {took:.1f} s with "
        f"{len(bucket.requests)} requests (client and server on this machine), opened in "
        f"{opening:.2f} s; peak of this process "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"
    )


ORDER = """
import re, sys, time
from pathlib import Path
from olmo_core_jax.data.order import Shuffle, build_order
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
begun = time.process_time()
build_order(sys.argv[1], Shuffle(12_210_000, 1337), 1)
print(time.process_time() - begun, peak() - before)
"""


def test_the_midtraining_order(tmp_path):
    out = subprocess.check_output([sys.executable, "-c", ORDER, str(tmp_path)], text=True)
    seconds, kib = map(float, out.split())
    print(f"\norder of 12.21 M instances: {seconds:.2f} CPU-seconds, {kib / 1024:.0f} MiB")
    assert seconds < 2 and kib < 200 * 1024
    stored = np.fromfile(tmp_path / "order_epoch1.u32", "<u4")
    assert np.array_equal(stored, Shuffle(12_210_000, 1337).compute(1))
    assert np.array_equal(np.sort(stored), np.arange(12_210_000))
