"""The algorithms under one protocol: a window in, a feasible layout or the reason for none out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from evenstep.plan.exact import MOST_SAMPLES, exact
from evenstep.plan.grouping import group_like_costs
from evenstep.plan.levels import levels
from evenstep.plan.lpt import lpt
from evenstep.plan.packing import best_fit, fullest_rows
from evenstep.plan.polish import polish
from evenstep.plan.problem import Int, Problem
from evenstep.plan.refine import refine
from evenstep.plan.repair import fill_empty_rows, place_left_over, spill

__all__ = ["run_portfolio"]

_SLACK = 96  # refine may exceed the level of the best plan by one part in this, to move less


def run_portfolio(
    problem: Problem, algorithm: str, holders: Int | None, bound: float
) -> tuple[dict[str, Int], dict[str, str]]:
    """Candidate layouts by algorithm, and why an algorithm has none.

    Args:
        problem: The window.
        algorithm: ``"lpt"``, ``"levels"``, ``"refine"`` or ``"auto"`` for all of them.
        holders: Dp rank that holds each sample, int64 ``[n]``, or None; then there is nothing to refine.
        bound: Lower bound of the sum of makespans; a layout there is not polished.
    """
    order = np.argsort(-problem.work, kind="stable")
    found: dict[str, Int] = {}
    failed: dict[str, str] = {}
    if algorithm == "auto" and 0 < problem.size <= MOST_SAMPLES and len(problem.costs) == 1:
        row_or_none = exact(problem)
        if row_or_none is not None:
            fill_empty_rows(problem, row_or_none)
            found["exact"] = group_like_costs(problem, row_or_none)
    start: Int | None = None
    hard = 0
    if algorithm != "lpt":
        start, hard, left = _levels(problem, order)
        if left:
            failed["levels"] = _no_room(left)
    if algorithm == "auto" and start is not None and not hard and not failed:
        found["lpt"] = start  # no giants: levels is LPT
    elif algorithm in ("auto", "lpt"):
        row, left = _repaired(problem, lambda row: lpt(problem, order, row))
        if left:
            failed["lpt"] = _no_room(left)
        else:
            found["lpt"] = group_like_costs(problem, row)
    if algorithm == "lpt":
        return found, failed
    best = None
    if start is not None and "levels" not in failed:
        best = found["levels"] = (
            start if _makespans(problem, start) <= bound * (1 + 1e-9) else polish(problem, start, hard)
        )
    if algorithm in ("auto", "refine"):
        if holders is None:
            if algorithm == "refine":
                failed["refine"] = "there is no reference layout to refine"
        else:
            _refine(problem, order, holders, best, found, failed)
    if algorithm == "refine":
        found.pop("levels", None)
        failed.pop("levels", None)
    return found, failed


def _repaired(problem: Problem, assign: Callable[[Int], object]) -> tuple[Int, int]:
    row = np.full(problem.size, -1, dtype=np.int64)
    assign(row)
    spill(problem, row)
    left_over = np.flatnonzero(row < 0)
    if not place_left_over(problem.weights, problem.limits, row, problem.num_rows):
        return row, len(left_over)
    fill_empty_rows(problem, row)
    return row, 0


def _levels(problem: Problem, order: Int) -> tuple[Int, int, int]:
    """Levels, or a token-first packing where levels left no room: (layout, hard groups, samples without room)."""
    hard = 0

    def assign(row: Int) -> None:
        nonlocal hard
        hard = levels(problem, order, row)

    row, left = _repaired(problem, assign)
    if not left:
        return group_like_costs(problem, row), hard, 0
    for pack in (_token_first, _fullest_first):
        row, left = _repaired(problem, partial(pack, problem))
        if not left:
            break
    return (row if left else group_like_costs(problem, row)), 0, left


def _token_first(problem: Problem, row: Int) -> None:
    packed = best_fit(problem.weights, problem.limits, np.argsort(-problem.weights[0], kind="stable"))
    row[:] = np.where(packed < problem.num_rows, packed, -1)


def _fullest_first(problem: Problem, row: Int) -> None:
    packed = None
    if len(problem.limits) == 1:
        packed = fullest_rows(problem.weights[0], int(problem.limits[0]), problem.num_rows)
    if packed is not None:
        row[:] = packed


def _refine(
    problem: Problem,
    order: Int,
    holders: Int,
    best: Int | None,
    found: dict[str, Int],
    failed: dict[str, str],
) -> None:
    if best is not None:
        makespan = problem.loads(best).sum(axis=2).max(axis=1)
        level = np.sort(makespan + makespan // _SLACK)[::-1]
        row, left = _repaired(problem, lambda row: np.copyto(row, refine(problem, order, holders, level)))
        if not left:
            found["refine"] = row
            return
        failed["refine"] = _no_room(left)
    if problem.reference is not None and problem.broken_row(problem.reference) is None:
        row = problem.reference.copy()
        fill_empty_rows(problem, row)
        found["refine"] = polish(problem, row, 0)
        failed.pop("refine", None)


def _makespans(problem: Problem, row: Int) -> float:
    return float(problem.loads(row).max(axis=1).sum())


def _no_room(left: int) -> str:
    return f"{left} samples found no row with room"
