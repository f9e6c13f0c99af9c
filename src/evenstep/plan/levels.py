"""Giants side by side: groups filled up to the cost of a sample that no packer can make smaller."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

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


def _next_fit(tokens: Int, work: Int, start: int, free: Int, spare: Int) -> int:
    """The first position from ``start`` that fits some row's ``free`` tokens and ``spare`` cost; the end if none."""
    open_rows = np.flatnonzero((free > 0) & (spare > 0))
    # Of rows with as little cost to spare, only the one with the most free tokens matters: a staircase.
    stairs = open_rows[np.lexsort((-free[open_rows], -spare[open_rows]))]
    stairs = stairs[np.diff(np.maximum.accumulate(free[stairs]), prepend=0) > 0]
    most, least_first = free[stairs][::-1], spare[stairs][::-1]
    if not len(stairs):
        return len(work)
    for begin in range(start, len(work), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        step = np.searchsorted(least_first, work[chunk])
        fits = (step < len(stairs)) & (tokens[chunk] <= most[np.minimum(step, len(stairs) - 1)])
        first = int(fits.argmax())
        if fits[first]:
            return begin + first
    return len(work)


def _fill_rows(problem: Problem, order: Int, row: Int, group: int, level: int) -> None:
    """One row per slot: a sample goes to the row that has the most cost left per token left.

    A row whose level is near takes short, cheap samples, one whose tokens run out takes long, dense ones, so that
    both run out together.
    """
    tokens, work = problem.weights[0][order], problem.work[order]
    token_list, work_list = tokens.tolist(), work.tolist()
    first, cap = group * problem.ranks, int(problem.limits[0])
    free, spare = np.full(problem.ranks, cap), np.full(problem.ranks, level)
    heap = [(-level / cap, slot, cap, level) for slot in range(problem.ranks)]
    # Rows without the tokens or the cost for a sample wait for one that needs less; samples come the costliest first,
    # so that few wait twice.
    short: list[tuple[int, tuple[float, int, int, int]]] = []
    dear: list[tuple[int, tuple[float, int, int, int]]] = []
    position, smallest, cheapest = 0, int(tokens.min()), work_list[-1]
    while position < len(work_list):
        need, cost = token_list[position], work_list[position]
        while short and -short[0][0] >= need:
            heappush(heap, heappop(short)[1])
        while dear and -dear[0][0] >= cost:
            heappush(heap, heappop(dear)[1])
        while heap:
            entry = heap[0]
            _, slot, left, below = entry
            if left >= need and below >= cost:
                left, below = left - need, below - cost
                free[slot], spare[slot] = left, below
                row[order[position]] = first + slot
                heapreplace(heap, (-below / left if left else 0.0, slot, left, below))
                position += 1
                break
            heappop(heap)
            if left < smallest or below < cheapest:
                continue
            if left < need:
                heappush(short, (-left, entry))
            else:
                heappush(dear, (-below, entry))
        else:
            position = _next_fit(tokens, work, position + 1, free, spare)


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
            position = _next_fit(weights[0], work, position + 1, free[0], level - load)
            continue
        least = load[fits].min()
        best = int(np.where(fits & (load == least), free[0], np.iinfo(np.int64).max).argmin())
        row[order[position]] = first + best
        free[:, best] -= need[:, 0]
        load[best - best % rows : best - best % rows + rows] += cost
        position += 1
