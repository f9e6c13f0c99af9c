"""The lower bound: never above the optimum, and tight where it can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.plan import PackingConstraints, lower_bound
from evenstep.plan.bounds import makespan_bound
from evenstep.plan.exact import exact
from evenstep.plan.problem import Problem

CAP = 100
# Sizes around a third, a half and a whole row, where the pigeonholes are.
SIZES = st.one_of(st.integers(1, 20), st.integers(30, 60), st.integers(60, 100))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=8),
    groups=st.integers(1, 3),
    ranks=st.integers(1, 3),
    costs=st.sampled_from(["tokens", "quadratic", "steep"]),
)
def test_bound_is_at_most_the_optimum(sizes: list[int], groups: int, ranks: int, costs: str) -> None:
    tokens = np.array(sizes)
    cost = {"tokens": tokens, "quadratic": 24 * tokens + tokens**2, "steep": tokens**4}[costs]
    problem = Problem(
        costs=cost[None],
        work=cost,
        weights=tokens[None],
        limits=np.array([CAP]),
        groups=groups,
        ranks=ranks,
        rows=1,
        reference=None,
    )
    best = exact(problem)
    if best is not None:
        assert makespan_bound(problem) <= problem.loads(best).max(axis=1).sum()


@pytest.mark.parametrize(
    ("tokens", "ranks", "micro_batches", "expected"),
    [
        ([10] * 8, 2, 1, 40),  # the mean
        ([10] * 9, 2, 1, 50),  # the mean, rounded up to whole samples
        ([90, 5, 5], 2, 1, 90),  # the costliest sample
        ([60, 55, 52], 2, 2, 60 + 52),  # the third of samples above half a row lies in a second micro-batch
        ([70, 40, 39], 1, 3, 149),  # one rank does everything
        ([95] * 3 + [40, 40], 4, 1, 95),  # nothing but the giants' level
    ],
)
def test_bound_of_named_windows(tokens: list[int], ranks: int, micro_batches: int, expected: int) -> None:
    bound = lower_bound(
        tokens,
        np.array(tokens, dtype=float),
        dp_size=ranks,
        micro_batches=micro_batches,
        rows=1,
        constraints=PackingConstraints(CAP),
    )
    assert bound == pytest.approx(expected, rel=1e-9)


def test_crowded_rows_raise_the_bound() -> None:
    # Two rows of 100 tokens for 60 + 130 tokens: the giant's row must hold at least 30 more.
    tokens = [60] + [10] * 13
    costs = np.array([600.0] + [10.0] * 13)
    bound = lower_bound(
        tokens, costs, dp_size=2, micro_batches=1, rows=1, constraints=PackingConstraints(CAP)
    )
    assert bound == pytest.approx(600 + 3 * 10)
