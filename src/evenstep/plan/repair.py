"""Room for samples that a greedy pass left over, and a sample for every empty row."""

from __future__ import annotations

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["fill_empty_rows", "place_left_over"]


def place_left_over(problem: Problem, row: Int, left_over: list[int]) -> bool:
    """Place samples that fit nowhere by moving one other sample out of the way; changes ``row``.

    Returns:
        Whether every one of them found room.
    """
    if not left_over:
        return True
    weights, limits = problem.weights, problem.limits[:, None]
    used = np.zeros((len(problem.limits), problem.num_rows), dtype=np.int64)
    placed = np.flatnonzero(row >= 0)
    for weight, total in zip(weights, used, strict=True):
        np.add.at(total, row[placed], weight[placed])
    by_tokens = sorted(left_over, key=lambda sample: (-int(weights[0, sample]), sample))
    return all(_place(problem, row, used, limits - used, sample) for sample in by_tokens)


def _place(problem: Problem, row: Int, used: Int, free: Int, sample: int) -> bool:
    weights = problem.weights
    need = weights[:, sample, None]
    direct = (free >= need).all(axis=0)
    if direct.any():
        _put(weights, row, used, free, sample, int(np.flatnonzero(direct)[free[0, direct].argmin()]))
        return True
    placed = np.flatnonzero(row >= 0)
    # A sample in the way: without it the row has room, and it fits into another row.
    opens = (free[:, row[placed]] + weights[:, placed] >= need).all(axis=0)
    for other in placed[opens][np.argsort(weights[0, placed[opens]], kind="stable")].tolist():
        home = int(row[other])
        fits = (free >= weights[:, other, None]).all(axis=0)
        fits[home] = False
        if fits.any():
            target = int(np.flatnonzero(fits)[free[0, fits].argmin()])
            _take(weights, row, used, free, other)
            _put(weights, row, used, free, other, target)
            _put(weights, row, used, free, sample, home)
            return True
    return False


def _take(weights: Int, row: Int, used: Int, free: Int, sample: int) -> None:
    used[:, row[sample]] -= weights[:, sample]
    free[:, row[sample]] += weights[:, sample]


def _put(weights: Int, row: Int, used: Int, free: Int, sample: int, target: int) -> None:
    row[sample] = target
    used[:, target] += weights[:, sample]
    free[:, target] -= weights[:, sample]


def fill_empty_rows(problem: Problem, row: Int) -> None:
    """Give every empty row one sample while there are enough samples; changes ``row``.

    A sample of the same slot comes first, because that changes no load; then the cheapest sample that shares a row.
    """
    if problem.size < problem.num_rows:
        return
    count = np.bincount(row, minlength=problem.num_rows)
    for empty in np.flatnonzero(count == 0).tolist():
        shares = np.flatnonzero(count[row] > 1)
        same_slot = shares[row[shares] // problem.rows == empty // problem.rows]
        choices = same_slot if len(same_slot) else shares
        sample = int(choices[problem.work[choices].argmin()])
        count[row[sample]] -= 1
        count[empty] += 1
        row[sample] = empty
