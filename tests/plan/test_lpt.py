"""Longest first: the heap does what the rule says, also where most rows are full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.plan.exact import exact
from evenstep.plan.lpt import lpt
from evenstep.plan.problem import Int, Problem


def _problem(tokens: Int, cap: int, ranks: int, rows: int) -> Problem:
    work = np.sort(24 * tokens + tokens**2)[::-1].copy()
    return Problem(
        costs=work[None],
        work=work,
        weights=np.sort(tokens)[::-1][None].copy(),
        limits=np.array([cap]),
        groups=1,
        ranks=ranks,
        rows=rows,
        reference=None,
    )


def _by_the_rule(problem: Problem) -> list[int]:
    """The least-loaded slot with room, in it the fullest row with room; ties go to the first."""
    cap, rows = int(problem.limits[0]), problem.rows
    free = [[cap] * rows for _ in range(problem.slots)]
    load = [0] * problem.slots
    placed = []
    for need, cost in zip(problem.weights[0].tolist(), problem.work.tolist(), strict=True):
        open_slots = [slot for slot in range(problem.slots) if max(free[slot]) >= need]
        if not open_slots:
            placed.append(-1)
            continue
        slot = min(open_slots, key=load.__getitem__)
        row = free[slot].index(min(room for room in free[slot] if room >= need))
        free[slot][row] -= need
        load[slot] += cost
        placed.append(slot * rows + row)
    return placed


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    ranks=st.integers(1, 6),
    rows=st.integers(1, 3),
)
def test_samples_go_where_the_rule_says(tokens: list[int], ranks: int, rows: int) -> None:
    problem = _problem(np.array(tokens), 20, ranks, rows)
    row = np.full(problem.size, -1)
    lpt(problem, np.arange(problem.size), row)
    assert row.tolist() == _by_the_rule(problem)


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_are_full_for_most_samples_change_nothing(rows: int) -> None:
    # The 20s look past every row again and again, because the 1s keep all of them open.
    tokens = np.array([90] * 400 + [20] * 60 + [1] * 500)
    problem = _problem(tokens, 100, 400 // rows, rows)
    row = np.full(problem.size, -1)
    lpt(problem, np.arange(problem.size), row)
    assert row.tolist() == _by_the_rule(problem)
    assert (row == -1).sum() == 60


def test_the_optimum_looks_for_rows_again_where_the_first_try_fails() -> None:
    # Both 3s in one row leave no room for the second 7.
    problem = Problem(
        costs=np.array([[3, 3, 7, 7]]),
        work=np.array([3, 3, 7, 7]),
        weights=np.array([[3, 3, 7, 7]]),
        limits=np.array([10]),
        groups=1,
        ranks=1,
        rows=2,
        reference=None,
    )
    row = exact(problem)
    assert row is not None
    assert np.bincount(row, problem.work).tolist() == [10.0, 10.0]
