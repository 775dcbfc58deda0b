"""Are two models the same function? Numbers, a verdict, and the first place where they part.

Names and shapes prove nothing: two tensors of one shape may be swapped. So the same tokens go
through both sides and everything is compared: the logits at every position, and the output of
every part of every layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

POSITIONS_AT_ONCE = 512


@dataclass(frozen=True)
class Floor:
    """What two correct frameworks may differ by, for one compute dtype (docs/fidelity.md).

    max_abs: of logits, times their standard deviation where that is above 1; kl: mean nats a
    position; top1: share of positions with the same best token; clear: the same among positions
    where the best token is clear; part: relative difference beyond which a layer's part departs.
    """

    max_abs: float
    kl: float
    top1: float
    clear: float
    part: float


FLOORS = {
    "float32": Floor(max_abs=2e-5, kl=1e-8, top1=1.0, clear=1.0, part=3e-5),
    "bfloat16": Floor(max_abs=0.5, kl=2e-3, top1=0.9, clear=0.98, part=0.15),
}
CLEAR = 1 / 64
"""A best token is clear where it leads by more than this share of the largest logit: some four
roundings of bfloat16, which is what its path through a model adds up to."""


@dataclass(frozen=True)
class LogitGap:
    """Differences of two sets of logits over all positions; KL(a, b) in nats, computed in fp64."""

    positions: int
    max_abs: float
    scale: float
    kl_mean: float
    kl_max: float
    top1: float
    clear: float
    top10: float

    def figures(self, prefix: str = "") -> dict[str, float]:
        """The numbers by name, for result.json."""
        return {
            f"{prefix}max |logit difference|": self.max_abs,
            f"{prefix}KL mean": self.kl_mean,
            f"{prefix}KL max": self.kl_max,
            f"{prefix}top-1 agreement": self.top1,
            f"{prefix}top-1 agreement where clear": self.clear,
            f"{prefix}top-10 overlap": self.top10,
        }

    def failures(self, floor: Floor) -> list[str]:
        """What is above the floor, in words; empty where the two sides agree."""
        found = []
        most = floor.max_abs * max(1.0, self.scale)
        if not self.max_abs <= most:
            found.append(f"max |logit difference| {self.max_abs:.3g} is above {most:.3g}")
        if not self.kl_mean <= floor.kl:
            found.append(f"mean KL {self.kl_mean:.3g} is above {floor.kl:.3g} nats")
        if not self.top1 >= floor.top1:
            found.append(f"top-1 agreement {self.top1:.4%} is below {floor.top1:.4%}")
        if not self.clear >= floor.clear:
            found.append(f"top-1 agreement where clear {self.clear:.4%} is below {floor.clear:.4%}")
        return found


def compare_logits(a_BSV: np.ndarray, b_BSV: np.ndarray) -> LogitGap:
    """Compares logits of the same tokens; where one side has more (padded) entries, only the
    common ones count. b is the side that says which best tokens are clear.
    """
    width = min(a_BSV.shape[-1], b_BSV.shape[-1])
    kls, same, clear, overlap, largest = [], [], [], 0.0, 0.0
    for a_NV, b_NV in _position_chunks(a_BSV, b_BSV, width):
        # NaN has to stay NaN: max() of Python would drop it.
        largest = float(np.maximum(largest, np.max(np.abs(a_NV - b_NV))))
        kls.append(_kl(a_NV, b_NV))
        same.append(np.argmax(a_NV, -1) == np.argmax(b_NV, -1))
        clear.append(_is_clear(b_NV))
        overlap += float(np.sum(_top_overlap(a_NV, b_NV, min(10, width))))
    kl_N, same_N, clear_N = (np.concatenate(x) for x in (kls, same, clear))
    return LogitGap(
        positions=len(kl_N),
        max_abs=largest,
        scale=float(np.std(b_BSV[..., :width], dtype=np.float64)),
        kl_mean=float(kl_N.mean()),
        kl_max=float(kl_N.max()),
        top1=float(same_N.mean()),
        clear=float(same_N[clear_N].mean()) if clear_N.any() else 1.0,
        top10=overlap / len(kl_N),
    )


def _is_clear(x_NV: np.ndarray) -> np.ndarray:
    second_N, first_N = np.moveaxis(np.partition(x_NV, -2, axis=-1)[:, -2:], -1, 0)
    return first_N - second_N > CLEAR * np.max(np.abs(x_NV), axis=-1)


def _position_chunks(a_BSV, b_BSV, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    a_NV, b_NV = (x.reshape(-1, x.shape[-1]) for x in (a_BSV, b_BSV))
    if len(a_NV) != len(b_NV):
        raise ValueError(f"logits of {len(a_NV)} and of {len(b_NV)} positions")
    for start in range(0, len(a_NV), POSITIONS_AT_ONCE):
        part = slice(start, start + POSITIONS_AT_ONCE)
        yield a_NV[part, :width].astype(np.float64), b_NV[part, :width].astype(np.float64)


def _log_softmax(x_NV: np.ndarray) -> np.ndarray:
    x_NV = x_NV - x_NV.max(-1, keepdims=True)
    return x_NV - np.log(np.exp(x_NV).sum(-1, keepdims=True))


def _kl(a_NV: np.ndarray, b_NV: np.ndarray) -> np.ndarray:
    la_NV, lb_NV = _log_softmax(a_NV), _log_softmax(b_NV)
    return np.sum(np.exp(la_NV) * (la_NV - lb_NV), -1)


def _top_overlap(a_NV: np.ndarray, b_NV: np.ndarray, k: int) -> np.ndarray:
    """Share of common entries among the k largest of each row."""
    a_Nk, b_Nk = (np.argpartition(-x, k - 1, axis=-1)[:, :k] for x in (a_NV, b_NV))
    return (a_Nk[:, :, None] == b_Nk[:, None, :]).any(-1).mean(-1)


@dataclass(frozen=True)
class PartGap:
    """Difference of one part's output: relative to its largest value; position: the first one
    that departs, or -1.
    """

    part: str
    relative: float
    position: int


def compare_traces(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], floor: Floor
) -> list[PartGap]:
    """The gap of every part that both sides name, in the order of the computation."""
    return [
        _part_gap(name, np.asarray(a[name]), np.asarray(b[name]), floor) for name in a if name in b
    ]


def _part_gap(name: str, a_BSX: np.ndarray, b_BSX: np.ndarray, floor: Floor) -> PartGap:
    width = min(a_BSX.shape[-1], b_BSX.shape[-1])
    a_BSX, b_BSX = (x[..., :width].astype(np.float32) for x in (a_BSX, b_BSX))
    scale = float(np.max(np.abs(b_BSX))) or 1.0
    relative_S = np.max(np.abs(a_BSX - b_BSX), axis=(0, 2)) / scale
    departed = ~(relative_S <= floor.part)  # so that NaN has departed
    return PartGap(
        name, float(np.max(relative_S)), int(np.argmax(departed)) if departed.any() else -1
    )


def first_departure(gaps: list[PartGap]) -> PartGap | None:
    """The first part, in the order of the computation, whose output departs; None where all
    agree.
    """
    return next((gap for gap in gaps if gap.position >= 0), None)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a parity check between two sides."""

    a: str
    b: str
    dtype: str
    logits: LogitGap
    parts: list[PartGap]

    @property
    def departure(self) -> PartGap | None:
        return first_departure(self.parts)

    @property
    def failures(self) -> list[str]:
        found = self.logits.failures(FLOORS[self.dtype])
        if self.departure is not None:
            found.insert(0, describe(self.departure))
        return found

    @property
    def ok(self) -> bool:
        return not self.failures

    def table(self) -> str:
        """The whole comparison as text: logits, then a line a part."""
        lines = [
            f"{self.a} against {self.b}, {self.dtype}: {'the same' if self.ok else 'NOT the same'}"
        ]
        lines += [f"  {name:<28} {value:.6g}" for name, value in self.logits.figures().items()]
        lines += [f"  - {failure}" for failure in self.failures]
        lines += [f"  {gap.part:<28} {gap.relative:.3g}" for gap in self.parts]
        return "\n".join(lines)


MODULES = {
    "embed": "the embedding",
    "attn": "attention: q, k, v, out, their norms, rotary embedding, window",
    "attn_residual": "the norm after attention, or the sum",
    "mlp": "the MLP: w1, w2, w3",
    "out": "the norm after the MLP, or the sum",
    "final_norm": "the last norm",
    "logits": "the head",
}
"""What a part's output is made of, given that its input agrees."""


def describe(gap: PartGap) -> str:
    """A departure in words: layer, module, position."""
    pieces = gap.part.split(".")
    where = f"layer {pieces[1]}, {pieces[2]}" if pieces[0] == "layers" else gap.part
    return (
        f"first departs at {where} ({MODULES[pieces[-1]]}; relative {gap.relative:.3g}), "
        f"from position {gap.position} on"
    )


def judge(a: str, b: str, dtype: str, a_trace: Mapping, b_trace: Mapping) -> Verdict:
    """Compares two traces (part -> array, `logits` among them) of the same tokens."""
    gap = compare_logits(np.asarray(a_trace["logits"]), np.asarray(b_trace["logits"]))
    return Verdict(a, b, dtype, gap, compare_traces(a_trace, b_trace, FLOORS[dtype]))
