"""The largest differencing method, for windows so small that it costs nothing and may come closest."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["differencing", "suits"]

_MOST = 1 << 12  # samples times slots, as its time grows with both


def suits(problem: Problem) -> bool:
    """Whether the window is one small group of single rows with one stage."""
    return (
        problem.groups == problem.rows == len(problem.costs) == 1
        and 0 < problem.size * problem.slots <= _MOST
    )


def differencing(problem: Problem) -> Int:
    """Rows by differencing (Karmarkar and Karp, 1982), int64 ``[n]``; it knows no limits.

    A partial solution is the sums of its subsets in ascending order, and the subsets as trees. The two of the widest
    spread are joined, the largest subset of one with the smallest of the other, until one is left.
    """
    empty = problem.slots - 1
    heap: list[tuple[int, int, list[tuple[int, Any]]]] = [
        (-cost, sample, [(0, ())] * empty + [(cost, sample)])
        for sample, cost in enumerate(problem.work.tolist())
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, one = heapq.heappop(heap)
        other = heapq.heappop(heap)[2]
        joined = [(a + b, (x, y)) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=_total)
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], order, joined))
    row = np.empty(problem.size, dtype=np.int64)
    for index, (_, tree) in enumerate(heap[0][2]):
        stack = [tree]
        while stack:
            node = stack.pop()
            if isinstance(node, tuple):
                stack += node
            else:
                row[node] = index
    return row


def _total(subset: tuple[int, Any]) -> int:
    return subset[0]
