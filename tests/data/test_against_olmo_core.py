"""Index, order, batches, fingerprint, filter and manifests against ai2-olmo-core itself."""

from pathlib import Path

import numpy as np
import pytest
from mixes import EOS, PAD, TOKENIZER, VOCAB, make_recipe

pytest.importorskip("torch")
pytest.importorskip("olmo_core")

from olmo_core.data import DataMix, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.data.collator import DataCollator
from olmo_core.data.data_loader import NumpyDataLoaderBase
from olmo_core.data.numpy_dataset import InstanceFilterConfig, NumpyFSLDataset
from olmo_core.data.utils import find_periodic_sequences

from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.mix import load_mix, shipped_mix
from olmo_core_jax.data.order import Order, Shuffle, build_order, order_uri
from olmo_core_jax.data.repetition import RepetitionFilter
from olmo_core_jax.data.stage_data import build_stage_data

pytestmark = pytest.mark.reference

SEQUENCE, BATCH, SEED = 32, 12, 7


class Reference:
    """OLMo-core's data set over the files of our index, and loaders on it."""

    def __init__(self, index, work_dir, filtered: bool = False):
        self.work_dir = work_dir
        self.dataset = NumpyFSLDataset(
            *[index.uri(s) for s in index.shards],
            sequence_length=index.sequence_length,
            pad_token_id=index.pad_id,
            eos_token_id=index.eos_id,
            vocab_size=index.vocab_size,
            dtype=np.dtype(index.dtype).type,
            max_target_sequence_length=index.max_target_sequence_length,
            instance_filter_config=InstanceFilterConfig() if filtered else None,
        )
        self.dataset.prepare()

    def loader(self, ranks: int = 1, rank: int = 0, workers: int = 0) -> NumpyDataLoaderBase:
        return NumpyDataLoaderBase.wrap_numpy_dataset(
            self.dataset,
            global_batch_size=BATCH * SEQUENCE,
            collator=DataCollator(pad_token_id=PAD),
            work_dir=self.work_dir,
            seed=SEED,
            dp_world_size=ranks,
            dp_rank=rank,
            num_workers=workers,
        )

    def epoch(self, number: int, **options) -> list[tuple[list[int], np.ndarray]]:
        """(instance ids, token ids) of every batch of an epoch, of one rank."""
        loader = self.loader(**options)
        loader.reshuffle(epoch=number)
        batches = [(b["index"].tolist(), b["input_ids"].numpy()) for b in loader]
        loader.reset()
        return batches


@pytest.fixture(params=[1, 2, 4], ids=lambda c: f"chunk{c}")
def data(request, make_mix, tmp_path):
    """(index, order, reference) of 10 updates an epoch."""
    mix = make_mix(lengths=(500, 1333, 2000, 131, 640), dtype="<u2")
    target = None if request.param == 1 else request.param * SEQUENCE
    recipe = make_recipe(mix, BATCH, 30, epochs=4, max_target_sequence_length=target)
    index, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")
    assert index.chunk == request.param
    return index, order, Reference(index, tmp_path / "work")


def ours(index, order, epoch: int, rows, workers: int = 0) -> list[tuple[list[int], np.ndarray]]:
    first = (epoch - 1) * order.steps_per_epoch + 1
    options = dict(first_step=first, last_step=first + order.steps_per_epoch - 1)
    with Loader(index, order, rows=rows, workers=workers, **options) as loader:
        return [(ids.tolist(), batch.tokens) for _, ids, batch in loader]


