"""Which layout a window gets and why: the gate, the reference, the words."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from evenstep.errors import Infeasible
from evenstep.plan import Plan, sum_of_makespans


def test_the_reference_is_kept_when_nothing_is_better(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan([50, 50, 50, 50], reference=[0, 1, 2, 3])
    assert plan.assignment.tolist() == [0, 1, 2, 3]
    assert plan.decision.algorithm == "reference"
    assert plan.decision.gain == 0.0
    assert plan.decision.moved_tokens == 0
    assert plan.decision.reason.endswith("is no better.")


def test_the_gate_says_what_it_refused(make_plan: Callable[..., Plan]) -> None:
    arguments = {"reference": [0, 0, 1, 1], "dp_size": 2, "micro_batches": 1}
    plan = make_plan([60, 40, 30, 20], min_gain=0.5, **arguments)
    assert plan.decision.reason == (
        "The reference layout was kept: refine would gain 20.00%, which is not above min_gain=50.00%."
    )
    taken = make_plan([60, 40, 30, 20], min_gain=0.1, **arguments)
    assert taken.decision.algorithm == "refine"
    assert (taken.decision.original, taken.decision.candidate) == (100.0, 80.0)
    assert sum_of_makespans(taken.loads) == 80.0


def test_a_kept_reference_leaves_no_row_empty_either(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan([10, 10, 10, 10], reference=[0, 0, 0, 0], dp_size=2, micro_batches=1, min_gain=0.99)
    assert plan.decision.algorithm == "reference"
    assert plan.decision.reason.endswith(" 1 samples went into rows that it left empty.")
    assert sorted(plan.assignment.tolist()) == [0, 0, 0, 1]


def test_a_broken_reference_is_not_kept(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan([60, 60, 30], reference=[0, 0, 1], min_gain=0.9)
    assert plan.decision.algorithm != "reference"
    assert len(np.unique(plan.assignment[:2])) == 2


def test_full_rows_are_planned_from_their_reference(make_plan: Callable[..., Plan]) -> None:
    # Perfectly full rows that no greedy rule finds; the reference layout is a packing.
    tokens = [44, 31, 25, 43, 29, 28, 39, 33, 28, 37, 36, 27]
    reference = np.repeat([0, 1, 2, 3], 3)
    for algorithm in ("auto", "lpt", "levels", "refine"):
        plan = make_plan(tokens, reference=reference, algorithm=algorithm)
        assert np.bincount(plan.assignment, tokens).max() <= 100


def test_a_giant_is_explained(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan([100] + [10] * 20, np.array([1000.0] + [10.0] * 20))
    assert plan.decision.floor_sample == 0
    assert plan.decision.advice == (
        "Sample 0 (100 tokens) alone costs 3.33x a rank's fair share of a micro-batch: no plan makes its micro-batch "
        "shorter. A window of about 4 micro-batches would bring enough such samples together to fill a micro-batch of "
        "all 2 ranks (here there are 1)."
    )


def test_refine_without_a_reference_says_so(make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(Infeasible, match=re.escape("(refine: there is no reference layout to refine)")):
        make_plan([1, 2, 3], algorithm="refine")
