"""Room for samples that found none: every row stays within its limits, and a swap is found as by trying them one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.plan import repair
from evenstep.plan.problem import Int


@st.composite
def unfinished(draw: st.DrawFn) -> tuple[Int, Int, Int, int]:
    """Weights, limits, rows (-1 where a sample has none) and their number; the second limit counts samples."""
    rows, segments, seq_len = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.sampled_from([6, 20]))
    tokens: list[int] = []
    row: list[int] = []
    for k in range(rows):
        count = draw(st.integers(1, segments))
        tokens += draw(st.lists(st.integers(1, seq_len // count), min_size=count, max_size=count))
        row += [k] * count
    left = draw(st.lists(st.integers(1, seq_len), min_size=1, max_size=4))
    weights = np.array([[*tokens, *left], [1] * (len(tokens) + len(left))], dtype=np.int64)
    return weights, np.array([seq_len, segments]), np.array([*row, *[-1] * len(left)]), rows


def free_of(weights: Int, limits: Int, row: Int, rows: int) -> Int:
    free = np.repeat(limits[:, None], rows, axis=1)
    for sample in np.flatnonzero(row >= 0):
        free[:, row[sample]] -= weights[:, sample]
    return free


@given(unfinished())
def test_rows_stay_within_their_limits(case: tuple[Int, Int, Int, int]) -> None:
    weights, limits, before, rows = case
    row = before.copy()
    found = repair.place_left_over(weights, limits, row, rows)
    assert (free_of(weights, limits, row, rows) >= 0).all()
    assert (row[before >= 0] >= 0).all()
    if found:
        assert (row >= 0).all()


def swapped_one_by_one(weights: Int, row: Int, free: Int, sample: int) -> tuple[int, int] | None:
    """The first swap that makes room, as (the sample that goes, the one that comes): each is tried and looked at."""
    for home in np.argsort(-free[0], kind="stable")[:16].tolist():
        for other in np.flatnonzero(row == home).tolist():
            for smaller in np.flatnonzero((row >= 0) & (row != home)).tolist():
                away = int(row[smaller])
                here = free[:, home] + weights[:, other] - weights[:, smaller] - weights[:, sample]
                there = free[:, away] + weights[:, smaller] - weights[:, other]
                if (here >= 0).all() and (there >= 0).all():
                    return other, smaller
    return None


@settings(max_examples=300)
@given(unfinished())
def test_the_first_swap_that_makes_room_is_taken(case: tuple[Int, Int, Int, int]) -> None:
    weights, limits, row, rows = case
    sample = len(row) - 1
    free, before = free_of(weights, limits, row, rows), row.copy()
    expected = swapped_one_by_one(weights, row, free, sample)
    assert repair._swap_for_room(weights, row, free, sample) == (expected is not None)
    assert (free == free_of(weights, limits, row, rows)).all()
    if expected is None:
        assert (row == before).all()
    else:
        other, smaller = expected
        before[[sample, other, smaller]] = before[other], before[smaller], before[other]
        assert (row == before).all()
