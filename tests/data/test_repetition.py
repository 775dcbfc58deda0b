"""The repetition filter against its definition, at the rule's edges and on adversarial arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_core_jax.data.repetition import RepetitionFilter

FILTER = RepetitionFilter()


def masked_by_definition(row: np.ndarray, rule: RepetitionFilter) -> bool:
    """A stretch of period * count tokens that repeats every period: looked for token by token."""
    for period in range(rule.min_period, min(rule.max_period, len(row) // 3) + 1):
        run = 0
        for i in range(period, len(row)):
            run = run + 1 if row[i] == row[i - period] else 0
            if run >= (max(rule.max_count, 3) - 1) * period:
                return True
    return False


def stretch(length: int, start: int, period: int, tokens: int) -> np.ndarray:
    """Distinct ids with `tokens` tokens of a repeated period from `start`."""
    row = np.arange(length, dtype=np.int32) + 1000
    row[start : start + tokens] = np.arange(tokens) % period
    return row


@pytest.mark.parametrize("period", range(1, 15))
@pytest.mark.parametrize("start", [0, 1, 7, 100])
def test_the_edge_of_the_rule(period, start):
    enough, short = (stretch(1024, start, period, 32 * period - less) for less in (0, 1))
    kept = FILTER.keep(np.stack([enough, short]))
    assert kept.tolist() == [period == 14, True]


def test_a_stretch_at_the_very_end():
    for period in (1, 2, 13):
        row = stretch(512, 512 - 32 * period, period, 32 * period)
        assert not FILTER.keep(row[None])[0]


def test_rows_are_independent():
    rows = np.stack([stretch(512, 0, 1, 512), stretch(512, 0, 1, 20)])
    assert FILTER.keep(rows).tolist() == [False, True]


def test_short_instances_are_kept():
    assert FILTER.keep(np.zeros((3, 2), np.int32)).all()
    assert FILTER.keep(np.zeros((3, 31), np.int32)).all()
    assert not FILTER.keep(np.zeros((1, 32), np.int32)).any()


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.uint32, np.int64])
def test_types(dtype):
    assert FILTER.keep(stretch(512, 5, 3, 96)[None].astype(dtype)).tolist() == [False]


RULES = st.builds(
    RepetitionFilter,
    min_period=st.integers(1, 4),
    max_period=st.integers(4, 13),
    max_count=st.integers(1, 34),
)


@st.composite
def repetitive_rows(draw) -> np.ndarray:
    """Rows glued from short periods, with a few changed tokens: near the rule from both sides."""
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        unit = draw(st.lists(st.integers(0, 3), min_size=1, max_size=14))
        pieces.append(np.resize(unit, draw(st.integers(1, 200))))
    row = np.concatenate(pieces).astype(np.int32)
    for place in draw(st.lists(st.integers(0, len(row) - 1), max_size=3)):
        row[place] = draw(st.integers(0, 3))
    return row


@settings(max_examples=300, deadline=None)
@given(row=repetitive_rows(), rule=RULES)
def test_equals_the_definition(row, rule):
    assert bool(rule.keep(row[None])[0]) is not masked_by_definition(row, rule)
