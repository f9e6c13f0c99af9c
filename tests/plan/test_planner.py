"""plan_window: arguments, errors, decisions, degenerate windows, determinism, quality on a named case."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from evenstep.errors import Infeasible
from evenstep.plan import (
    Objective,
    PackingConstraints,
    efficiency,
    fill,
    imbalance,
    lower_bound,
    moved,
    plan_window,
    reference_layout,
    sum_of_makespans,
    sum_of_means,
)

LIMITS = PackingConstraints(100)


def _plan(tokens: Any, costs: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"dp_size": 2, "micro_batches": 2, "rows": 1, "constraints": LIMITS} | changes
    return plan_window(tokens, np.asarray(tokens, dtype=float) if costs is None else costs, **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dp_size": 0}, ValueError, "dp_size is 0, expected a positive integer"),
        ({"rows": 1.0}, TypeError, "rows is 1.0 (float), expected a positive integer"),
        ({"micro_batches": True}, TypeError, "micro_batches is True (bool), expected a positive integer"),
        (
            {"algorithm": "best"},
            ValueError,
            "algorithm='best' is unknown; use one of 'auto', 'lpt', 'levels', 'refine'",
        ),
        (
            {"min_gain": -0.1},
            ValueError,
            "min_gain is -0.1, expected a share of the original score >= 0, like 0.02",
        ),
        ({"min_gain": "1"}, TypeError, "min_gain is '1' (str), expected a number"),
        (
            {"reference": [0, 1, 4]},
            ValueError,
            "reference[2] is row 4, but the window has only micro_batches * dp_size * rows = 2 * 2 * 1 rows; pass flat "
            "rows (micro_batch * dp_size + dp_rank) * rows + row",
        ),
        (
            {"reference": [0, 1]},
            ValueError,
            "reference has 2 entries for 3 samples; they must be as many",
        ),
        (
            {"holders": [0, 2, 1]},
            ValueError,
            "holders[1] is 2, but there are only 2 data-parallel ranks; pass dp ranks in [0, 2)",
        ),
        (
            {"costs": [1.0, float("inf"), 1.0]},
            ValueError,
            "costs[1] is inf, expected a finite number >= 0",
        ),
        (
            {"costs": [[1.0, 2.0], [1.0, -2.0], [0.0, 0.0]]},
            ValueError,
            "costs[1, 1] is -2.0, expected a finite number >= 0",
        ),
        (
            {"tokens": [1, -2, 3]},
            ValueError,
            "tokens[1] is -2, expected an integer >= 0",
        ),
        (
            {"tokens": [1.5, 2.0, 3.0]},
            TypeError,
            "tokens is float64 of shape (3,), expected integers of shape [n]",
        ),
    ],
)
def test_a_bad_argument_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"tokens": [1, 2, 3], "costs": [1.0, 2.0, 3.0]} | changes
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        _plan(**arguments)


def test_too_many_tokens_name_the_constraint() -> None:
    message = (
        "5 samples need 450 of seq_len and the 4 rows of this window hold 400: no packing exists. Plan fewer samples, "
        "or more micro-batches or rows"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        _plan([90] * 5)


def test_no_packing_names_the_sample_and_the_constraint() -> None:
    message = (
        "no packing was found for 5 samples in 4 rows: they fill seq_len to 65.0%, and sample 1 alone takes 56 of 100 "
        "(levels: 1 samples found no row with room; lpt: 1 samples found no row with room). Plan more micro-batches or "
        "rows, or raise the limit"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        _plan([51, 56, 51, 51, 51])


def test_the_reference_is_kept_when_nothing_is_better() -> None:
    plan = _plan([50, 50, 50, 50], reference=[0, 1, 2, 3])
    assert plan.assignment.tolist() == [0, 1, 2, 3]
    assert plan.decision.algorithm == "reference"
    assert plan.decision.gain == 0.0
    assert plan.decision.moved_tokens == 0
    assert plan.decision.reason.endswith("is no better.")


def test_the_gate_says_what_it_refused() -> None:
    arguments = {"reference": [0, 0, 1, 1], "dp_size": 2, "micro_batches": 1}
    plan = _plan([60, 40, 30, 20], min_gain=0.5, **arguments)
    assert plan.decision.reason == (
        "The reference layout was kept: refine would gain 20.00%, which is not above min_gain=50.00%."
    )
    taken = _plan([60, 40, 30, 20], min_gain=0.1, **arguments)
    assert taken.decision.algorithm == "refine"
    assert (taken.decision.original, taken.decision.candidate) == (100.0, 80.0)
    assert sum_of_makespans(taken.loads) == 80.0


def test_a_kept_reference_leaves_no_row_empty_either() -> None:
    plan = _plan([10, 10, 10, 10], reference=[0, 0, 0, 0], dp_size=2, micro_batches=1, min_gain=0.99)
    assert plan.decision.algorithm == "reference"
    assert plan.decision.reason.endswith(" 1 samples went into rows that it left empty.")
    assert sorted(plan.assignment.tolist()) == [0, 0, 0, 1]


def test_a_broken_reference_is_not_kept() -> None:
    plan = _plan([60, 60, 30], reference=[0, 0, 1], min_gain=0.9)
    assert plan.decision.algorithm != "reference"
    assert len(np.unique(plan.assignment[:2])) == 2


def test_an_unrepairable_window_keeps_its_reference() -> None:
    # Perfectly full rows that neither heuristic finds; the reference layout is a packing.
    tokens = [44, 31, 25, 43, 29, 28, 39, 33, 28, 37, 36, 27]
    reference = np.repeat([0, 1, 2, 3], 3)
    for algorithm in ("auto", "lpt", "levels", "refine"):
        plan = _plan(tokens, reference=reference, algorithm=algorithm)
        assert np.bincount(plan.assignment, tokens).max() <= 100


def test_a_giant_is_explained() -> None:
    plan = _plan([100] + [10] * 20, np.array([1000.0] + [10.0] * 20))
    assert plan.decision.floor_sample == 0
    assert plan.decision.advice == (
        "Sample 0 (100 tokens) alone costs 3.33x a rank's fair share of a micro-batch: no plan makes its micro-batch "
        "shorter. A window of about 4 micro-batches would bring enough such samples together to fill a micro-batch of "
        "all 2 ranks (here there are 1)."
    )


def test_giants_stand_side_by_side() -> None:
    tokens = np.array([90, 90] + [30] * 9)
    costs = np.array([900.0, 900.0] + [100.0] * 9)
    plan = _plan(tokens, costs, micro_batches=3)
    assert plan.micro_batch_of[0] == plan.micro_batch_of[1]
    assert plan.rank_of[0] != plan.rank_of[1]


def test_ranks_keep_what_they_hold() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 100, 64)
    reference = rng.permutation(64)
    limits = PackingConstraints(1000)
    free = _plan(tokens, dp_size=8, micro_batches=8, reference=None, constraints=limits)
    held = _plan(tokens, dp_size=8, micro_batches=8, reference=reference, constraints=limits)
    stay = tokens[~moved(held.assignment, reference % 8, dp_size=8, rows=1)].sum()
    apart = tokens[~moved(free.assignment, reference % 8, dp_size=8, rows=1)].sum()
    assert stay > 1.5 * apart
    assert held.decision.moved_tokens == tokens.sum() - stay


def test_payload_bytes_decide_what_stays() -> None:
    payload = np.array([1, 1000])
    plan = _plan(
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


def test_refine_without_a_reference_says_so() -> None:
    with pytest.raises(Infeasible, match=re.escape("(refine: there is no reference layout to refine)")):
        _plan([1, 2, 3], algorithm="refine")


def test_the_digest_covers_what_decides_the_plan() -> None:
    base: dict[str, Any] = {
        "tokens": [10, 20, 30, 40],
        "costs": [1.0, 2.0, 3.0, 4.0],
        "reference": [0, 1, 2, 3],
    }
    changes: list[dict[str, Any]] = [
        {},
        {"tokens": [10, 20, 30, 41]},
        {"costs": [1.0, 2.0, 3.0, 4.5]},
        {"reference": [1, 0, 2, 3]},
        {"min_gain": 0.1},
        {"algorithm": "lpt"},
        {"constraints": PackingConstraints(101)},
        {"constraints": PackingConstraints(100, max_segments=9)},
        {"objective": Objective(sync="step")},
        {"payload_bytes": [1, 1, 1, 1]},
        {"holders": [0, 0, 0, 0]},
    ]
    digests = [_plan(**(base | change)).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert digests[0] == _plan(**base).digest


_CHILD = """
import numpy as np
from evenstep.plan import PackingConstraints, plan_window
rng = np.random.default_rng(7)
tokens = rng.integers(1, 4000, 900)
costs = tokens * 0.37 + tokens.astype(float) ** 2 / 17
reference = np.arange(900) % 640
plan = plan_window(tokens, costs, dp_size=16, micro_batches=10, rows=4, reference=None,
                   holders=reference % 16, constraints=PackingConstraints(8192))
