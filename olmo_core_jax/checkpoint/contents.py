"""Any checkpoint, whatever its format, as named arrays of our tree and a few counters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.formats import hf, hf_config, olmo_core, olmo_core_config
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.tensors import LazyArray
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.tree import flatten
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.recipes.schema import Model
from olmo_core_jax.storage import ranges

OURS, HF, NATIVE = "ours", "hf", "olmo_core"
MARKS = {OURS: "state/_METADATA", NATIVE: "model_and_optim/.metadata", HF: "config.json"}


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds. arrays: by name (`params/embed/weight`, `mu/...`, `count`).

    counters: what it says about itself. saved: checksums of arrays, where it has them.
    """

    path: str
    kind: str
    arrays: dict[str, LazyArray]
    counters: dict[str, Any]
    model: Model | None = None
    saved: dict[str, int] = field(default_factory=dict)


def kind_of(path: str) -> str:
    """`ours`, `hf` or `olmo_core`. Raises UserError where a folder is no checkpoint."""
    for kind, mark in MARKS.items():
        if ranges.size(storage.join(path, mark)) is not None:
            return kind
    raise UserError(f"{path} is no checkpoint: none of {', '.join(MARKS.values())} is in it")


def open_checkpoint(path: str) -> Contents:
    """Opens a checkpoint of any kind; nothing large is read. Raises UserError where it is not
    whole.
    """
    return {OURS: _ours, HF: _hf, NATIVE: _native}[kind_of(path)](path)


def _ours(path: str) -> Contents:
    step = OrbaxStep(path)
    section = step.meta.get("model")
    counters = {k: v for k, v in step.meta.items() if k not in ("checksums", "model", "surgery")}
    return Contents(
        path,
        OURS,
        {"/".join(p): step.lazy(p) for p in step.paths},
        counters,
        Model.model_validate(section) if section else None,
        step.meta.get("checksums", {}),
    )


def _hf(path: str) -> Contents:
    uri = storage.join(path, "config.json")
    cfg = hf_config.model_from_config(ranges.read_json(uri), uri)
    found = hf.open_hf(path, cfg)
    kinds = found.dtypes
    if len(kinds) > 1:
        raise UserError(f"{path} mixes dtypes {kinds}")
    params = hf.params_from_hf(found, kinds[0])
    return Contents(path, HF, dict(_named("params", params)), {"dtype": kinds[0]}, cfg)


def _native(path: str) -> Contents:
    uri = storage.join(path, "config.json")
    cfg = olmo_core_config.model_from_config(ranges.read_json(uri), uri)
    with_optimizer = any(
        name.startswith("optim.state.")
        for name in olmo_core.DistributedCheckpoint(storage.join(path, "model_and_optim")).specs()
    )
    native = olmo_core.open_native(path, cfg, optimizer=with_optimizer)
    arrays = dict(_named("params", native.params("float32")))
    if with_optimizer:
        for part in olmo_core.MOMENTS:
            arrays |= dict(_named(part, native.moments(part, "float32")))
    loader = native.trainer.get("data_loader") or {}
    counters = {
        "step": native.step,
        "adam_count": native.adam_step,
        "tokens_seen": native.trainer.get("global_train_tokens_seen"),
        "data": {k: v for k, v in loader.items() if isinstance(v, int | str)},
    }
    return Contents(path, NATIVE, arrays, counters, cfg)


def _named(part: str, tree: dict) -> Iterator[tuple[str, LazyArray]]:
    for path, lazy in flatten(tree):
        yield "/".join((part, *path)), lazy


def tensor_names(contents: Contents) -> dict[str, tuple[str, ...]]:
    """Array name -> what its tensors are called in Hugging Face's checkpoints, for messages."""
    if contents.model is None:
        return {}
    return {"/".join(("params", *leaf.path)): leaf.hf for leaf in leaves(contents.model)}
