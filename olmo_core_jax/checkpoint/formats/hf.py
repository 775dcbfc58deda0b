"""Olmo 3 in Hugging Face's form: a folder of safetensors, config.json and tokenizer files, both
ways, in pieces.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.formats import hf_config
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.formats.safetensors import (
    SafetensorsFolder,
    SafetensorsWriter,
    index_json,
    split_shards,
)
from olmo_core_jax.checkpoint.tensors import (
    IN_FLIGHT,
    Spec,
    Where,
    all_finite,
    check_nothing_left,
    lazy_tree,
    numpy_dtype,
    part_checksum,
    rounded,
)
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.weights import Leaf, leaves
from olmo_core_jax.recipes.schema import Model, Tokenizer
from olmo_core_jax.storage import ranges

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class HFCheckpoint:
    """An HF folder that fits a recipe's model: its tensors and its config."""

    folder: str
    tensors: SafetensorsFolder
    config: dict
    cfg: Model

    @property
    def rows(self) -> int:
        """Rows of the embedding and the head in the checkpoint."""
        return self.tensors.specs()[leaves(self.cfg)[0].hf[0]].shape[0]

    @property
    def nbytes(self) -> int:
        """Of all tensors as they are stored."""
        return sum(spec.nbytes for spec in self.tensors.specs().values())

    @property
    def dtypes(self) -> list[str]:
        return sorted({spec.dtype.name for spec in self.tensors.specs().values()})


def open_hf(folder: str, cfg: Model) -> HFCheckpoint:
    """Checks an HF folder against the recipe's model; no weight is read yet.

    Raises UserError where the config differs, a file is missing or not whole, a tensor is
    missing, extra or misshapen.
    """
    uri = storage.join(folder, "config.json")
    if ranges.size(uri) is None:
        raise UserError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")
    config = ranges.read_json(uri)
    hf_config.check_config(config, cfg, uri)
    tensors = SafetensorsFolder(folder)
    check_nothing_left(tensors, {name for leaf in leaves(cfg) for name in leaf.hf})
    found = HFCheckpoint(folder, tensors, config, cfg)
    _check_vocabulary(found)
    return found


def _check_vocabulary(found: HFCheckpoint) -> None:
    specs, table = found.tensors.specs(), [leaf for leaf in leaves(found.cfg) if leaf.vocabulary]
    for name in (leaf.hf[0] for leaf in table):
        if name not in specs:
            raise UserError(f"{found.folder}: tensor {name} is missing")
        rows = specs[name].shape[0]
        if rows != found.config["vocab_size"]:
            raise UserError(
                f"{found.folder}: tensor {name} has {rows} rows, "
                f"config.json says vocab_size {found.config['vocab_size']}"
            )
    tokenizer = storage.join(found.folder, "tokenizer.json")
    if ranges.size(tokenizer) is not None:
        largest = largest_token_id(ranges.read_json(tokenizer))
        if largest >= found.rows:
            raise UserError(
                f"{found.folder}: the tokenizer has token id {largest}, "
                f"the embedding only {found.rows} rows"
            )


def largest_token_id(tokenizer: Mapping) -> int:
    """Of a parsed tokenizer.json."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return max([*ids, *(token["id"] for token in tokenizer.get("added_tokens") or [])], default=-1)


def params_from_hf(found: HFCheckpoint, dtype: str, *, allow_lossy: bool = False) -> dict:
    """Our parameter tree of LazyArrays over an HF checkpoint; missing padding rows become zeros."""
    return lazy_tree(
        found.tensors, leaves(found.cfg), lambda leaf: leaf.hf, dtype, allow_lossy=allow_lossy
    )


@dataclass
class Export:
    """What an export wrote. changed: values that rounding to the export's dtype altered."""

    folder: str
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    dtype: str = ""
    changed: int = 0


def export_hf(
    step: OrbaxStep,
    cfg: Model,
    tokenizer: Tokenizer,
    folder: str,
    *,
    context: int,
    dtype: str | None = None,
    rows: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    section: str = "params",
) -> Export:
    """Writes a step's parameters as an HF checkpoint that transformers loads as it is, and
    returns what was written.

    dtype: None keeps the checkpoint's; another one is rounded to, and the changed values are
    counted. rows: of the embedding and head (None: all, cfg.vocab_size: without the padding).
    context: longest sequence for config.json. The index, or config.json, is written last: an
    interrupted export is never taken for a whole one.
    """
    target = Path(storage.local_path(folder))
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder for the export")
    rows = cfg.padded_vocab_size if rows is None else rows
    if not cfg.vocab_size <= rows <= cfg.padded_vocab_size:
        raise UserError(
            f"an export of {rows} vocabulary rows: "
            f"the model has {cfg.vocab_size} to {cfg.padded_vocab_size}"
        )
    table = leaves(cfg)
    require_shapes(step, table, section)
    kinds = {step.array((section, *leaf.path)).dtype.numpy_dtype.name for leaf in table}
    if dtype is None and len(kinds) > 1:
        raise UserError(f"{step.where} mixes dtypes {sorted(kinds)}; name one for the export")
    dtype = dtype or kinds.pop()
    specs = _export_specs(table, numpy_dtype(dtype), rows)
    shards = split_shards(specs, shard_bytes)
    target.mkdir(parents=True, exist_ok=True)
    export = Export(folder, list(shards), sum(spec.nbytes for spec in specs.values()), dtype)
    _write_tensors(step, table, section, target, shards, specs, export)
    tokenizer_folder = tokenizer.path
    if tokenizer_folder:
        export.files += copy_tokenizer(tokenizer_folder, target)
    if len(shards) > 1:
        storage.write_bytes(
            str(target / "model.safetensors.index.json"), index_json(shards, export.bytes)
        )
        export.files.append("model.safetensors.index.json")
    config = hf_config.config_from_model(
        cfg,
        rows=rows,
        context=context,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        dtype=dtype,
    )
    storage.write_json(str(target / "config.json"), config)
    export.files.append("config.json")
    return export


