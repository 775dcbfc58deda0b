"""`olmo-jax checkpoint ls | show | diff | verify`: what is in a checkpoint, and whether it is
right.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint import contents, layout
from olmo_core_jax.checkpoint.contents import Contents, open_checkpoint
from olmo_core_jax.checkpoint.tensors import LazyArray, part_checksum
from olmo_core_jax.errors import UserError
from olmo_core_jax.terminal import text_table


@dataclass(frozen=True)
class Listed:
    """One step under a folder. problem: why it cannot be used, empty for a good one."""

    folder: str
    step: int
    bytes: int
    stage: str
    tokens_seen: int | None
    adam_count: int | None
    problem: str


@dataclass(frozen=True)
class Listing:
    steps: list[Listed]

    def __str__(self) -> str:
        rows = [
            (
                s.folder,
                s.step,
                s.bytes,
                s.stage,
                _or_dash(s.tokens_seen),
                _or_dash(s.adam_count),
                s.problem or "good",
            )
            for s in self.steps
        ]
        return text_table(rows, ("folder", "step", "bytes", "stage", "tokens", "Adam", "state"))

    def json(self) -> list[dict]:
        return [asdict(s) for s in self.steps]


def _or_dash(value: int | None) -> Any:
    return "-" if value is None else value


def list_checkpoints(folder: str) -> Listing:
    """Every step under a checkpoint folder, a stage's folder or a run root, good or not."""
    found = []
    for place in _checkpoint_folders(folder):
        for step, name in layout.names_of_steps(place):
            if name != str(step):
                reason, meta = f"{name}: it was never committed, or was moved aside", {}
            else:
                reason = layout.problem(place, step) or ""
                meta = {} if reason else layout.read_meta(place, step)
            size = sum(n for _, n in storage.walk(storage.join(place, name)))
            found.append(
                Listed(
                    place,
                    step,
                    size,
                    meta.get("stage", "-"),
                    meta.get("tokens_seen"),
                    meta.get("adam_count"),
                    reason,
                )
            )
    if not found:
        raise UserError(f"there is no checkpoint under {folder}")
    return Listing(found)


def _checkpoint_folders(folder: str) -> list[str]:
    entries = [e.name for e in storage.list_dir(folder) if e.is_dir]
    if any(name.partition(".")[0].isdigit() for name in entries):
        return [folder]
    if "checkpoints" in entries:
        return [storage.join(folder, "checkpoints")]
    inner = [storage.join(folder, name, "checkpoints") for name in entries]
    return [place for place in inner if storage.list_dir(place)]


@dataclass(frozen=True)
class Shown:
    """A checkpoint's counters, and its arrays: (name, dtype, shape, bytes, checksum)."""

    path: str
    kind: str
    counters: dict[str, Any]
    model: dict[str, Any] | None
    arrays: list[tuple[str, str, str, int, str]]

    def __str__(self) -> str:
        lines = [f"{self.path} ({self.kind})"]
        lines += [f"  {name}: {value}" for name, value in self.counters.items()]
        if self.model:
            lines.append("  model: " + ", ".join(f"{k} {v}" for k, v in self.model.items()))
        total = sum(row[3] for row in self.arrays)
        lines.append(text_table(self.arrays, ("array", "dtype", "shape", "bytes", "checksum")))
        lines.append(f"{len(self.arrays)} arrays, {total:,} bytes")
        return "\n".join(lines)

    def json(self) -> dict:
        return asdict(self)


def show(path: str) -> Shown:
    """What is in a checkpoint of any kind. Reads no array but the 0-d ones."""
    found = open_checkpoint(path)
    counters = dict(found.counters)
    for name, lazy in found.arrays.items():
        if lazy.ndim == 0:
            counters[f"{name} (in the state)"] = np.asarray(lazy).item()
    rows = [
        (
            name,
            a.dtype.name,
            "x".join(map(str, a.shape)) or "-",
            a.nbytes,
            f"{found.saved[name]:08x}" if name in found.saved else "-",
        )
        for name, a in sorted(found.arrays.items())
    ]
    model = found.model.model_dump(mode="json") if found.model else None
    return Shown(path, found.kind, counters, model, rows)


@dataclass(frozen=True)
class ArrayDiff:
    """One array of two checkpoints. tensor: the one that differs most, as Hugging Face calls it."""

    name: str
    different: int
    size: int
    max_abs: float
    relative: float
    tensor: str


