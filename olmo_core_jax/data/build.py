"""From a mix to an index: sizes and sampled contents of every shard, all faults told at once."""

from collections.abc import Sequence

from olmo_core_jax.data import shards
from olmo_core_jax.data.eos import missing_eos
from olmo_core_jax.data.index import Index, Shard, check_cut, default_dtype, instances_in
from olmo_core_jax.data.mix import load_mix
from olmo_core_jax.data.problems import refuse
from olmo_core_jax.recipes import schema


def build_index(data: schema.Data, tokenizer: schema.Tokenizer, vocab_size: int) -> Index:
    """The index of a recipe's data section, from sizes and a few KiB of every shard.

    Writes nothing. Raises UserError that lists every missing, truncated, mixed-up or wrongly typed shard.
    """
    check_cut(data.sequence_length, data.max_target_sequence_length)
    sources = load_mix(data.mix, tokenizer.name, data.source_permutation_seed)
    dtype = data.dtype or default_dtype(vocab_size)
    sizes = shards.sizes(data.base, [s.path for s in sources])
    refuse(
        f"mix {data.mix}",
        [
            f"{s.uri(data.base)} does not exist"
            for s, size in zip(sources, sizes, strict=True)
            if size is None
        ],
        "upload the files, or correct data.base and the manifest",
    )
    known = [size for size in sizes if size is not None]
    samples = shards.sample(data.base, [s.path for s in sources], known)
    starts = _starts(samples, data.mix)
    faults = shards.faults(samples, dtype, vocab_size)
    refuse(f"mix {data.mix}", faults, "restore the files, or correct data.dtype")
    if data.check_eos:
        faults = missing_eos(data.base, samples, dtype, tokenizer.eos_id)
        remedy = "correct the tokenizer's eos_id, or set data.check_eos to false"
        refuse(f"mix {data.mix}", faults, remedy)
    cut = (shards.itemsize(dtype), data.sequence_length, data.max_target_sequence_length)
    index = Index(
        base=data.base,
        dtype=dtype,
        sequence_length=data.sequence_length,
        max_target_sequence_length=data.max_target_sequence_length,
        vocab_size=vocab_size,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        shards=tuple(
            Shard(s.path, s.label, size, start, instances_in(size - start, *cut), sample.digest)
            for s, size, start, sample in zip(sources, known, starts, samples, strict=True)
        ),
    )
    if index.instances == 0:
        refuse(f"mix {data.mix}", ["no file holds a whole instance"], "lower data.sequence_length")
    return index


def _starts(samples: Sequence[shards.Sample], mix: str) -> list[int]:
    """Where the tokens begin in each file. Raises UserError where only some have a .npy header."""
    headed = [s for s in samples if s.start]
    if headed and len(headed) < len(samples):
        refuse(
            f"mix {mix}",
            [f"{s.uri} has a .npy header" for s in headed],
            f"{len(samples) - len(headed)} other files are headerless: make them all alike",
        )
    return [s.start for s in samples]
