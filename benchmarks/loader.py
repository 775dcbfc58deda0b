"""Loader speed on the same files in one run: ours, OLMo-core's, MaxText's olmo_grain.

    python benchmarks/loader.py [--olmo-core PYTHON] [--maxtext PYTHON] [--batches 400]

`--olmo-core` names a Python that has ai2-olmo-core (default: this one), `--maxtext` one that has
maxtext 0.2.5 (Python 3.12); without it its rows are left out. The files are made first, are in the page cache, and hold Zipf
distributed ids, so that the filter meets ids that follow themselves as often as in text. Every loader runs in
a process of its own, without workers, with the filter off and on, round after round; the best
round counts. CPU seconds are those of all its threads. What is delivered differs a little: ours
gives ids and a mask (the device shifts), OLMo-core collated int64 ids, MaxText inputs, targets,
positions and segments.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SEQUENCE, BATCH, VOCAB, EOS, PAD, SEED = 8192, 8, 100_278, 100_257, 100_277, 1
FILES, INSTANCES_A_FILE = 8, 420


def make_files(folder: Path) -> list[str]:
    """Headerless uint32 shards of FILES * INSTANCES_A_FILE instances and a little more, and their
    mix.
    """
    paths = [folder / f"part-{i:02d}.npy" for i in range(FILES)]
    generator = np.random.default_rng(0)
    for path in paths:
        ids = generator.zipf(1.3, INSTANCES_A_FILE * SEQUENCE + 17)
        ids = np.minimum(ids - 1, EOS - 1).astype("<u4")
        ids[generator.random(len(ids)) < 1e-3] = EOS
        ids.tofile(path)
    (folder / "mix.txt").write_text("".join(f"zipf,{path.name}\n" for path in paths))
    return [str(path) for path in paths]


def ours(folder: Path, paths: list[str], filtered: bool, batches: int):
    """Batches of olmo_core_jax.data.loader."""
    from olmo_core_jax.data.build import build_index
    from olmo_core_jax.data.loader import Loader
    from olmo_core_jax.data.order import Order, Shuffle, build_order
    from olmo_core_jax.data.repetition import RepetitionFilter
    from olmo_core_jax.recipes.schema import Data, Tokenizer

    data = Data(mix=str(folder / "mix.txt"), base=str(folder), sequence_length=SEQUENCE, seed=SEED)
    index = build_index(data, Tokenizer(name="t", eos_id=EOS, pad_id=PAD), VOCAB)
    shuffle = Shuffle(index.instances, SEED)
    build_order(str(folder), shuffle, 1)
    rule = RepetitionFilter() if filtered else None
    loader = Loader(
        index, Order(str(folder), shuffle, BATCH), last_step=batches, repetition=rule, prefetch=0
    )
    return ((len(ids), batch.tokens.shape) for _, ids, batch in loader)


def olmo_core(folder: Path, paths: list[str], filtered: bool, batches: int):
    """Batches of OLMo-core's NumpyFSLDataLoader."""
    from olmo_core.data.collator import DataCollator
    from olmo_core.data.data_loader import NumpyDataLoaderBase
    from olmo_core.data.numpy_dataset import InstanceFilterConfig, NumpyFSLDataset

    dataset = NumpyFSLDataset(
        *paths,
        sequence_length=SEQUENCE,
        pad_token_id=PAD,
        eos_token_id=EOS,
        vocab_size=VOCAB,
        dtype=np.uint32,
        instance_filter_config=InstanceFilterConfig() if filtered else None,
    )
    dataset.prepare()
    loader = NumpyDataLoaderBase.wrap_numpy_dataset(
        dataset,
        global_batch_size=BATCH * SEQUENCE,
        collator=DataCollator(pad_token_id=PAD, vocab_size=VOCAB),
        work_dir=folder / "work",
        seed=SEED,
    )
    loader.reshuffle(epoch=1)
    return ((len(b["input_ids"]), tuple(b["input_ids"].shape)) for b in loader)


def maxtext(folder: Path, paths: list[str], filtered: bool, batches: int):
    """Batches of MaxText's dataset_type=olmo_grain."""
    from absl import flags
    from maxtext.input_pipeline import olmo_data
    from maxtext.input_pipeline.olmo_data_grain import make_olmo_grain_data_loader

    flags.FLAGS(sys.argv[:1])
    index = olmo_data.build_index(
        [(path, "zipf") for path in paths],
        SEQUENCE,
        tokenizer="t",
        header_reader=lambda path: olmo_data.read_raw_metadata_from_path(path, "uint32"),
    )
    loader = make_olmo_grain_data_loader(
        index,
        seed=SEED,
        batch_size=BATCH,
        shard_index=0,
        shard_count=1,
        apply_ngram_filter=filtered,
    )
    return ((len(b["inputs"]), b["inputs"].shape) for b in loader)


LOADERS = {"ours": ours, "olmo_core": olmo_core, "maxtext": maxtext}


def measure(name: str, folder: Path, filtered: bool, batches: int) -> dict[str, float]:
    """Instances a CPU-second and a second of wall time; opening the data and 8 batches come
    first.
    """
    paths = sorted(str(p) for p in folder.glob("part-*.npy"))
    stream = LOADERS[name](folder, paths, filtered, batches)
    for _ in range(8):
        next(stream)
    cpu, wall, count = time.process_time(), time.perf_counter(), 0
    for _ in range(batches - 8):
        rows, shape = next(stream)
        assert shape == (BATCH, SEQUENCE)
        count += rows
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu": count / cpu, "wall": count / wall}


def compare(pythons: dict[str, str], batches: int, rounds: int) -> dict[str, dict]:
    """Best of some rounds of every loader, filter off and on: {"ours": {"off": {...}, "on":
    {...}}}.
    """
    results: dict[str, dict] = {name: {} for name in pythons}
    with tempfile.TemporaryDirectory() as scratch:
        make_files(Path(scratch))
        for _ in range(rounds):
            for name, python in pythons.items():
                for key in ("off", "on"):
                    command = [python, __file__, "--one", name, key, scratch, str(batches)]
                    out = subprocess.run(command, capture_output=True, text=True)
                    if out.returncode:
                        sys.exit(f"{name} failed:\n{out.stderr}")
                    found = json.loads(out.stdout.splitlines()[-1])
                    best = results[name].setdefault(key, found)
                    results[name][key] = {k: max(best[k], found[k]) for k in found}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--olmo-core", default=sys.executable, help="Python that has ai2-olmo-core")
    parser.add_argument("--maxtext", help="Python that has maxtext 0.2.5")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, key, folder, batches = args.one
        print(json.dumps(measure(name, Path(folder), key == "on", int(batches))))
        return
    pythons = {"ours": sys.executable, "olmo_core": args.olmo_core, "maxtext": args.maxtext}
    results = compare({k: v for k, v in pythons.items() if v}, args.batches, args.rounds)
    print(f"instances of {SEQUENCE} tokens, batch {BATCH}, no workers; best of {args.rounds}")
    print(
        f"{'loader':10s} {'filter':6s} {'per CPU-second':>15s} {'per second':>12s} {'ours is':>9s}"
    )
    for name, by_filter in results.items():
        for key, rate in by_filter.items():
            times = results["ours"][key]["cpu"] / rate["cpu"]
            print(f"{name:10s} {key:6s} {rate['cpu']:15.0f} {rate['wall']:12.0f} {times:8.1f}x")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
