"""OLMo-core's own checkpoints, read without PyTorch: parameters, both moments, counters.

step{N}/.metadata.json                 its presence makes the folder a checkpoint
step{N}/config.json                    the run's configuration
step{N}/train/rank0.pt                 the trainer's counters
step{N}/model_and_optim/.metadata      a pickle: where every piece of a tensor is
step{N}/model_and_optim/__*.distcp     the pieces, each as torch.save writes it
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.formats import olmo_core_config, pickles, torch_zip
from olmo_core_jax.checkpoint.tensors import Spec, check_nothing_left, lazy_tree
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.weights import Leaf, leaves
from olmo_core_jax.recipes.schema import Model
from olmo_core_jax.storage import ranges

log = logging.getLogger("olmo")

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass
class DistributedCheckpoint:
    """The tensors of a torch distributed checkpoint, as a Source. Only its metadata is read at
    first.
    """

    where: str
    _specs: dict[str, Spec] = field(default_factory=dict)
    _pieces: dict[str, list[Piece]] = field(default_factory=dict)
    _opened: dict[Piece, torch_zip.SavedTensor] = field(default_factory=dict)

    def __post_init__(self):
        uri = storage.join(self.where, ".metadata")
        metadata = pickles.load(ranges.read_whole(uri), uri, pickles.METADATA)
        try:
            self._list(metadata)
        except (AttributeError, TypeError, KeyError) as e:
            raise UserError(
                f"{uri} is not the metadata of a distributed checkpoint ({e})"
            ) from None

    def _list(self, metadata: Any) -> None:
        for name, entry in metadata.state_dict_metadata.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                dtype = _dtype_of(entry.properties)
                self._specs[name] = Spec(dtype, tuple(entry.size))
                self._pieces[name] = []
        boxes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, entry in metadata.state_dict_metadata.items()
            if name in self._specs
            for chunk in entry.chunks
        }
        for index, info in metadata.storage_data.items():
            if index.fqn in self._specs:
                offsets = tuple(index.offset or ())
                sizes = boxes[index.fqn, offsets]
                piece = Piece(offsets, sizes, info.relative_path, info.offset, info.length)
                self._pieces[index.fqn].append(piece)
        for name, spec in self._specs.items():
            self._require_covered(name, spec)
        self._require_files()

    def _require_covered(self, name: str, spec: Spec) -> None:
        there = sum(int(np.prod(p.sizes, dtype=np.int64)) for p in self._pieces[name])
        if there != int(np.prod(spec.shape, dtype=np.int64)):
            raise UserError(f"{self.where}: tensor {name} {spec}: its pieces hold {there} values")

    def _require_files(self) -> None:
        ends: dict[str, int] = {}
        for piece in (p for pieces in self._pieces.values() for p in pieces):
            ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.length)
        for file, end in sorted(ends.items()):
            uri = storage.join(self.where, file)
            there = ranges.size(uri)
            if there is None:
                raise UserError(f"{uri} is missing: {end} bytes of it are listed")
            if there < end:
                raise UserError(f"{uri} is truncated: it has {there} of at least {end} bytes")

    def specs(self) -> dict[str, Spec]:
        return self._specs

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) put together from the pieces that hold them."""
        spec, pieces = self._specs[name], self._pieces[name]
        if not spec.shape:
            return self._open(name, pieces[0]).rows(0, 1)
        out = np.empty((stop - start, *spec.shape[1:]), spec.dtype)
        for piece in pieces:
            first = max(start, piece.offsets[0])
            last = min(stop, piece.offsets[0] + piece.sizes[0])
            if first < last:
                rows = self._open(name, piece).rows(
                    first - piece.offsets[0], last - piece.offsets[0]
                )
                columns = [
                    slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.sizes[1:], strict=True)
                ]
                out[(slice(first - start, last - start), *columns)] = rows
        return out

    def _open(self, name: str, piece: Piece) -> torch_zip.SavedTensor:
        if piece not in self._opened:
            uri = storage.join(self.where, piece.file)
            tensor = torch_zip.open_tensor(uri, piece.start, piece.length, f"tensor {name}")
            if tensor.shape != piece.sizes or tensor.dtype != self._specs[name].dtype:
                raise UserError(
                    f"{uri}: the piece of {name} is {Spec(tensor.dtype, tensor.shape)}, "
                    f"the metadata says {Spec(self._specs[name].dtype, piece.sizes)}"
                )
            self._opened[piece] = tensor
        return self._opened[piece]


