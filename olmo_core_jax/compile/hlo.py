"""Reading a compiled program's text: matrix FLOPs and collective bytes a device, loops counted as often as they run.

XLA's own cost analysis counts a loop's body once and leaves custom kernels out, so it says little about a scanned model.
Here every `while` whose trip count can be read off multiplies what is inside it; of a `conditional` the branch with most
matrix FLOPs counts, and among equals the one that receives most bytes.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from olmo_core_jax.errors import UserError

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+)(?: \(.*\) -> .*)? \{$")
_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|body|called_computations|to_apply)=\{?%?([\w.-]+)")
_BRANCHES = re.compile(
    r"(?:true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{([^}]*)\}"
)
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACT = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclass
class Counts:
    """matrix_flops: of dot and convolution, a multiply-add as two; collective_bytes: received, by kind.

    unknown_loops: loops whose trip count cannot be read off; they count once. kernels: custom calls by target.
    """

    matrix_flops: float = 0.0
    collective_bytes: Counter = field(default_factory=Counter)
    unknown_loops: int = 0
    kernels: Counter = field(default_factory=Counter)


@dataclass
class _Computation:
    shapes: dict[str, str] = field(default_factory=dict)
    ops: list[tuple[str, str, str]] = field(default_factory=list)


def count(text: str) -> Counts:
    """Counts of a compiled module's text (`compiled.as_text()`), for one device and one run of it."""
    computations, entry = _parse(text)
    counts = Counts()
    _add(computations, entry, 1, counts)
    return counts


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    found: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found.setdefault(header[2], _Computation())
            entry = header[2] if header[1] else entry
        elif current is not None and (op := _OP.match(line)):
            name, shape, kind, rest = op.groups()
            current.shapes[name] = shape
            current.ops.append((kind, shape, rest))
    if not entry:
        raise UserError(
            "the compiled program's text has no ENTRY computation: this XLA prints another format"
        )
    return found, entry


def _add(computations: dict[str, _Computation], name: str, times: int, counts: Counts) -> None:
    here = computations[name]
    for kind, shape, rest in here.ops:
        base = kind.removesuffix("-start")
        if kind in ("dot", "convolution"):
            counts.matrix_flops += times * _matrix_flops(kind, shape, rest, here.shapes)
        elif base in COLLECTIVES:
            size = _moved(base, kind, shape, rest, here.shapes)
            counts.collective_bytes[base] += times * cast(Any, size)  # typeshed: ints only
        elif kind == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', rest)
            counts.kernels[target[1] if target else "unknown"] += times
        inner = times
        if kind == "while":
            trips = _trip_count(computations, rest)
            counts.unknown_loops += trips is None
            inner = times * (trips or 1)
        if kind == "conditional":
            _add_dearest(computations, _branches(rest), times, counts)
        elif kind in ("while", "fusion", "call", "async-start", "custom-call"):
            # The last: collectives that a SparseCore carries out lie in a custom call's computation.
            for called in _CALLS.findall(rest):
                if called in computations:
                    _add(computations, called, inner, counts)


def _branches(rest: str) -> list[str]:
    found = [one or several for one, several in _BRANCHES.findall(rest)]
    return [name.strip().lstrip("%") for names in found for name in names.split(",")]


def _add_dearest(
    computations: dict[str, _Computation], names: list[str], times: int, counts: Counts
) -> None:
    branches = []
    for name in names:
        branches.append(Counts())
        _add(computations, name, times, branches[-1])
    dearest = max(branches, key=lambda c: (c.matrix_flops, sum(c.collective_bytes.values())))
    counts.matrix_flops += dearest.matrix_flops
    counts.collective_bytes += dearest.collective_bytes
    counts.unknown_loops += dearest.unknown_loops
    counts.kernels += dearest.kernels


def _trip_count(computations: dict[str, _Computation], rest: str) -> int | None:
    """What XLA states, or the one bound in the condition of a loop that counts up from 0 (as a scan's does)."""
    if stated := _TRIPS.search(rest):
        return int(stated[1])
    condition = computations.get(named[1]) if (named := _CONDITION.search(rest)) else None
    if condition is None:
        return None
    bounds = [
        int(value[1])
        for kind, shape, text in condition.ops
        if kind == "constant"
        and shape.startswith("s32[]")
        and (value := re.match(r"(\d+)\)", text))
    ]
    counts_up = any(kind == "compare" and "direction=LT" in text for kind, _, text in condition.ops)
    return bounds[0] if len(bounds) == 1 and counts_up else None


def _dims(shape: str) -> list[int]:
    match = _SHAPE.search(shape)
    return [int(d) for d in match[2].split(",") if d] if match else []


def _product(numbers) -> int:
    result = 1
    for n in numbers:
        result *= n
    return result


def _moved(base: str, kind: str, shape: str, rest: str, shapes: dict[str, str]) -> float:
    """Bytes that a device of a large ring receives: a result, for a sum twice over, for a scattered sum its operand.

    An asynchronous start returns (operands..., results...): the largest is taken.
    """
    if base == "reduce-scatter":
        shape = " ".join(shapes.get(name, "") for name in _operands(rest))
    parts = _sizes(shape)
    size = max(parts, default=0.0) if kind.endswith("-start") else sum(parts)
    return 2 * size if base == "all-reduce" else size


def _sizes(shape: str) -> list[float]:
    return [
        BITS.get(dtype, 0) / 8 * _product(int(d) for d in dims.split(",") if d)
        for dtype, dims in _SHAPE.findall(shape)
    ]


def _operands(rest: str) -> list[str]:
    return re.findall(r"%?([A-Za-z_][\w.-]*)(?=[,)]|$)", rest.partition("),")[0])


def _matrix_flops(kind: str, shape: str, rest: str, shapes: dict[str, str]) -> float:
    operands = _operands(rest)
    inline = _SHAPE.findall(rest.partition("),")[0])
    out = _product(_dims(shape))

    def operand(i: int) -> list[int]:
        if len(inline) > i:
            return [int(d) for d in inline[i][1].split(",") if d]
        return _dims(shapes.get(operands[i], ""))

    if kind == "dot":
        contracted = _CONTRACT.search(rest)
        lhs = operand(0)
        return (
            2.0 * out * _product(lhs[int(d)] for d in contracted[1].split(",") if d)
            if contracted
            else 0.0
        )
    labels = _LABELS.search(rest)
    if labels is None:
        return 0.0
    lhs, kernel, result = operand(0), operand(1), _dims(shape)
    pairs = _taps(rest, lhs, kernel, result, labels)
    places = _product(size for label, size in zip(labels[3], result, strict=True) if label in "bf")
    return 2.0 * places * kernel[labels[2].index("i")] * pairs


def _taps(rest: str, lhs, kernel, result, labels: re.Match) -> int:
    """Pairs of an output position and a kernel position that meet an input element, not padding or a gap.

    TPU programs write batched and transposed products as windows over which only such pairs count.
    """
    window = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}

    def of(name: str, i: int, default: str) -> str:
        return fields[name].split("x")[i] if name in fields else default

    pairs = 1
    for i in range(sum(label.isdigit() for label in labels[1])):
        before = int(of("pad", i, "0_0").split("_")[0])
        stride, gap, spread = (int(of(n, i, "1")) for n in ("stride", "lhs_dilate", "rhs_dilate"))
        extent = (lhs[labels[1].index(str(i))] - 1) * gap + 1
        where = (
            o * stride + k * spread - before
            for o in range(result[labels[3].index(str(i))])
            for k in range(kernel[labels[2].index(str(i))])
        )
        pairs *= sum(0 <= at < extent and at % gap == 0 for at in where)
    return pairs
