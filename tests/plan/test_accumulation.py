"""Steps that are a number of samples: reference layout and fewest micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evenstep.plan import PackingConstraints, Plan, reference_layout

LIMITS = PackingConstraints(100)


def test_reference_layout_packs_contiguous_blocks_first_fit() -> None:
    layout, micro_batches = reference_layout(
        [60, 50, 40, 30, 100, 20, 10], dp_size=2, rows=1, constraints=LIMITS
    )
    # Rank 0 holds the first four samples, rank 1 the other three.
    assert micro_batches == 2
    assert layout.dtype == np.int32
    assert layout.tolist() == [0, 2, 0, 2, 1, 3, 3]


def test_reference_layout_of_nothing_has_one_micro_batch() -> None:
    layout, micro_batches = reference_layout([], dp_size=3, rows=2, constraints=LIMITS)
    assert (layout.tolist(), micro_batches) == ([], 1)


def test_fewer_micro_batches_than_the_reference_are_found(make_plan: Callable[..., Plan]) -> None:
    tokens = [60] * 4 + [40] * 4
    reference, needed = reference_layout(tokens, dp_size=2, rows=1, constraints=LIMITS)
    plan = make_plan(tokens, reference=reference, micro_batches=None)
    assert (needed, plan.micro_batches) == (4, 2)
    assert plan.decision.reason == "refine needs 2 micro-batches instead of 4."


def test_fewer_micro_batches_than_a_greedy_packer_needs_are_found(make_plan: Callable[..., Plan]) -> None:
    # Best-fit decreasing opens a third row for the 2: 5 + 4, 3 + 3 + 3.
    limits = PackingConstraints(10)
    plan = make_plan([5, 4, 3, 3, 3, 2], dp_size=1, micro_batches=None, constraints=limits)
    assert plan.micro_batches == 2
    assert sorted(plan.loads.reshape(-1).tolist()) == [10.0, 10.0]