def assert_equal(mine, theirs):
    assert [ids for ids, _ in mine] == [ids for ids, _ in theirs] and mine
    for (_, a), (_, b) in zip(mine, theirs, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_every_rank_gets_the_same_ids_and_tokens(data, epoch):
    index, order, reference = data
    for ranks in (1, 2, 3, 4):
        for rank in range(ranks):
            rows = np.arange(rank, BATCH, ranks)
            theirs = reference.epoch(epoch, ranks=ranks, rank=rank)
            assert_equal(ours(index, order, epoch, rows), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_on_both_sides(data, workers):
    index, order, reference = data
    for epoch, ranks in ((1, 1), (2, 3), (3, 4), (1, 2)):
        for rank in range(ranks):
            rows = np.arange(rank, BATCH, ranks)
            theirs = reference.epoch(epoch, ranks=ranks, rank=rank, workers=workers)
            mine = ours(index, order, epoch, rows, workers if (ranks, rank) == (3, 0) else 0)
            assert_equal(mine, theirs)


def test_the_stored_order_is_the_same_file(data):
    _, order, reference = data
    loader = reference.loader()
    for epoch in (1, 2, 3):
        loader.reshuffle(epoch=epoch)
        theirs = loader._global_indices_file.read_bytes()
        mine = Path(order_uri(order.folder, epoch)).read_bytes()
        assert mine == theirs


def test_fingerprint(data):
    index, _, reference = data
    assert index.olmo_core_fingerprint == reference.dataset.fingerprint
    assert index.instances == len(reference.dataset)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_config_with_permuted_sources(make_mix, tmp_path, dtype):
    """The whole way from paths to data set, with AI2's own config class and file permutation."""
    mix = make_mix(dtype=np.dtype(dtype).newbyteorder("<"))
    config = NumpyFSLDatasetConfig(
        tokenizer=TokenizerConfig(VOCAB, EOS, PAD),
        paths=list(mix.files),
        sequence_length=SEQUENCE,
        source_permutation_seed=123,
        work_dir=str(tmp_path),
        dtype=dtype,
    )
    theirs = config.build()
    index = build_index(mix.data(dtype=dtype, source_permutation_seed=123), TOKENIZER, VOCAB)
    assert index.olmo_core_fingerprint == theirs.fingerprint
    assert [index.uri(s) for s in index.shards] == [str(p) for p in theirs.paths]


def test_masked_instances(make_mix, tmp_path):
    mix = make_mix(lengths=(3200, 3200))
    for path, tokens in mix.files.items():
        for start in range(0, 3200, 320):
            tokens[start : start + 64] = np.arange(64) % (start // 320 + 1)
        tokens[33] = EOS
        tokens.tofile(path)
    index = build_index(mix.data(64), TOKENIZER, VOCAB)
    build_order(str(tmp_path), Shuffle(index.instances, SEED), 1)
    order = Order(str(tmp_path), Shuffle(index.instances, SEED), 10)
    theirs = Reference(index, tmp_path / "work", filtered=True).dataset
    with Loader(index, order, last_step=10, repetition=RepetitionFilter()) as loader:
        masks = {
            int(i): bool(keep)
            for _, ids, batch in loader
            for i, keep in zip(ids, batch.instance_mask, strict=True)
        }
    assert masks == {i: bool(theirs[i]["instance_mask"]) for i in range(index.instances)}
    assert 0 < sum(masks.values()) < len(masks)


def adversarial_rows(rng: np.random.Generator, count: int):
    """Rows with repeats of a period around the rule's edge, broken by a few changed tokens."""
    for _ in range(count):
        length = int(rng.choice([31, 32, 33, 64, 100, 256, 512, 1024]))
        row = rng.integers(0, int(rng.choice([2, 3, 50, 5000])), length)
        for _ in range(int(rng.integers(1, 4))):
            period = int(rng.integers(1, 16))
            tokens = 32 * period + int(rng.integers(-3, 4))
            start = int(rng.integers(0, max(1, length - tokens)))
            part = row[start : start + tokens]
            part[:] = np.resize(rng.integers(0, 5, period), len(part))
        for place in rng.integers(0, length, int(rng.integers(0, 2))):
            row[place] = rng.integers(0, 5)
        yield row.astype(np.int64)


def kept_by_reference(row: np.ndarray, rule: RepetitionFilter) -> bool:
    found = find_periodic_sequences(row, max_period=rule.max_period, min_period=rule.min_period)
    return all(m.times < rule.max_count for m in found)


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(24_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_filter_decisions(count):
    rng = np.random.default_rng(count)
    rule, kept = RepetitionFilter(), 0
    for row in adversarial_rows(rng, count):
        mine = bool(rule.keep(row[None])[0])
        assert mine is kept_by_reference(row, rule), row.tolist()
        kept += mine
    assert 0.1 * count < kept < 0.9 * count


def test_filter_decisions_of_other_rules():
    rng = np.random.default_rng(5)
    for row in adversarial_rows(rng, 1_500):
        low, high = sorted(rng.integers(1, 16, 2).tolist())
        rule = RepetitionFilter(low, high, int(rng.integers(1, 40)))
        assert bool(rule.keep(row[None])[0]) is kept_by_reference(row, rule), (rule, row.tolist())


MIXES = ["OLMo-mix-0625-official", "OLMo-mix-0925-official", "OLMo-midtraining-mix-0625-100B"]
MIXES += ["OLMo-midtraining-mix-0925-ingredient2-100B", "OLMo-longmino-mix-0625"]


@pytest.mark.parametrize("tokenizer", ["allenai/dolma2-tokenizer", "EleutherAI/gpt-neox-20b"])
@pytest.mark.parametrize("name", MIXES)
def test_manifests(name, tokenizer):
    paths, labels = DataMix(name).build("gs://bucket", tokenizer)
    mine = load_mix(name, tokenizer)
    assert [s.uri("gs://bucket") for s in mine] == paths
    assert [s.label for s in mine] == labels
    assert shipped_mix(name).is_file()
