"""Token-first packers: what they promise about rows."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.plan.packing import best_fit, first_fit, fullest_rows
from evenstep.plan.repair import place_left_over

SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=30)


@settings(deadline=None)
@given(sizes=SIZES)
def test_first_fit_is_the_first_row_with_room(sizes: list[int]) -> None:
    row = first_fit(np.array([sizes]), np.array([20]))
    used = [0] * len(sizes)
    for size, where in zip(sizes, row.tolist(), strict=True):
        # A row that is full to the last token is closed, also for a sample without tokens.
        assert where == next(index for index, total in enumerate(used) if total + size <= 20 and total < 20)
        used[where] += size


@settings(deadline=None)
@given(sizes=SIZES)
def test_best_fit_takes_the_fullest_row_with_room(sizes: list[int]) -> None:
    order = np.argsort(-np.array(sizes), kind="stable")
    row = best_fit(np.array([sizes]), np.array([20]), order)
    used: list[int] = []
    for sample in order.tolist():
        room = [20 - total for total in used if total + sizes[sample] <= 20]
        where = int(row[sample])
        if room:
            assert 20 - used[where] == min(room)
        else:
            assert where == len(used)
            used.append(0)
        used[where] += sizes[sample]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), rows=st.integers(1, 3))
def test_fullest_rows_fill_the_first_row_as_far_as_possible(sizes: list[int], rows: int) -> None:
    row = fullest_rows(np.array(sizes), 20, rows)
    assert row is not None
    assert np.bincount(row[row >= 0], np.array(sizes)[row >= 0], minlength=rows).max() <= 20
    largest = sizes.index(max(sizes))
    others = sizes[:largest] + sizes[largest + 1 :]
    best = max(
        sum(chosen)
        for count in range(len(others) + 1)
        for chosen in itertools.combinations(others, count)
        if sizes[largest] + sum(chosen) <= 20
    )
    assert np.array(sizes)[row == 0].sum() == sizes[largest] + best


def test_fullest_rows_refuse_what_takes_too_long() -> None:
    assert fullest_rows(np.full(10_000, 5), 1 << 20, 100) is None


def test_a_left_over_sample_moves_another_out_of_its_way() -> None:
    # Row 0 holds 6, row 1 holds 4 and 3 of 10: a sample of 6 fits once the 3 moves to row 0.
    weights = np.array([[6, 4, 3, 6]])
    row = np.array([0, 1, 1, -1])
    assert place_left_over(weights, np.array([10]), row, 2)
    assert row.tolist() == [0, 1, 0, 1]


def test_a_left_over_sample_is_placed_by_a_swap() -> None:
    # Free tokens are 2 and 2: swapping the 5 for the 3 leaves 4 in the first row.
    weights = np.array([[5, 3, 3, 5, 4]])
    row = np.array([0, 0, 1, 1, -1])
    assert place_left_over(weights, np.array([10]), row, 2)
    assert np.bincount(row, weights[0]).max() <= 10


def test_a_left_over_sample_takes_the_tightest_row_with_room() -> None:
    weights = np.array([[6, 3, 4]])
    row = np.array([0, 1, -1])
    assert place_left_over(weights, np.array([10]), row, 2)
    assert row.tolist() == [0, 1, 0]


def test_a_window_that_is_too_small_is_not_repaired() -> None:
    weights, row = np.full((1, 40), 10), np.full(40, -1)
    assert not place_left_over(weights, np.array([10]), row, 20)
    assert (row == -1).all()
