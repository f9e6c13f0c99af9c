"""Budgets in whole numbers: exact for whole numbers, and generous to fractions by less than anyone measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.budget import budget_units, units_of
from evenstep.plan import PackingConstraints, plan_window
from evenstep.sampling import TokenBudgetSampler

limits = st.floats(0, 1e300) | st.integers(0, 2**53).map(float) | st.floats(0, 40).map(lambda x: round(x, 2))


@given(limit=limits, parts=st.integers(1, 300))
def test_equal_parts_of_a_budget_fill_it(limit: float, parts: int) -> None:
    assert units_of(limit / parts, limit) * parts <= budget_units(limit)


@given(data=st.data(), limit=limits)
def test_whatever_floats_sum_to_the_budget_fits(data: st.DataObject, limit: float) -> None:
    shares = data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=100))
    taken = [share * limit for share in shares]
    while math.fsum(taken) > limit:
        taken.pop()
    assert units_of(taken, limit).sum() <= budget_units(limit)


@given(data=st.data(), limit=limits)
def test_what_fits_exceeds_the_budget_by_next_to_nothing(data: st.DataObject, limit: float) -> None:
    taken = data.draw(st.lists(st.floats(0, 1.01).map(lambda x: x * limit), min_size=1, max_size=60))
    if units_of(taken, limit).sum() <= budget_units(limit):
        assert math.fsum(taken) <= limit * (1 + 2e-12 * len(taken))


@given(limit=st.integers(0, 2**38), whole=st.lists(st.integers(0, 2**39), min_size=1, max_size=20))
def test_whole_numbers_are_exact(limit: int, whole: list[int]) -> None:
    assert (sum(whole) <= limit) == bool(units_of(whole, float(limit)).sum() <= budget_units(float(limit)))


@pytest.mark.parametrize("limit", [5e-324, 1e-300, 1.0, 1.7e308])
def test_any_limit_can_be_counted(limit: float) -> None:
    assert units_of(0.0, limit) == 0
    assert budget_units(limit) - 1 <= units_of(limit, limit) <= budget_units(limit)
    assert (units_of(1.7e308, limit) > budget_units(limit)) == (limit < 1.7e308)


def test_only_nothing_fits_a_budget_of_nothing() -> None:
    assert units_of([0.0, 1e-9, 3.0], 0.0).tolist() == [0, 1, 1]
    assert budget_units(0.0) == 0


@given(
    budget=st.sampled_from([0.7, 1.0, 1.5, 2.0, 3.0, 10.0, 30.0]),
    shares=st.lists(st.sampled_from([0.02, 0.06, 0.1, 0.3, 1 / 3, 0.4, 0.7]), min_size=1, max_size=60),
)
def test_the_planner_keeps_every_row_that_the_sampler_fills(budget: float, shares: list[float]) -> None:
    features, tokens = {"share": np.array(shares)}, np.ones(len(shares), dtype=np.int64)
    sampler = TokenBudgetSampler(
        tokens,
        rows_per_step=2,
        seq_len=64,
        remainder="pad",
        order="sequential",
        budgets={"share": budget},
        features=features,
    )
    step = sampler.step_at(sampler.start())
    assert step is not None
    inside = step.indices >= 0
    members = step.indices[inside]
    plan = plan_window(
        tokens[members],
        np.arange(len(members), dtype=np.float64),
        dp_size=2,
        micro_batches=1,
        rows=1,
        reference=step.rows[inside],
        constraints=PackingConstraints(64, budgets={"share": budget}),
        features={"share": features["share"][members]},
        min_gain=1.0,
    )
    assert plan.decision.algorithm == "reference"


def test_ten_tenths_fill_a_row() -> None:
    share = {"share": np.full(40, 0.1)}
    sampler = TokenBudgetSampler(
        np.ones(40, dtype=np.int64),
        rows_per_step=2,
        seq_len=64,
        budgets={"share": 1.0},
        features=share,
    )
    assert [len(step.indices) for step in [sampler.step_at(sampler.start())] if step is not None] == [20]
