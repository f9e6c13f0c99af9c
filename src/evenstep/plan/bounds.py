"""What no plan of a window can beat, from pigeonholes and a knapsack."""

from __future__ import annotations

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["floors", "makespan_bound"]

_SHARES = 8  # rows are considered with room for at most 1, 2, ... this many large samples


def makespan_bound(problem: Problem) -> float:
    """A lower bound of the sum of makespans over groups and stages, in integer cost units.

    Let T_1 >= T_2 >= ... be the makespans of the groups and t_k a floor of T_k (see `floors`). The K costliest groups
    hold at most ``min(ranks * sum T_k, densest)`` work, ``densest`` being the fractional knapsack of cost in their
    tokens; the other groups take at least the rest divided by the ranks. The sum of both grows with T_k, so it holds
    for the floors, for every K.
    """
    return float(sum(_stage_bound(problem, cost) for cost in problem.costs))


def floors(problem: Problem, cost: Int) -> Int:
    """A floor of the k-th largest makespan for each k, non-increasing int64 ``[groups]``.

    A row holds at most j samples of more than ``seq_len / (j + 1)`` tokens, so k - 1 groups hold at most
    ``j * rows * ranks * (k - 1)`` of them, and the next one lies in a k-th group. The largest makespan is also at
    least the q + 1 cheapest of the ``q * slots + 1`` costliest samples, because some slot holds that many of them.
    """
    best = np.zeros(problem.groups, dtype=np.int64)
    before = np.arange(problem.groups) * problem.ranks * problem.rows
    tokens, cap = problem.weights[0], int(problem.limits[0])
    for share in range(1, _SHARES + 1):
        large = np.sort(cost[tokens * (share + 1) > cap])[::-1]
        nth = before * share
        inside = nth < len(large)
        best[inside] = np.maximum(best[inside], large[nth[inside]])
    best[0] = max(int(best[0]), _pigeonhole(cost, problem.slots), int(cost.max(initial=0)))
    return np.maximum.accumulate(best[::-1])[::-1]


def _pigeonhole(cost: Int, slots: int) -> int:
    most = (len(cost) - 1) // slots
    if most < 1:
        return 0
    descending = np.concatenate(([0], np.cumsum(np.sort(cost)[::-1])))
    share = np.arange(1, most + 1)
    last = share * slots + 1
    return int((descending[last] - descending[last - share - 1]).max())


def _stage_bound(problem: Problem, cost: Int) -> float:
    total, ranks = int(cost.sum()), problem.ranks
    if total == 0:
        return 0.0
    tokens = problem.weights[0]
    floor = np.cumsum(floors(problem, cost))
    rows = np.arange(1, problem.groups + 1) * ranks * problem.rows
    densest = _densest(cost, tokens, rows * int(problem.limits[0]))
    held = np.minimum(ranks * floor.astype(np.float64), densest)
    return max(total / ranks, float((floor + np.maximum(total - held, 0.0) / ranks).max()))


def _densest(cost: Int, tokens: Int, room: Int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Most cost that fits into ``room`` tokens if samples could be cut, float64 ``[len(room)]``."""
    free = int(cost[tokens == 0].sum())
    used = np.flatnonzero(tokens)
    order = used[np.argsort(-(cost[used] / tokens[used]), kind="stable")]
    token_sum = np.concatenate(([0], np.cumsum(tokens[order])))
    cost_sum = np.concatenate(([0], np.cumsum(cost[order])))
    return np.interp(room, token_sum, cost_sum) + free
