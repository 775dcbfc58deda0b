"""Is the data still what the index says? Asked before training; all faults are told at once."""

from olmo_core_jax.data import shards
from olmo_core_jax.data.eos import missing_eos
from olmo_core_jax.data.index import Index
from olmo_core_jax.data.order import Order
from olmo_core_jax.data.problems import refuse
from olmo_core_jax.data.stage_data import epochs_needed
from olmo_core_jax.recipes import schema


def preflight(index: Index, order: Order, section: schema.Stage, stage: str) -> dict[str, float]:
    """Checks every shard of `index` where it lies now, and that there are enough for the stage.

    Sizes, sampled contents, ids in the vocabulary, EOS. Returns figures for the record.
    Raises UserError that names every shard at fault.
    """
    epochs = epochs_needed(order, section, stage)
    for epoch in range(1, epochs + 1):
        order.epoch(epoch)  # refuses an order that is missing or of another length
    paths = [s.path for s in index.shards]
    sizes = shards.sizes(index.base, paths)
    problems = []
    for shard, size in zip(index.shards, sizes, strict=True):
        if size is None:
            problems.append(f"{index.uri(shard)} is missing")
        elif size != shard.bytes:
            problems.append(
                f"{index.uri(shard)} has {size} bytes, {shard.bytes} when it was indexed"
            )
    remedy = "restore the files that were indexed, or build an index in a new run root"
    refuse(f"{stage} data", problems, remedy)
    samples = shards.sample(index.base, paths, [s.bytes for s in index.shards])
    problems = [
        f"{sample.uri} has other content than when it was indexed"
        for shard, sample in zip(index.shards, samples, strict=True)
        if sample.digest != shard.digest
    ]
    problems += shards.faults(samples, index.dtype, index.vocab_size)
    if section.data.check_eos:
        problems += missing_eos(index.base, samples, index.dtype, index.eos_id)
    refuse(f"{stage} data", problems, remedy)
    return {"files": len(paths), "instances": index.instances, "epochs": epochs}
