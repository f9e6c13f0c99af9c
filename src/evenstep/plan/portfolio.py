"""The algorithms under one protocol: a window in, a feasible layout or the reason for none out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from evenstep.plan.completion import complete_rows
from evenstep.plan.differencing import differencing, suits
from evenstep.plan.exact import MOST_SAMPLES, exact
from evenstep.plan.grouping import group_like_costs
from evenstep.plan.levels import levels
from evenstep.plan.lpt import lpt
from evenstep.plan.packing import best_fit, fullest_rows
from evenstep.plan.pairing import as_one, giant_pairs, taken_apart
from evenstep.plan.polish import polish
from evenstep.plan.problem import Int, Problem
from evenstep.plan.repair import fill_empty_rows, repaired
from evenstep.plan.stay_home import stay_home

__all__ = ["run_portfolio"]

_NEAR = 1.005  # times the lower bound: nearer than that no giants are paired
_PAIRS = 3  # of giants that are tried
_PAIRED_SAMPLES = 1 << 13  # up to which a few more plans take little time


def run_portfolio(
    problem: Problem, algorithm: str, holders: Int | None, value: Int, bound: float
) -> tuple[dict[str, Int], dict[str, str]]:
    """Candidate layouts by algorithm, and why an algorithm has none.

    Args:
        problem: The window.
        algorithm: ``"lpt"``, ``"levels"``, ``"refine"`` or ``"auto"`` for all of them.
        holders: Dp rank that holds each sample, int64 ``[n]``, or None; then there is nothing to refine.
        value: What staying with its holder is worth, int64 ``[n]``: payload bytes or tokens.
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
    hard, start = 0, None
    if algorithm != "lpt":
        hard, start = _levels(problem, order)
        if isinstance(start, str):
            failed["levels"] = start
        else:
            found["levels"] = start
            if problem.makespans(start) > bound * (1 + 1e-9):
                found["levels"] = min(polish(problem, start, hard), start, key=problem.makespans)
            if hard and problem.size <= _PAIRED_SAMPLES:
                hard, found["levels"] = _paired(problem, found["levels"], hard, bound)
    if algorithm == "auto" and not hard and start is not None:
        lpt_row = start  # no giants: levels is LPT
    elif algorithm in ("auto", "lpt"):
        lpt_row = _packed(problem, partial(lpt, problem, order))
    else:
        lpt_row = None
    if isinstance(lpt_row, str):
        failed["lpt"] = lpt_row
    elif lpt_row is not None:
        found["lpt"] = lpt_row
    if algorithm == "auto" and suits(problem):
        row = differencing(problem)
        if problem.broken_row(row) is None:
            fill_empty_rows(problem, row)
            found["differencing"] = min(polish(problem, row, 0), row, key=problem.makespans)
    if algorithm in ("auto", "refine"):
        if holders is not None:
            if "levels" in found:
                thorough = algorithm == "refine"
                found["refine"] = stay_home(
                    problem, order, holders, value, found["levels"], hard, thorough=thorough
                )
        elif algorithm == "refine":
            failed["refine"] = "there is no reference layout to refine"
    if algorithm == "refine":
        found.pop("levels", None)
    return found, failed


def _levels(problem: Problem, order: Int) -> tuple[int, Int | str]:
    """Levels: the number of groups under a giant, and a layout with these first, or why there is none."""
    if len(problem.costs) > 1:  # a level is one number
        return 0, _packed(problem, partial(lpt, problem, order))
    hard, row = _by_levels(problem, order)
    if isinstance(row, str):
        return 0, _packed(problem, partial(lpt, problem, order))
    return hard, row


def _by_levels(problem: Problem, order: Int) -> tuple[int, Int | str]:
    hard = 0

    def assign(row: Int) -> None:
        nonlocal hard
        hard = levels(problem, order, row)

    row = repaired(problem, assign)
    return hard, row if isinstance(row, str) else group_like_costs(problem, row)


def _paired(problem: Problem, row: Int, hard: int, bound: float) -> tuple[int, Int]:
    """Levels again with two giants in one row, where that is better than a group with one giant."""
    best = hard, row
    if problem.makespans(row) <= bound * _NEAR:
        return best
    for pair in giant_pairs(problem, row, hard)[:_PAIRS]:
        window = as_one(problem, pair)
        levelled, start = _by_levels(window, np.argsort(-window.work, kind="stable"))
        if not isinstance(start, str):
            again = taken_apart(polish(window, start, levelled), pair)
            best = min(best, (levelled, again), key=lambda plan: problem.makespans(plan[1]))
    return best


def _packed(problem: Problem, assign: Callable[[Int], object]) -> Int | str:
    """A layout by ``assign``, or by the packers that look at tokens first where it found no room; or why not.

    The reference layout may be a packing that no greedy rule finds; only without one rows are searched for.
    """
    row: Int | str = ""
    packers = [_even_tokens, _token_first, _fullest_first]
    if problem.reference is not None and problem.broken_row(problem.reference) is None:
        packers.append(_as_before)
    attempts: list[Callable[[Int], object]] = [assign]
    attempts += [partial(pack, problem) for pack in (*packers, _complete)]
    for attempt in attempts:
        row = repaired(problem, attempt)
        if not isinstance(row, str):
            return group_like_costs(problem, row)
    return row


def _even_tokens(problem: Problem, row: Int) -> None:
    """As many tokens in every row: room is left where costs and tokens have little to do with each other."""
    tokens = problem.weights[0]
    lpt(replace(problem, work=tokens), np.argsort(-tokens, kind="stable"), row)


def _token_first(problem: Problem, row: Int) -> None:
    packed = best_fit(problem.weights, problem.limits, np.argsort(-problem.weights[0], kind="stable"))
    row[:] = np.where(packed < problem.num_rows, packed, -1)


def _fullest_first(problem: Problem, row: Int) -> None:
    packed = None
    if len(problem.limits) == 1:
        packed = fullest_rows(problem.weights[0], int(problem.limits[0]), problem.num_rows)
    if packed is not None:
        row[:] = packed


def _as_before(problem: Problem, row: Int) -> None:
    assert problem.reference is not None
    row[:] = problem.reference


def _complete(problem: Problem, row: Int) -> None:
    if len(problem.limits) == 1:
        packed = complete_rows(problem.weights[0], int(problem.limits[0]), problem.num_rows)
        if packed is not None:
            row[:] = packed
