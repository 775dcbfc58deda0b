"""Conversion at full size: HF -> Orbax -> HF of a 7B-shaped model of random values, beside a plain copy of the bytes.

    python benchmarks/convert.py                                   7B, bfloat16 weights into float32 masters
    python benchmarks/convert.py --layers 4 --source float32       a smaller one

Nothing is downloaded. It needs room for the source twice and for the Orbax checkpoint (7B: 14.6 + 14.6 + 29.2 GB), and
removes what it made. Every step runs in its own process, on files that are not in the page cache; peak memory is the
process's own high-water mark. What a step is compared with is `cp -r` on the same disk, before, between and after:
bytes read and written a second, both ended by fsync.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from olmo_core_jax.checkpoint.formats import hf, hf_config
from olmo_core_jax.checkpoint.formats.safetensors import SafetensorsWriter, index_json, split_shards
from olmo_core_jax.checkpoint.tensors import Spec, numpy_dtype
from olmo_core_jax.model.weights import leaves, n_params
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.recipes.schema import Model

PIECE = 32 * 2**20


def model(layers: int) -> Model:
    """The 7B's shapes, with fewer layers where asked."""
    return load_recipe("olmo3_7b").model.model_copy(update={"n_layers": layers})


def make_source(folder: Path, cfg: Model, dtype: str) -> int:
    """Writes an HF checkpoint of random values, shard by shard, and returns its bytes."""
    kind = numpy_dtype(dtype)
    noise = 0.02 * np.random.default_rng(0).standard_normal(PIECE // kind.itemsize, np.float32)
    noise = noise.astype(kind)
    specs = {name: Spec(kind, leaf.tensor_shape) for leaf in leaves(cfg) for name in leaf.hf}
    folder.mkdir(parents=True)
    shards = split_shards(specs, hf.SHARD_BYTES)
    for shard, group in shards.items():
        writer = SafetensorsWriter(folder / shard, group)
        for n, (name, spec) in enumerate(group.items()):
            step = max(1, PIECE // 2 // max(1, spec.nbytes // spec.shape[0]))
            for start in range(0, spec.shape[0], step):
                shape = (min(step, spec.shape[0] - start), *spec.shape[1:])
                offset = (n * 7919 + start) % (noise.size // 4)
                writer.write(
                    name, start, noise[offset : offset + int(np.prod(shape))].reshape(shape)
                )
        writer.close()
    total = sum(spec.nbytes for spec in specs.values())
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_bytes(index_json(shards, total))
    ids = {"eos_id": cfg.vocab_size - 2, "pad_id": cfg.vocab_size - 1, "bos_id": None}
    config = hf_config.config_from_model(
        cfg, rows=cfg.padded_vocab_size, context=8192, dtype=dtype, **ids
    )
    (folder / "config.json").write_text(json.dumps(config))
    return total


def convert(cfg: Model, source: str, target: str, dtype: str) -> None:
    from olmo_core_jax.checkpoint.formats.orbax_write import write_step

    found = hf.open_hf(source, cfg)
    state = {"params": hf.params_from_hf(found, dtype)}
    write_step(target, 0, state, {"model": cfg.model_dump(mode="json")})


def export(cfg: Model, source: str, target: str, dtype: str) -> None:
    from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
    from olmo_core_jax.recipes.schema import Tokenizer

    tokenizer = Tokenizer(name="none", eos_id=cfg.vocab_size - 2, pad_id=cfg.vocab_size - 1)
    hf.export_hf(OrbaxStep(f"{source}/0"), cfg, tokenizer, target, context=8192, dtype=dtype)


def copy(cfg: Model, source: str, target: str, dtype: str) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


STEPS = {"convert": convert, "export": export, "copy": copy}


def child(step: str, layers: int, source: str, target: str, dtype: str) -> None:
    """One step, until every byte is on the disk; prints seconds and peak memory."""
    began = time.monotonic()
    STEPS[step](model(layers), source, target, dtype)
    for path in Path(target).rglob("*"):
        if path.is_file():
            with open(path, "rb") as f:
                os.fsync(f.fileno())
    seconds = time.monotonic() - began
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    found = {
        "seconds": seconds,
        "cpu_seconds": sum(u.ru_utime + u.ru_stime for u in used),
        "peak_gb": int(peak.split()[1]) * 1024 / 1e9,
    }
    print(json.dumps(found))


def run(step: str, layers: int, source: Path, target: Path, dtype: str) -> dict:
    """A step in a process of its own, on a cold source."""
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    arguments = [step, str(layers), str(source), str(target), dtype]
    out = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ).stdout
    return json.loads(out.splitlines()[-1]) | {"moved": size(source) + size(target)}


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def same_tensors(a: Path, b: Path, cfg: Model) -> bool:
    """Are the tensors of two HF folders the same bytes?"""
    from olmo_core_jax.checkpoint.formats.safetensors import SafetensorsFolder

    one, two = SafetensorsFolder(str(a)), SafetensorsFolder(str(b))
    if one.specs() != two.specs():
        return False
    for name, spec in one.specs().items():
        for start in range(0, spec.shape[0], 4096):
            stop = min(start + 4096, spec.shape[0])
            if one.read(name, start, stop).tobytes() != two.read(name, start, stop).tobytes():
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--source", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--params", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--work", type=Path, default=Path("runs/bench-convert"))
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        step, layers, source, target, dtype = args.child
        return child(step, int(layers), source, target, dtype)
    if args.layers % 4:
        parser.error("--layers: a multiple of 4, the period of the attention pattern")
    if args.work.exists():
        sys.exit(f"{args.work} exists: remove it, or name another folder with --work")
    try:
        bench(args)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)  # this run made it


def bench(args: argparse.Namespace) -> None:
    cfg, work = model(args.layers), args.work
    source_bytes = make_source(work / "hf", cfg, args.source)
    print(f"{n_params(cfg):,} parameters, {source_bytes / 1e9:.1f} GB of {args.source}", flush=True)
    rates = [copy_rate(args)]
    there = run("convert", args.layers, work / "hf", work / "orbax", args.params)
    rates.append(copy_rate(args))
    back = run("export", args.layers, work / "orbax", work / "back", args.source)
    equal = same_tensors(work / "hf", work / "back", cfg)
    shutil.rmtree(work / "back")
    rates.append(copy_rate(args))
    rate = sum(rates) / len(rates)
    report(f"HF {args.source} -> Orbax {args.params}", there, rate)
    report(f"Orbax {args.params} -> HF {args.source}", back, rate)
    print(f"every tensor came back with its bytes: {'yes' if equal else 'NO'}")


def copy_rate(args: argparse.Namespace) -> float:
    """Bytes a second, read and written, of a plain copy of the source."""
    found = run("copy", args.layers, args.work / "hf", args.work / "copy", "")
    shutil.rmtree(args.work / "copy")
    report("cp", found, None)
    return found["moved"] / found["seconds"]


def report(what: str, found: dict, rate: float | None) -> None:
    seconds, moved = found["seconds"], found["moved"]
    times = f" = {seconds / (moved / rate):.2f} times cp (limit 1.5)" if rate else ""
    print(
        f"{what}: {moved / 1e9:.1f} GB read and written in {seconds:.1f} s, "
        f"{moved / seconds / 1e6:.0f} MB/s{times}; processor time {found['cpu_seconds']:.1f} s, "
        f"peak memory {found['peak_gb']:.2f} GB",
        flush=True,
    )


if __name__ == "__main__":
    main()
