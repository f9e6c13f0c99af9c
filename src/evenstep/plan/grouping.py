"""Rows of like cost side by side, so that one giant does not make everybody wait more than once."""

from __future__ import annotations

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["group_like_costs", "like_costs_per_rank"]


def group_like_costs(problem: Problem, row: Int) -> Int:
    """Renumber slots so that each group holds the costliest slots that are left; rows stay whole."""
    if problem.groups == 1:
        return row
    loads = problem.loads(row).reshape(problem.slots, -1)
    keys = [loads.sum(axis=1)]
    if loads.shape[1] > 1:  # giants may be giants of one stage
        keys += [*loads.T, (loads / np.maximum(loads.max(axis=0), 1)).max(axis=1)]
    orders = [np.argsort(-key, kind="stable") for key in keys]
    order = min(orders, key=lambda slots: _makespans(loads[slots], problem.ranks))
    place = np.empty(problem.slots, dtype=np.int64)
    place[order] = np.arange(problem.slots)
    return place[row // problem.rows] * problem.rows + row % problem.rows


def like_costs_per_rank(problem: Problem, row: Int) -> Int:
    """Renumber the slots of each rank, the costliest in the first group: for one stage no order has smaller makespans.

    Nothing changes its rank. With several stages the order stays if it is no better.
    """
    loads = problem.loads(row)
    order = np.argsort(-loads.sum(axis=2), axis=0, kind="stable")
    rank = np.arange(problem.ranks)
    if _makespans(loads[order, rank].reshape(problem.slots, -1), problem.ranks) >= _makespans(
        loads.reshape(problem.slots, -1), problem.ranks
    ):
        return row
    place = np.empty(problem.slots, dtype=np.int64)
    place[(order * problem.ranks + rank).reshape(-1)] = np.arange(problem.slots)
    return place[row // problem.rows] * problem.rows + row % problem.rows


def _makespans(loads: Int, ranks: int) -> int:
    return int(loads.reshape(-1, ranks, loads.shape[1]).max(axis=1).sum())
