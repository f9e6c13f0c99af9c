"""How even plans are: giants, nearly full rows, steps, stages, and windows that are hardly any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from evenstep.bench.plan_cases import CASES
from evenstep.plan import (
    Objective,
    PackingConstraints,
    Plan,
    imbalance,
    lower_bound,
    plan_window,
    sum_of_makespans,
)


def test_giants_stand_side_by_side(make_plan: Callable[..., Plan]) -> None:
    tokens = np.array([90, 90] + [30] * 9)
    costs = np.array([900.0, 900.0] + [100.0] * 9)
    plan = make_plan(tokens, costs, micro_batches=3)
    assert plan.micro_batch_of[0] == plan.micro_batch_of[1]
    assert plan.rank_of[0] != plan.rank_of[1]


@pytest.mark.parametrize("seed", range(3))
def test_levels_come_close_to_the_bound(
    draw_lengths: Callable[..., npt.NDArray[np.int64]], seed: int
) -> None:
    tokens = draw_lengths(seed, 256, 8192, 0.92)
    costs = 24576.0 * tokens + tokens.astype(float) ** 2
    arguments: dict[str, Any] = {
        "dp_size": 32,
        "micro_batches": 8,
        "rows": 1,
        "constraints": PackingConstraints(8192),
    }
    plan = plan_window(tokens, costs, **arguments)
    assert sum_of_makespans(plan.loads) <= 1.01 * lower_bound(tokens, costs, **arguments)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("wlb-2", 59),
        *(("wlb-4", seed) for seed in (31, 41, 89, 93)),
        *(("wlb-8", seed) for seed in (14, 23, 55, 82, 90)),
    ],
)
def test_few_long_documents_come_close_to_the_bound(name: str, seed: int) -> None:
    case = CASES[name]
    window = case.draw(seed)
    arguments: dict[str, Any] = {
        "dp_size": case.dp_size,
        "micro_batches": case.micro_batches,
        "rows": 1,
        "constraints": PackingConstraints(case.seq_len),
    }
    plan = plan_window(window.tokens, window.costs, **arguments)
    assert sum_of_makespans(plan.loads) <= 1.02 * lower_bound(window.tokens, window.costs, **arguments)


@pytest.mark.parametrize("rows", [1, 3])
def test_full_rows_are_repaired(draw_lengths: Callable[..., npt.NDArray[np.int64]], rows: int) -> None:
    for seed in range(5):
        tokens = draw_lengths(seed, 96, 8192, 0.98)
        plan = plan_window(
            tokens,
            tokens,
            dp_size=96 // rows,
            micro_batches=1,
            rows=rows,
            constraints=PackingConstraints(8192),
        )
        assert np.bincount(plan.assignment, tokens).max() <= 8192


def test_step_synchronisation_balances_sums(draw_lengths: Callable[..., npt.NDArray[np.int64]]) -> None:
    tokens = draw_lengths(5, 64, 8192, 0.9)
    costs = tokens.astype(float) ** 2
    plan = plan_window(
        tokens,
        costs,
        dp_size=8,
        micro_batches=8,
        rows=1,
        constraints=PackingConstraints(8192),
        objective=Objective(sync="step"),
    )
    per_rank = plan.loads.sum(axis=0)
    assert per_rank.max() <= 1.001 * per_rank.mean()
    assert np.bincount(plan.assignment, tokens).max() <= 8192


def test_stages_are_balanced_one_by_one() -> None:
    rng = np.random.default_rng(0)
    images, text = rng.integers(0, 50, 400), rng.integers(1, 100, 400)
    costs = np.stack([text, images * 3.0], axis=-1)
    plan = plan_window(text, costs, dp_size=8, micro_batches=2, rows=1, constraints=PackingConstraints(2000))
    only_sum = plan_window(
        text, costs.sum(axis=1), dp_size=8, micro_batches=2, rows=1, constraints=PackingConstraints(2000)
    )
    summed = np.zeros_like(plan.loads)
    np.add.at(summed, (only_sum.micro_batch_of, only_sum.rank_of), costs)
    assert plan.loads.shape == (2, 8, 2)
    assert sum_of_makespans(plan.loads) < sum_of_makespans(summed)
    assert imbalance(plan.loads) < 1.02


@pytest.mark.parametrize("algorithm", ["auto", "lpt", "levels", "refine"])
@pytest.mark.parametrize("objective", [Objective(), Objective(sync="step"), Objective(kind="balance")])
def test_degenerate_windows(algorithm: Any, objective: Objective) -> None:
    common: dict[str, Any] = {"objective": objective, "constraints": PackingConstraints(1000)}
    shapes: list[dict[str, Any]] = [
        {"tokens": [], "costs": []},
        {"tokens": [7], "costs": [0.0]},
        {"tokens": [7], "costs": [3.0], "dp_size": 1, "micro_batches": 1},
        {"tokens": [0, 0, 0], "costs": [0.0, 1.0, 0.0]},
        {"tokens": [5] * 40, "costs": [1.0] * 40},
        {"tokens": [5] * 40, "costs": [0.0] * 40, "rows": 3},
        {"tokens": [5] * 40, "costs": [1e308] * 40},
        {"tokens": [5] * 40, "costs": [5e-324] * 40},
        {"tokens": [1] * 9, "costs": [1.0] * 9, "dp_size": 300, "micro_batches": 2},
        {"tokens": [5] * 20, "costs": np.zeros((20, 2))},
    ]
    for shape in shapes:
        size = len(shape["tokens"])
        base: dict[str, Any] = {"dp_size": 4, "micro_batches": 2, "rows": 1} | common | shape
        plan = plan_window(algorithm=algorithm, reference=np.zeros(size, dtype=np.int32), **base)
        assert len(plan.assignment) == size
        assert plan.loads.shape[:2] == (base["micro_batches"], base["dp_size"])
        assert plan.decision.explain()


def test_many_slots_are_evened_out_too() -> None:
    tokens = np.random.default_rng(0).integers(1, 1000, 42_000)
    arguments: dict[str, Any] = {"dp_size": 1000, "micro_batches": 1, "rows": 1}
    arguments["constraints"] = PackingConstraints(1 << 20)
    plan = plan_window(tokens, tokens, **arguments)
    simple = plan_window(tokens, tokens, algorithm="lpt", **arguments)
    assert plan.imbalance < simple.imbalance
    assert plan.imbalance < 1.0005


def test_several_limits_are_planned_from_the_reference(make_plan: Callable[..., Plan]) -> None:
    # Full in both limits: no greedy rule finds a packing, and rows are searched for one limit only.
    tokens = [44, 31, 25, 43, 29, 28, 39, 33, 28, 37, 36, 27]
    limits = PackingConstraints(100, max_segments=3)
    plan = make_plan(tokens, reference=np.repeat([0, 1, 2, 3], 3), constraints=limits)
    assert np.bincount(plan.assignment).tolist() == [3, 3, 3, 3]
    assert np.bincount(plan.assignment, tokens).max() <= 100


def test_a_candidate_that_breaks_the_limit_is_none(make_plan: Callable[..., Plan]) -> None:
    # Differencing looks at costs alone: it puts the two long samples together.
    plan = make_plan([90, 5, 90, 5], np.array([4.0, 3.0, 1.0, 2.0]), micro_batches=1)
    assert "differencing" not in plan.decision.scores
    assert np.bincount(plan.assignment, [90, 5, 90, 5]).tolist() == [95, 95]