print(plan.digest)
"""


def test_other_processes_make_the_same_plan() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", _CHILD],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        ).stdout
        for seed in ("0", "1")
    ]
    assert runs[0] == runs[1]
    assert int(runs[0]) > 0


def test_a_plan_can_be_made_in_another_process() -> None:
    arguments: dict[str, Any] = {
        "tokens": np.arange(1, 40),
        "costs": np.arange(39.0),
        "dp_size": 4,
        "micro_batches": 2,
    }
    arguments |= {"rows": 1, "constraints": PackingConstraints(200, budgets={"images": 300})}
    arguments |= {"features": {"images": np.arange(39.0)}, "objective": Objective(sync="step")}
    here = plan_window(**arguments)
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        there = pool.submit(plan_window, **arguments).result(timeout=120)
    np.testing.assert_array_equal(here.assignment, there.assignment)
    assert (here.digest, here.decision) == (there.digest, there.decision)


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


def test_fewer_micro_batches_than_the_reference_are_found() -> None:
    tokens = [60] * 4 + [40] * 4
    reference, needed = reference_layout(tokens, dp_size=2, rows=1, constraints=LIMITS)
    plan = _plan(tokens, reference=reference, micro_batches=None)
    assert (needed, plan.micro_batches) == (4, 2)
    assert plan.decision.reason == "refine needs 2 micro-batches instead of 4."


def test_metrics_agree_with_their_definitions() -> None:
    loads = np.array([[4.0, 2.0], [1.0, 3.0]])
    assert (sum_of_makespans(loads), sum_of_means(loads)) == (7.0, 5.0)
    assert imbalance(loads) == 1.4
    assert efficiency(loads) == pytest.approx(5 / 7)
    assert imbalance(np.zeros((2, 2))) == 1.0
    assert fill(np.array([50, 25]), rows=1, seq_len=100) == 0.75


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