def _dtype_of(properties: Any) -> np.dtype:
    """TensorProperties pickles itself as a tuple whose first entry is the dtype."""
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, np.dtype):
        raise TypeError(f"dtype {dtype!r}")
    return dtype


@dataclass(frozen=True)
class NativeCheckpoint:
    """A native checkpoint that fits a recipe's model. adam_step: of the optimizer, skipped
    updates excepted.
    """

    path: str
    cfg: Model
    tensors: DistributedCheckpoint
    step: int | None
    adam_step: int | None
    trainer: dict

    def params(self, dtype: str) -> dict:
        """Our parameter tree of LazyArrays."""
        return lazy_tree(self.tensors, leaves(self.cfg), parameter_names, dtype)

    def moments(self, which: str, dtype: str) -> dict:
        """The tree of `mu` or `nu` as LazyArrays."""
        kind = MOMENTS[which]
        return lazy_tree(
            self.tensors, leaves(self.cfg), lambda leaf: state_names(leaf, kind), dtype
        )


def parameter_names(leaf: Leaf) -> tuple[str, ...]:
    """Names of a leaf's tensors in a native checkpoint."""
    return tuple(f"model.{name}" for name in leaf.olmo_core)


def state_names(leaf: Leaf, kind: str) -> tuple[str, ...]:
    """Names of a leaf's optimizer tensors: kind is exp_avg, exp_avg_sq or step."""
    return tuple(f"optim.state.{name}.{kind}" for name in leaf.olmo_core)


def open_native(path: str, cfg: Model, *, optimizer: bool = True) -> NativeCheckpoint:
    """Checks a native checkpoint (step{N} folder, gs:// or https://) against the recipe's model.

    Raises UserError where it is not whole, is of another model, or (optimizer) lacks the
    optimizer's state.
    """
    if ranges.size(storage.join(path, ".metadata.json")) is None:
        raise UserError(f"{path} is not a whole OLMo-core checkpoint: it has no .metadata.json")
    config = storage.join(path, "config.json")
    if ranges.size(config) is not None:
        olmo_core_config.check_config(ranges.read_json(config), cfg, config)
    tensors = DistributedCheckpoint(storage.join(path, "model_and_optim"))
    table = leaves(cfg)
    used = {name for leaf in table for name in parameter_names(leaf)}
    kinds = [*MOMENTS.values(), "step"]
    used |= {name for leaf in table for kind in kinds for name in state_names(leaf, kind)}
    check_nothing_left(tensors, used)
    trainer = trainer_state(path)
    step = trainer.get("global_step")
    if step is None and (found := re.fullmatch(r"step(\d+)", path.rstrip("/").rpartition("/")[2])):
        step = int(found[1])
    adam = _adam_step(tensors, table) if optimizer else None
    return NativeCheckpoint(path, cfg, tensors, step, adam, trainer)


def _adam_step(tensors: DistributedCheckpoint, table: list[Leaf]) -> int:
    """The one step that all parameters have. Raises UserError where there is none, or several."""
    values = {}
    for leaf in table:
        for name in state_names(leaf, "step"):
            if name not in tensors.specs():
                raise UserError(
                    f"{tensors.where}: {name} is missing: no optimizer state was saved there"
                )
            values[float(tensors.read(name, 0, 1)[0])] = name
    if len(values) != 1 or not next(iter(values)).is_integer():
        raise UserError(f"{tensors.where}: parameters have different Adam steps: {values}")
    return int(next(iter(values)))


def trainer_state(path: str) -> dict:
    """Counters of train/rank0.pt; empty, with a line in the log, where they cannot be had."""
    uri = storage.join(path, "train", "rank0.pt")
    try:
        length = ranges.size(uri)
        if length is None:
            raise UserError(f"{uri} does not exist")
        state = torch_zip.load_pickle(uri, length)
    except UserError as e:
        log.warning("the trainer's counters are unknown: %s", e)
        return {}
    return dict(state) if isinstance(state, Mapping) else {}
