"""Scores of plans and the metrics they are reported in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from evenstep.plan import Objective, Plan, efficiency, fill, imbalance, sum_of_makespans, sum_of_means


def test_metrics_agree_with_their_definitions() -> None:
    loads = np.array([[4.0, 2.0], [1.0, 3.0]])
    assert (sum_of_makespans(loads), sum_of_means(loads)) == (7.0, 5.0)
    assert imbalance(loads) == 1.4
    assert efficiency(loads) == pytest.approx(5 / 7)
    assert imbalance(np.zeros((2, 2))) == 1.0
    assert fill(np.array([50, 25]), rows=1, seq_len=100) == 0.75


def test_metrics_of_costs_beside_the_end_of_float64() -> None:
    assert imbalance(np.array([[1.2e308, 0.6e308]])) == pytest.approx(4 / 3)
    assert imbalance(np.array([[np.inf, 1.0]])) == np.inf
    assert efficiency(np.array([[np.inf, 1.0]])) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"sync": "epoch"},
            "sync='epoch' does not say where ranks wait; use 'micro_batch' (FSDP, ZeRO-3, pipelines) or 'step' (DDP "
            "with no_sync)",
        ),
        ({"kind": "max"}, "kind='max' is no objective; use 'makespan' or 'balance'"),
    ],
)
def test_an_unknown_objective_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Objective(**arguments)


def test_scores_of_objectives() -> None:
    loads = np.array([[[4.0, 1.0], [2.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]]])
    assert Objective().score(loads) == 4 + 1 + 3 + 4
    assert Objective(sync="step").score(loads) == 5 + 5
    variations = [1 / 9, 0.0, 1 / 4, 1 / 9]
    assert Objective(kind="balance").score(loads) == pytest.approx(np.mean(variations))


def test_a_plan_says_where_each_sample_is_and_how_even_it_is(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan([60, 50, 40, 30, 20], dp_size=2, micro_batches=1, rows=3)
    assert (plan.imbalance, plan.efficiency) == (imbalance(plan.loads), efficiency(plan.loads))
    flat = (plan.micro_batch_of * 2 + plan.rank_of) * 3 + plan.row_of
    np.testing.assert_array_equal(flat, plan.assignment)
    assert plan.row_of.max() <= 2
