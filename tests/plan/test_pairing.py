"""Two giants in one row, where one alone would set the cost of a group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep.plan import PackingConstraints, Plan, sum_of_makespans
from evenstep.plan.pairing import as_one, giant_pairs, taken_apart
from evenstep.plan.problem import Problem


def problem_of(tokens: list[int], groups: int, ranks: int) -> Problem:
    column = np.array(tokens, dtype=np.int64)
    return Problem(
        costs=column[None] ** 2,
        work=column**2,
        weights=np.stack((column, np.ones_like(column))),
        limits=np.array([100, 3]),
        groups=groups,
        ranks=ranks,
        rows=1,
        reference=None,
    )


@given(
    tokens=st.lists(st.integers(0, 50), min_size=2, max_size=9),
    pair=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    seed=st.integers(0, 99),
)
def test_a_pair_counts_as_both(tokens: list[int], pair: tuple[int, int], seed: int) -> None:
    first, second = pair[0] % len(tokens), pair[1] % len(tokens)
    if first == second:
        second = (first + 1) % len(tokens)
    window = problem_of(tokens, 2, 2)
    joined = as_one(window, (first, second))
    row = np.random.default_rng(seed).integers(0, 4, joined.size)
    apart = taken_apart(row, (first, second))
    assert apart[first] == apart[second]
    assert (window.loads(apart) == joined.loads(row)).all()
    assert (window.used(apart) == joined.used(row)).all()


def test_the_giant_alone_in_its_group_may_join_those_that_leave_it_room() -> None:
    window = problem_of([80, 54, 50, 46, 20, 20, 20, 20], groups=3, ranks=3)
    row = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    assert giant_pairs(window, row, 2) == [(3, 1), (3, 2)]  # not the 80


def test_two_giants_that_are_left_over_stay_apart() -> None:
    window = problem_of([80, 54, 50, 46, 45, 20, 20, 20, 20, 1], groups=3, ranks=3)
    assert giant_pairs(window, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 8]), 2) == []


def test_a_giant_alone_in_the_last_group_may_join_others() -> None:
    window = problem_of([80, 54, 46, 1, 1, 1, 1], groups=2, ranks=2)
    assert giant_pairs(window, np.array([0, 1, 2, 3, 3, 3, 3]), 1) == [(2, 1)]


def test_no_pair_leaves_a_row_without_samples() -> None:
    assert giant_pairs(problem_of([80, 54, 46, 1, 1, 1], 3, 2), np.arange(6), 2) == []


def test_two_giants_share_a_row_where_that_is_better(make_plan: Callable[..., Plan]) -> None:
    tokens = [80, 55, 45] + [5] * 8
    costs = np.array([800.0, 700.0, 600.0] + [5.0] * 8)
    plan = make_plan(tokens, costs)
    assert plan.assignment[1] == plan.assignment[2]
    # Four short samples stand beside the 80, four in the second micro-batch, which would cost 600 with the 45.
    assert sum_of_makespans(plan.loads) == 1300 + 10


def test_giants_stay_apart_where_the_rest_would_find_no_room(make_plan: Callable[..., Plan]) -> None:
    tokens = [
        51,
        31,
        15,
        2,
        34,
        37,
        12,
        16,
        66,
        11,
        13,
        9,
        21,
        13,
        8,
        7,
        29,
        21,
        22,
        27,
        10,
        18,
        23,
        52,
        11,
        9,
        28,
    ]
    reference = np.repeat([0, 1, 2, 3, 4, 5], [4, 4, 4, 6, 5, 4])
    limits = PackingConstraints(100)
    plan = make_plan(
        tokens, np.array(tokens) ** 3.0, micro_batches=3, reference=reference, constraints=limits
    )
    assert plan.decision.algorithm == "levels"
    assert np.bincount(plan.assignment, tokens).max() <= 100
