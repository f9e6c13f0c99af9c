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
        ([60] * 3, 1, 2, 240),  # no packing exists, and the bound is a number all the same
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


def test_giants_raise_the_bound_of_windows_of_many_samples() -> None:
    tokens = np.full(8193, 10)
    tokens[:3] = 60
    bound = lower_bound(
        tokens,
        tokens.astype(float) ** 2,
        dp_size=64,
        micro_batches=16,
        rows=1,
        constraints=PackingConstraints(CAP),
    )
    # The giants share a micro-batch, whose 61 other rows hold 610 samples; 7580 are left for the 64 ranks.
    assert bound == pytest.approx(60**2 + -(-7580 // 64) * 10**2, rel=1e-9)


def test_crowded_rows_raise_the_bound() -> None:
    # Two rows of 100 tokens for 60 + 130 tokens: the giant's row must hold at least 30 more.
    tokens = [60] + [10] * 13
    costs = np.array([600.0] + [10.0] * 13)
    bound = lower_bound(
        tokens, costs, dp_size=2, micro_batches=1, rows=1, constraints=PackingConstraints(CAP)
    )
    assert bound == pytest.approx(600 + 3 * 10)


@pytest.mark.parametrize(
    ("tokens", "costs", "micro_batches", "expected"),
    [
        # 55 and 45 share a row, which costs 1300, or one of them is in a second micro-batch: 800 + 600.
        ([80, 55, 45], [800, 700, 600], 2, 1300),
        # 56 and 45 fit into no row.
        ([80, 56, 45], [800, 700, 600], 2, 1400),
        # 400 is the floor of the second micro-batch, so its giant stays alone: 2420 of 2700 are in the first two.
        ([90, 70, 60] + [10] * 20, [1000, 500, 400] + [40] * 20, 3, 1540),
    ],
)
def test_long_samples_share_a_row_or_do_not(
    tokens: list[int], costs: list[int], micro_batches: int, expected: int
) -> None:
    bound = lower_bound(
        tokens,
        np.array(costs, dtype=float),
        dp_size=2,
        micro_batches=micro_batches,
        rows=1,
        constraints=PackingConstraints(CAP),
    )
    assert bound == pytest.approx(expected, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    giants=st.lists(st.tuples(st.integers(25, 100), st.integers(0, 100)), min_size=1, max_size=24),
    ranks=st.integers(1, 6),
    power=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_bound_is_at_most_a_layout_of_full_rows(
    giants: list[tuple[int, int]], ranks: int, power: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [_cut(giant, min(rest, CAP - giant), rng) for giant, rest in giants]
    tokens = np.array([size for row in rows for size in row])
    loads = sorted((sum(size**power for size in row) for row in rows), reverse=True)
    bound = lower_bound(
        tokens,
        tokens.astype(float) ** power,
        dp_size=ranks,
        micro_batches=-(-len(rows) // ranks),
        rows=1,
        constraints=PackingConstraints(CAP),
    )
    assert bound <= sum(loads[::ranks])


def _cut(giant: int, rest: int, rng: np.random.Generator) -> list[int]:
    """A row of one long sample and short ones."""
    row = [giant]
    while rest:
        row.append(int(rng.integers(1, rest + 1)))
        rest -= row[-1]
    return row
