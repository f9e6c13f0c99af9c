"""Packing constraints: validation, the policies for oversized samples, budgets and segments."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest

from evenstep.errors import Infeasible
from evenstep.plan import PackingConstraints, plan_window


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"seq_len": 0},
            ValueError,
            "seq_len is 0, expected a positive integer: the tokens that fit into a row",
        ),
        (
            {"seq_len": True},
            TypeError,
            "seq_len is True (bool), expected an integer: the tokens that fit into a row",
        ),
        (
            {"seq_len": 8, "oversized": "cut"},
            ValueError,
            "oversized='cut' is not a policy for samples above a limit; use one of 'error', 'single', 'truncate'",
        ),
        (
            {"seq_len": 8, "max_segments": 0},
            ValueError,
            "max_segments is 0, expected a positive integer: the samples that fit into a row, or None",
        ),
        (
            {"seq_len": 8, "budgets": {"images": "4"}},
            TypeError,
            "budgets['images'] is '4' (str), expected a number",
        ),
        (
            {"seq_len": 8, "budgets": {"images": float("nan")}},
            ValueError,
            "budgets['images'] is nan, so no row could hold a sample; use a finite limit >= 0",
        ),
    ],
)
def test_a_bad_field_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        PackingConstraints(**arguments)


def test_budgets_are_copied_and_frozen() -> None:
    budgets = {"images": 4.0}
    constraints = PackingConstraints(8, budgets=budgets)
    budgets["images"] = 9.0
    assert dict(constraints.budgets or {}) == {"images": 4.0}
    assert pickle.loads(pickle.dumps(constraints)) == constraints


def test_an_oversized_sample_is_an_error_that_names_it() -> None:
    message = (
        "sample 1 of the window has 11 tokens, more than seq_len=10: it fits into no row. Filter or split such samples "
        "(evenstep.datasets.SplitDocuments), raise seq_len, or set oversized='single' or 'truncate'"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        plan_window(
            [3, 11], [1.0, 1.0], dp_size=1, micro_batches=2, rows=1, constraints=PackingConstraints(10)
        )


def test_a_sample_above_a_budget_is_an_error_that_names_it() -> None:
    message = (
        "sample 0 of the window has images=5, more than the budget of 4: it fits into no row. Filter such samples, "
        "raise budgets['images'], or set oversized='single'"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        plan_window(
            [3, 2],
            [1.0, 1.0],
            dp_size=1,
            micro_batches=1,
            rows=1,
            constraints=PackingConstraints(10, oversized="truncate", budgets={"images": 4}),
            features={"images": [5.0, 0.0]},
        )


def test_a_budget_without_its_feature_is_an_error() -> None:
    message = (
        "budgets has 'images', but the samples have no such feature (they have ['audio']): the budget could not be "
        "kept. Return it from metadata_fn, or drop the budget"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan_window(
            [3],
            [1.0],
            dp_size=1,
            micro_batches=1,
            rows=1,
            constraints=PackingConstraints(10, budgets={"images": 4}),
            features={"audio": [5.0]},
        )


@pytest.mark.parametrize("algorithm", ["auto", "lpt", "levels"])
def test_single_sits_alone(algorithm: Any) -> None:
    tokens = np.array([25, 3, 12, 1, 2, 4, 10])
    plan = plan_window(
        tokens,
        tokens.astype(float),
        dp_size=2,
        micro_batches=2,
        rows=1,
        constraints=PackingConstraints(10, oversized="single"),
        algorithm=algorithm,
    )
    for giant in (0, 2, 6):
        assert (plan.assignment == plan.assignment[giant]).sum() == 1
    assert len(np.unique(plan.assignment[[1, 3, 4, 5]])) == 1


def test_truncate_counts_seq_len_tokens() -> None:
    plan = plan_window(
        [25, 10],
        [1.0, 1.0],
        dp_size=2,
        micro_batches=1,
        rows=1,
        constraints=PackingConstraints(10, "truncate"),
    )
    assert sorted(plan.assignment.tolist()) == [0, 1]


def test_fractional_budgets_are_kept() -> None:
    share = np.full(40, 0.1)
    plan = plan_window(
        np.ones(40, dtype=np.int64),
        np.arange(40.0),
        dp_size=2,
        micro_batches=2,
        rows=2,
        constraints=PackingConstraints(100, budgets={"share": 0.75}),
        features={"share": share},
    )
    assert np.bincount(plan.assignment, share).max() <= 0.75


def test_max_segments_spreads_samples() -> None:
    plan = plan_window(
        np.ones(16, dtype=np.int64),
        np.zeros(16),
        dp_size=2,
        micro_batches=2,
        rows=1,
        constraints=PackingConstraints(100, max_segments=4),
    )
    assert np.bincount(plan.assignment).tolist() == [4, 4, 4, 4]
