"""Rows of like cost side by side, so that one giant does not make everybody wait more than once."""

from __future__ import annotations

import numpy as np

from evenstep.plan.problem import Int, Problem, sums

__all__ = ["group_like_costs"]


def group_like_costs(problem: Problem, row: Int) -> Int:
    """Renumber slots so that each group holds the costliest slots that are left; rows stay whole."""
    if problem.groups == 1:
        return row
    load = sums(problem.work, row // problem.rows, problem.slots)
    place = np.empty(problem.slots, dtype=np.int64)
    place[np.argsort(-load, kind="stable")] = np.arange(problem.slots)
    return place[row // problem.rows] * problem.rows + row % problem.rows