@dataclass(frozen=True)
class Diff:
    """relative: largest difference over the array's largest value in b."""

    a: str
    b: str
    arrays: list[ArrayDiff]
    only_a: list[str]
    only_b: list[str]
    shapes: list[str]
    counters: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Every array is in both and has the same bits. Counters may differ."""
        return not (
            self.only_a or self.only_b or self.shapes or any(d.different for d in self.arrays)
        )

    def __str__(self) -> str:
        differing = [d for d in self.arrays if d.different]
        lines = [
            f"{self.a} against {self.b}: "
            f"{len(self.arrays) - len(differing)} of {len(self.arrays)} arrays bit-equal"
        ]
        lines += [f"  only in a: {text}" for text in _by_section(self.only_a)]
        lines += [f"  only in b: {text}" for text in _by_section(self.only_b)]
        lines += [f"  {text}" for text in self.shapes]
        lines += [f"  {name}: {x} in a, {y} in b" for name, (x, y) in self.counters.items()]
        rows = [(d.name, d.different, d.size, d.max_abs, d.relative, d.tensor) for d in differing]
        if rows:
            lines.append(
                text_table(
                    rows, ("array", "values differ", "of", "max |a-b|", "relative", "most in")
                )
            )
        return "\n".join(lines)

    def json(self) -> dict:
        return asdict(self)


def _by_section(names: list[str]) -> list[str]:
    """One line for the arrays of a section such as `mu`, one for every array outside."""
    sections = Counter(name.partition("/")[0] for name in names)
    return [f"{n} arrays of {name}" if n > 1 else name for name, n in sections.items()]


def diff(a: str, b: str) -> Diff:
    """Compares two checkpoints, array by array, whatever kind each is."""
    one, other = open_checkpoint(a), open_checkpoint(b)
    both = [name for name in one.arrays if name in other.arrays]
    mismatched = [n for n in both if one.arrays[n].shape != other.arrays[n].shape]
    names = contents.tensor_names(one) or contents.tensor_names(other)
    keys = [k for k in one.counters if k in other.counters and one.counters[k] != other.counters[k]]
    return Diff(
        a,
        b,
        [_diff(n, one.arrays[n], other.arrays[n], names) for n in both if n not in mismatched],
        sorted(one.arrays.keys() - other.arrays.keys()),
        sorted(other.arrays.keys() - one.arrays.keys()),
        [
            f"{n}: {list(one.arrays[n].shape)} in a, {list(other.arrays[n].shape)} in b"
            for n in mismatched
        ],
        {k: (one.counters[k], other.counters[k]) for k in keys},
    )


def _diff(name: str, a: LazyArray, b: LazyArray, names: dict[str, tuple[str, ...]]) -> ArrayDiff:
    different, largest, scale, worst = 0, 0.0, 0.0, 0
    for where in a.pieces():
        x, y = a.read(where).astype(np.float64), b.read(where).astype(np.float64)
        different += int(np.count_nonzero(~(x == y)))  # NaN differs from itself
        gaps = np.abs(x - y)
        at = np.unravel_index(int(np.argmax(gaps)), gaps.shape)  # argmax finds a NaN first
        if gaps[at] > largest or np.isnan(gaps[at]):
            largest, worst = float(gaps[at]), (where[0].start + int(at[0]) if where else 0)
        scale = max(scale, float(np.max(np.abs(y), initial=0.0)))
    tensors = names.get("/".join(("params", *name.split("/")[1:])), ())
    tensor = "" if not tensors else tensors[worst if len(tensors) > 1 else 0]
    return ArrayDiff(
        name, different, a.size, largest, largest / scale if scale else largest, tensor
    )


@dataclass(frozen=True)
class Verified:
    """problems: one line an array that cannot be read, is not what was saved, or is not finite."""

    path: str
    kind: str
    arrays: int
    bytes: int
    with_checksum: int
    problems: list[str]

    def __str__(self) -> str:
        state = "sound" if not self.problems else "NOT sound"
        head = (
            f"{self.path} ({self.kind}): {state}; {self.arrays} arrays, {self.bytes:,} bytes read, "
            f"{self.with_checksum} compared with a stored checksum"
        )
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])

    def json(self) -> dict:
        return asdict(self)


def verify(path: str) -> Verified:
    """Reads every array of a checkpoint from end to end."""
    found = open_checkpoint(path)
    problems = [text for name in found.arrays if (text := _problem(found, name))]
    checked = sum(name in found.saved for name in found.arrays)
    if found.kind == contents.NATIVE:
        checked = len(found.arrays)  # every piece has a CRC-32 of its own, compared as it is read
    total = sum(a.nbytes for a in found.arrays.values())
    return Verified(path, found.kind, len(found.arrays), total, checked, problems)


def _problem(found: Contents, name: str) -> str | None:
    lazy, total, finite = found.arrays[name], 0, True
    try:
        for where in lazy.pieces():
            values = lazy.read(where)
            finite = finite and bool(np.all(np.isfinite(values)))
            total += part_checksum(values, where, lazy.shape)
    except UserError as e:
        return str(e)
    if name in found.saved and found.saved[name] != total % 2**32:
        now, then = f"{total % 2**32:08x}", f"{found.saved[name]:08x}"
        return f"{name} is not what was saved: its checksum is {now}, not {then}"
    return None if finite else f"{name} holds a value that is not finite"
