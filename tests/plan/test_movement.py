"""Samples stay on the ranks that hold them, as far as balance allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

from evenstep.plan import (
    PackingConstraints,
    Plan,
    lower_bound,
    moved,
    plan_window,
    rank_of,
    sum_of_makespans,
)
from evenstep.plan.grouping import like_costs_per_rank
from evenstep.plan.matching import match_holders
from evenstep.plan.polish import polish_at_home
from evenstep.plan.problem import Problem, integer_costs
from evenstep.plan.refine import refine


def test_ranks_keep_what_they_hold(make_plan: Callable[..., Plan]) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 100, 64)
    reference = rng.permutation(64)
    limits = PackingConstraints(1000)
    free = make_plan(tokens, dp_size=8, micro_batches=8, reference=None, constraints=limits)
    held = make_plan(tokens, dp_size=8, micro_batches=8, reference=reference, constraints=limits)
    stay = tokens[~moved(held.assignment, reference % 8, dp_size=8, rows=1)].sum()
    apart = tokens[~moved(free.assignment, reference % 8, dp_size=8, rows=1)].sum()
    assert stay > 1.5 * apart
    assert held.decision.moved_tokens == tokens.sum() - stay


def test_payload_bytes_decide_what_stays(make_plan: Callable[..., Plan]) -> None:
    payload = np.array([1, 1000])
    plan = make_plan(
        [50, 60],
        holders=[0, 0],
        micro_batches=1,
        payload_bytes=payload,
        reference=[0, 0],
        constraints=PackingConstraints(110),
    )
    assert plan.rank_of.tolist() == [1, 0]
    assert plan.decision.moved_bytes == 1
    assert plan.decision.moved_samples == 1


def test_refine_moves_little(draw_lengths: Callable[..., npt.NDArray[np.int64]]) -> None:
    tokens = draw_lengths(1, 64, 8192, 0.9)
    costs = 24576.0 * tokens + tokens.astype(float) ** 2
    limits = PackingConstraints(8192)
    first = plan_window(tokens, tokens, dp_size=64, micro_batches=1, rows=1, constraints=limits)
    rows = np.random.default_rng(0).permutation(64)[first.assignment]
    arguments: dict[str, Any] = {"dp_size": 8, "micro_batches": 8, "rows": 1, "constraints": limits}
    plan = plan_window(tokens, costs, reference=rows, algorithm="refine", **arguments)
    assert plan.decision.algorithm == "refine"
    assert sum_of_makespans(plan.loads) <= 1.015 * lower_bound(tokens, costs, **arguments)
    assert plan.decision.moved_tokens <= 0.2 * tokens.sum()


def test_sorting_the_slots_of_each_rank_moves_nothing_and_lengthens_nothing(
    cases: Callable[..., Any],
) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(fancy=False))
    def law(case: Any) -> None:
        costs = integer_costs(case.costs)[0]
        problem = Problem(
            costs=costs,
            work=costs.sum(axis=0),
            weights=case.tokens[None],
            limits=np.array([case.constraints.seq_len]),
            groups=case.micro_batches,
            ranks=case.dp_size,
            rows=case.rows,
            reference=None,
        )
        before = case.reference.astype(np.int64)
        after = like_costs_per_rank(problem, before)
        holders = rank_of(before, dp_size=case.dp_size, rows=case.rows)
        assert not moved(after, holders, dp_size=case.dp_size, rows=case.rows).any()
        assert problem.broken_row(after) is None
        assert problem.makespans(after) <= problem.makespans(before)
        if len(costs) == 1:
            loads = problem.loads(after)[:, :, 0]
            assert problem.makespans(after) == (-np.sort(-loads, axis=0)).max(axis=1).sum()

    law()


def test_an_exchange_must_be_worth_leaving_home() -> None:
    # Rank 0 holds 60 and 40, rank 1 holds 30: 40 or 60 could go, for 60 against 70, or 70 against 60.
    costs = np.array([60, 40, 30])
    problem = Problem(
        costs=costs[None],
        work=costs,
        weights=np.array([[6, 4, 3]]),
        limits=np.array([20]),
        groups=1,
        ranks=2,
        rows=1,
        reference=None,
    )
    holders = np.array([0, 0, 1])
    cheap = polish_at_home(problem, holders.copy(), 0, holders, costs * 0.1)
    dear = polish_at_home(problem, holders.copy(), 0, holders, costs * 10.0)
    assert problem.makespans(cheap) == 70
    assert dear.tolist() == holders.tolist()


def test_matching_ends_after_a_few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    # Slots hold what ranks 1, 2, 0 hold; greedily rank 1 stays and two exchanges would follow.
    monkeypatch.setattr("evenstep.plan.matching._SWAP_ROUNDS", 0)
    costs = np.array([5, 4, 3])
    problem = Problem(
        costs=costs[None],
        work=costs,
        weights=np.array([[1, 1, 1]]),
        limits=np.array([1]),
        groups=1,
        ranks=3,
        rows=1,
        reference=None,
    )
    row = match_holders(problem, np.array([0, 1, 2]), np.array([1, 2, 0]), np.array([5, 4, 3]))
    assert sorted(row.tolist()) == [0, 1, 2]
    assert row.tolist() == [1, 2, 0]


def test_a_sample_without_room_anywhere_is_left_to_repair() -> None:
    tokens = np.array([6, 6, 5, 3])
    problem = Problem(
        costs=tokens[None],
        work=tokens,
        weights=tokens[None],
        limits=np.array([10]),
        groups=1,
        ranks=2,
        rows=1,
        reference=None,
    )
    row = refine(problem, np.arange(4), np.array([0, 0, 1, 1]), np.array([10]))
    assert row.tolist() == [0, 1, -1, 1]
