"""The index: every shard of a mix with its size, its instances and a digest of what is in it.

Instances never cross files; each file's remainder is dropped (OLMo-core's NumpyFSLDataset), so
instance i of the data set is found from the running sum of instances a file alone.
"""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.data.problems import refuse
from olmo_core_jax.errors import UserError

VERSION = 1
DTYPES = ("uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class Shard:
    """One file of a mix.

    bytes: its size; start: bytes of a .npy header before the tokens, 0 where there is none;
    instances: whole ones that it holds; digest: of sampled windows (shards.py).
    """

    path: str
    label: str
    bytes: int
    start: int
    instances: int
    digest: str


@dataclass(frozen=True)
class Place:
    """Where an instance is: its tokens begin at byte `offset` of shard number `file`."""

    instance: int
    file: int
    label: str
    uri: str
    offset: int


@dataclass(frozen=True)
class Index:
    """A mix cut into instances. base: folder, gs:// or https:// that the shards' paths are under."""

    base: str
    dtype: str
    sequence_length: int
    max_target_sequence_length: int | None
    vocab_size: int
    eos_id: int
    pad_id: int
    bos_id: int | None
    shards: tuple[Shard, ...] = field(repr=False)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def chunk(self) -> int:
        """Consecutive instances that the shuffle keeps together."""
        return (self.max_target_sequence_length or self.sequence_length) // self.sequence_length

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """int64[files]: instances up to and including each file."""
        return np.cumsum([s.instances for s in self.shards], dtype=np.int64)

    @property
    def instances(self) -> int:
        return int(self.ends[-1])

    @property
    def tokens(self) -> int:
        return self.instances * self.sequence_length

    def place(self, instance: int) -> Place:
        """Raises IndexError outside the data set."""
        if not 0 <= instance < self.instances:
            raise IndexError(f"instance {instance} of {self.instances}")
        file = int(np.searchsorted(self.ends, instance, side="right"))
        shard = self.shards[file]
        within = instance - (int(self.ends[file]) - shard.instances)
        offset = shard.start + within * self.sequence_length * self.itemsize
        return Place(instance, file, shard.label, self.uri(shard), offset)

    def uri(self, shard: Shard) -> str:
        return storage.join(self.base, shard.path)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of names, sizes, sampled contents and the cut; the same for a mirror elsewhere."""
        text = f"v{VERSION} {self.dtype} {self.sequence_length} {self.max_target_sequence_length}\n"
        text += "".join(
            f"{_basename(s.path)} {s.bytes} {s.start} {s.digest}\n" for s in self.shards
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @functools.cached_property
    def olmo_core_fingerprint(self) -> str:
        """OLMo-core 3.0.0's own fingerprint (v2.0) of the same files: names and sizes only."""
        fields = {
            "vocab_size": self.vocab_size,
            "pad_token_id": self.pad_id,
            "eos_token_id": self.eos_id,
            "dtype": f"<class 'numpy.{self.dtype}'>",
            "max_target_sequence_length": self.max_target_sequence_length,
            "bos_token_id": self.bos_id,
        }
        text = "class=NumpyFSLDataset" + "".join(f"{k}={v}," for k, v in fields.items())
        text += "".join(f"path={_basename(s.path)},size={s.bytes}," for s in self.shards)
        return hashlib.sha256(text.encode()).hexdigest()

    def at(self, base: str) -> "Index":
        """The same data under another folder or bucket."""
        return replace(self, base=base)

    def labels(self) -> dict[str, int]:
        """Instances by label, in order of first appearance."""
        counts: dict[str, int] = {}
        for shard in self.shards:
            counts[shard.label] = counts.get(shard.label, 0) + shard.instances
        return counts


def default_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds the largest token id, as OLMo-core chooses it."""
    return next(d for d in DTYPES if vocab_size - 1 <= np.iinfo(d).max)


def instances_in(size: int, itemsize: int, sequence_length: int, max_target: int | None) -> int:
    """Instances in `size` bytes: as many whole windows of the longest target as fit, each cut."""
    window = max_target or sequence_length
    return size // (itemsize * window) * (window // sequence_length)


def index_uri(folder: str) -> str:
    return storage.join(folder, "index.json")


def save_index(folder: str, index: Index) -> None:
    """Writes index.json under `folder`. The same again is no change; another one is refused."""
    uri = index_uri(folder)
    if storage.exists(uri):
        there = load_index(folder)
        if there.fingerprint != index.fingerprint or there.labels() != index.labels():
            raise UserError(
                f"{uri} describes other data (fingerprint {there.fingerprint[:12]}, now "
                f"{index.fingerprint[:12]}): {_difference(there, index)}; "
                "restore the data, or use a new run root"
            )
        return
    content = asdict(index) | {
        "format": "olmo-core-jax index",
        "version": VERSION,
        "instances": index.instances,
        "fingerprint": index.fingerprint,
        "olmo_core_fingerprint": index.olmo_core_fingerprint,
    }
    # One line a shard keeps 12,000 of them readable and diffable.
    shards = ",\n  ".join(json.dumps(s) for s in content.pop("shards"))
    head = json.dumps(content, indent=1)[:-2]
    storage.write_text(uri, f'{head},\n "shards": [\n  {shards}\n ]\n}}\n')


def load_index(folder: str, base: str | None = None, sequence_length: int | None = None) -> Index:
    """The index that build_index wrote under `folder`, its shards under `base` where that is given.

    Raises UserError: missing, of another version, damaged, or made for another sequence length.
    """
    uri = index_uri(folder)
    try:
        content = storage.read_json(uri)
    except FileNotFoundError:
        raise UserError(f"{uri} does not exist: run build_index first") from None
    if not isinstance(content, dict) or content.get("format") != "olmo-core-jax index":
        raise UserError(f"{uri} is not an index of this project")
    if content["version"] != VERSION:
        raise UserError(
            f"{uri} is an index of version {content['version']}, this program reads {VERSION}: "
            "build it again in a new run root, or use the program that wrote it"
        )
    fields = {k: content[k] for k in Index.__dataclass_fields__ if k != "shards"}
    index = Index(**fields, shards=tuple(Shard(**s) for s in content["shards"]))
    if index.fingerprint != content["fingerprint"]:
        raise UserError(f"{uri} is damaged or edited: its fingerprint is not that of its content")
    if sequence_length not in (None, index.sequence_length):
        raise UserError(
            f"{uri} is cut at sequence length {index.sequence_length}, the recipe says "
            f"{sequence_length}: build an index for it in a new run root"
        )
    return index if base is None else index.at(base)


def check_cut(sequence_length: int, max_target: int | None) -> None:
    """Raises UserError where the longest target is not a multiple of the sequence length."""
    if max_target is not None and (max_target < sequence_length or max_target % sequence_length):
        refuse(
            "recipe",
            [f"max_target_sequence_length {max_target} is not a multiple of {sequence_length}"],
            "correct data.max_target_sequence_length",
        )


def _difference(there: Index, now: Index) -> str:
    old = {s.path: s for s in there.shards}
    for shard in now.shards:
        was = old.pop(shard.path, None)
        if was is None:
            return f"{shard.path} is new"
        if was.bytes != shard.bytes:
            return f"{shard.path} has {shard.bytes} bytes, was {was.bytes}"
        if was.digest != shard.digest:
            return f"{shard.path} has other content"
    return f"{next(iter(old))} is gone" if old else "files are in another order, or cut otherwise"


def _basename(path: str) -> str:
    return path.rpartition("/")[2]
