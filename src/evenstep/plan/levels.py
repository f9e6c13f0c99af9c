"""Giants side by side: groups filled up to the cost of a sample that no packer can make smaller."""

from __future__ import annotations

from heapq import heappop, heapreplace

import numpy as np

from evenstep.plan.lpt import lpt
from evenstep.plan.problem import Int, Problem

__all__ = ["levels"]

_CHUNK = 8192  # samples looked at together for one that still fits


def levels(problem: Problem, order: Int, row: Int) -> int:
    """Fill one group after the other up to its costliest sample while that exceeds a fair share; the rest is LPT.

    Args:
        problem: The window.
        order: Sample positions, the costliest first.
        row: Row of each sample, int64 ``[n]``, filled in; stays -1 for samples that fit nowhere.

    Returns:
        The number of groups that a giant sets the cost of; they come first.
    """
    rest, group = order, 0
    total = int(problem.work.sum())
    while group < problem.groups - 1 and len(rest):
        level = int(problem.work[rest[0]])
        if level * (problem.groups - group) * problem.ranks <= total:
            break
        one_limit = problem.rows == 1 and len(problem.limits) == 1
        (_fill_rows if one_limit else _fill_slots)(problem, rest, row, group, level)
        placed = row[rest] >= 0
        total -= int(problem.work[rest[placed]].sum())
        rest = rest[~placed]
        group += 1
    lpt(problem, rest, row, first_slot=group * problem.ranks)
    return group


def _next_fit(tokens: Int, work: Int, start: int, room: int, spare: int) -> int:
    """The first position from ``start`` with at most ``room`` tokens and ``spare`` cost; the length if none."""
    for begin in range(start, len(work), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        fits = (tokens[chunk] <= room) & (work[chunk] <= spare)
        first = int(fits.argmax())
        if fits[first]:
            return begin + first
    return len(work)


def _fill_rows(problem: Problem, order: Int, row: Int, group: int, level: int) -> None:
    token_column, work_column = problem.weights[0][order], problem.work[order]
    tokens, work = token_column.tolist(), work_column.tolist()
    first, cap = group * problem.ranks, int(problem.limits[0])
    free = [cap] * problem.ranks
    heap = [(0, index) for index in range(problem.ranks)]
    position, smallest = 0, int(token_column.min())
    while position < len(work):
        need, spare = tokens[position], level - work[position]
        skipped = []
        while heap and heap[0][0] <= spare:
            load, slot = heap[0]
            if free[slot] >= need:
                free[slot] -= need
                row[order[position]] = first + slot
                heapreplace(heap, (load + work[position], slot))
                break
            heappop(heap)
            if free[slot] >= smallest:
                skipped.append((load, slot))
        else:
            heap += skipped
            if not heap:
                return
            heap.sort()
            room = max(free[slot] for _, slot in heap)
            position = _next_fit(token_column, work_column, position + 1, room, level - heap[0][0])
            continue
        if skipped:
            heap += skipped
            heap.sort()
        position += 1


def _fill_slots(problem: Problem, order: Int, row: Int, group: int, level: int) -> None:
    rows = problem.rows
    first, count = group * problem.ranks * rows, problem.ranks * rows
    weights, work = problem.weights[:, order], problem.work[order]
    free = np.repeat(problem.limits[:, None], count, axis=1)
    load = np.zeros(count, dtype=np.int64)
    position = 0
    while position < len(work):
        need, cost = weights[:, position, None], int(work[position])
        fits = (free >= need).all(axis=0) & (load <= level - cost)
        if not fits.any():
            room, spare = int(free[0].max()), level - int(load.min())
            position = _next_fit(weights[0], work, position + 1, room, spare)
            continue
        least = load[fits].min()
        best = int(np.where(fits & (load == least), free[0], np.iinfo(np.int64).max).argmin())
        row[order[position]] = first + best
        free[:, best] -= need[:, 0]
        load[best - best % rows : best - best % rows + rows] += cost
        position += 1