def require_shapes(step: OrbaxStep, table: list[Leaf], section: str) -> None:
    """Raises UserError naming the first array of a step that is not the recipe's model's."""
    for leaf in table:
        found = tuple(step.array((section, *leaf.path)).shape)
        if found != leaf.shape:
            raise UserError(
                f"{step.where}: {section}.{leaf.name} is {list(found)}, the recipe's model has "
                f"{list(leaf.shape)}; name the recipe that this checkpoint was trained with"
            )


def _export_specs(table: list[Leaf], dtype: np.dtype, rows: int) -> dict[str, Spec]:
    """name -> dtype and shape, in the order of the model: embedding, layers from 0, final norm,
    head.
    """
    shapes = {
        name: (rows, *leaf.tensor_shape[1:]) if leaf.vocabulary else leaf.tensor_shape
        for leaf in table
        for name in leaf.hf
    }

    def order(name: str) -> tuple:
        parts = name.split(".")
        place = ("embed_tokens", "layers", "norm").index(parts[1]) if parts[0] == "model" else 3
        return place, int(parts[2]) if parts[1] == "layers" else 0, name

    return {name: Spec(dtype, shapes[name]) for name in sorted(shapes, key=order)}


def _write_tensors(step, table, section, target: Path, shards, specs, export: Export) -> None:
    writers = {shard: SafetensorsWriter(target / shard, group) for shard, group in shards.items()}
    owner: dict[str, SafetensorsWriter] = {
        n: writers[shard] for shard, group in shards.items() for n in group
    }
    try:
        _write_pieces(step, table, section, owner, specs, export)
        for writer in writers.values():
            writer.close()
    except BaseException as e:
        for writer in writers.values():
            writer.abandon()
        if isinstance(e, OSError):
            raise UserError(f"export {export.folder} cannot be written: {e.strerror}") from None
        raise


def _write_pieces(step: OrbaxStep, table: list[Leaf], section, owner, specs, export) -> None:
    """Moves every piece of every array; the arrays' checksums are compared at the end."""

    def move(job: tuple[Leaf, Where]) -> tuple[int, int]:
        leaf, where = job
        lazy = step.lazy((section, *leaf.path))
        block = lazy.read(where)
        if not all_finite(block):
            raise UserError(f"{step.where}: array {leaf.name} holds a value that is not finite")
        changed = _write_block(leaf, where, block, owner, specs)
        return part_checksum(block, where, lazy.shape), changed

    jobs = [(leaf, w) for leaf in table for w in step.lazy((section, *leaf.path)).pieces()]
    sums: Counter[tuple[str, ...]] = Counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for (leaf, _), (total, changed) in zip(jobs, pool.map(move, jobs), strict=True):
            sums[section, *leaf.path] += total
            export.changed += changed
    for path, total in sums.items():
        step.require_checksum(path, total)


def _write_block(leaf: Leaf, where: Where, block: np.ndarray, owner, specs) -> int:
    """Writes one piece into the tensors that it belongs to; returns how many values changed."""
    cycles, rows = (where[0], where[1]) if leaf.stacked else (slice(0, 1), where[0])
    changed = 0
    for name, values in zip(leaf.hf[cycles], block if leaf.stacked else [block], strict=True):
        spec = specs[name]
        values = values[: max(0, spec.shape[0] - rows.start)]  # a release ends before the padding
        cast, altered = rounded(values, spec.dtype)
        owner[name].write(name, rows.start, cast)
        changed += altered
    return changed


def copy_tokenizer(source: str, target: Path) -> list[str]:
    """Copies a tokenizer's files into a folder and returns their names."""
    copied = []
    for entry in storage.list_dir(source):
        if entry.name in TOKENIZER_FILES:
            if storage.is_remote(source):
                (target / entry.name).write_bytes(
                    storage.read_bytes(storage.join(source, entry.name))
                )
            else:
                shutil.copyfile(Path(source) / entry.name, target / entry.name)
            copied.append(entry.name)
    return copied
