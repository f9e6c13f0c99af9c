"""Longest first onto the least-loaded row that can take it: the classic, with hard limits."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["lpt"]

_MAX_SKIPS = 8  # full rows to look past, on average, before loads are scanned as an array instead


def lpt(problem: Problem, order: Int) -> tuple[Int, list[int]]:
    """Put samples, in ``order``, onto the least-loaded slot with room.

    Args:
        problem: The window.
        order: Sample positions, the costliest first.

    Returns:
        The row of each sample, int64 ``[n]``, -1 for those that fitted nowhere, and the list of these.
    """
    if problem.rows == 1 and len(problem.limits) == 1:
        return _one_limit(problem, order)
    return _general(problem, order)


def _one_limit(problem: Problem, order: Int) -> tuple[Int, list[int]]:
    size, cap = problem.num_rows, int(problem.limits[0])
    tokens = problem.weights[0][order].tolist()
    work = problem.work[order].tolist()
    smallest = np.minimum.accumulate(problem.weights[0][order][::-1])[::-1].tolist()
    heap = [(0, index) for index in range(size)]
    free = [cap] * size
    placed = [-1] * len(tokens)
    skipped: list[tuple[int, int]] = []
    patience = _MAX_SKIPS * (len(tokens) + size)
    for position, (need, cost) in enumerate(zip(tokens, work)):  # noqa: B905 - strict costs time here
        while heap:
            load, row = heap[0]
            left = free[row] - need
            if left >= 0:
                free[row] = left
                placed[position] = row
                heapreplace(heap, (load + cost, row))
                break
            entry = heappop(heap)
            if free[row] >= smallest[position]:
                skipped.append(entry)
        if skipped:
            patience -= len(skipped)
            if len(skipped) * 4 > len(heap):
                heap += skipped
                heapify(heap)
            else:
                for entry in skipped:
                    heappush(heap, entry)
            skipped.clear()
            if patience < 0:
                return _finish(problem, order, placed, position + 1)
    return _result(order, placed)


def _finish(problem: Problem, order: Int, placed: list[int], start: int) -> tuple[Int, list[int]]:
    """Where few rows have room, one array scan per sample beats looking past full rows one by one."""
    row, _ = _result(order, placed)
    return _scan(problem, order, row, start)


def _general(problem: Problem, order: Int) -> tuple[Int, list[int]]:
    return _scan(problem, order, np.full(problem.size, -1, dtype=np.int64), 0)


def _scan(problem: Problem, order: Int, row: Int, start: int) -> tuple[Int, list[int]]:
    done = order[:start][row[order[:start]] >= 0]
    free = np.repeat(problem.limits[:, None], problem.num_rows, axis=1)
    slot_load = np.zeros(problem.slots, dtype=np.int64)
    for weight, left in zip(problem.weights, free, strict=True):
        np.subtract.at(left, row[done], weight[done])
    np.add.at(slot_load, row[done] // problem.rows, problem.work[done])
    never = np.int64(np.iinfo(np.int64).max)
    left_over = [int(sample) for sample in order[:start] if row[sample] < 0]
    weights, work = problem.weights.T, problem.work
    load = np.repeat(slot_load, problem.rows)
    for sample in order[start:].tolist():
        need = weights[sample]
        fits = (free >= need[:, None]).all(axis=0)
        best = int(np.where(fits, load, never).argmin())
        if not fits[best]:
            left_over.append(sample)
            continue
        if problem.rows > 1:  # among the rows of the slot, the emptiest one
            first = best - best % problem.rows
            room = np.where(fits[first : first + problem.rows], free[0, first : first + problem.rows], -1)
            best = first + int(room.argmax())
        row[sample] = best
        free[:, best] -= need
        first = best - best % problem.rows
        load[first : first + problem.rows] += work[sample]
    return row, left_over


def _result(order: Int, placed: list[int]) -> tuple[Int, list[int]]:
    row = np.empty(len(placed), dtype=np.int64)
    values = np.array(placed, dtype=np.int64)
    row[order] = values
    return row, order[values < 0].tolist()
