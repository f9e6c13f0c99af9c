"""Two giants in one row, where a giant that is left over would set the cost of a whole group by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["as_one", "giant_pairs", "taken_apart"]


def giant_pairs(problem: Problem, row: Int, hard_groups: int) -> list[tuple[int, int]]:
    """The giant that is alone in the last group of giants, with each giant that leaves room for it in its row.

    Args:
        problem: The window, of one stage.
        row: Row of each sample, int64 ``[n]``; the first ``hard_groups`` groups cost what a giant does.
        hard_groups: At least 1, less than ``problem.groups``.

    Returns:
        Pairs of samples, the costliest first.
    """
    if problem.size == problem.num_rows:  # a pair would leave a row without samples
        return []
    loads, group = problem.loads(row)[:, :, 0], row // (problem.rows * problem.ranks)
    # A giant costs more than the next group does, and in the last group more than the group would without it.
    without = np.append(loads[1:].max(axis=1), loads[-1].mean())
    for last in (hard_groups, hard_groups - 1):
        giants = np.flatnonzero((problem.work > without[last]) & (group <= last))
        lone = giants[group[giants] == last]
        if len(lone) == 1:
            fits = problem.weights[:, giants] + problem.weights[:, lone] <= problem.limits[:, None]
            others = giants[fits.all(axis=0) & (giants != lone)]
            others = others[np.argsort(-problem.work[others], kind="stable")]
            return [(int(lone[0]), other) for other in others.tolist()]
    return []


def as_one(problem: Problem, pair: tuple[int, int]) -> Problem:
    """The window with one sample, the earlier of both, in place of two."""
    first, second = min(pair), max(pair)

    def joined(column: Int) -> Int:
        both = column.copy()
        both[..., first] += column[..., second]
        return np.delete(both, second, axis=-1)

    return replace(
        problem,
        costs=joined(problem.costs),
        work=joined(problem.work),
        weights=joined(problem.weights),
        reference=None,
    )


def taken_apart(row: Int, pair: tuple[int, int]) -> Int:
    """The layout of the window itself, from that of `as_one`."""
    return np.insert(row, max(pair), row[min(pair)])
