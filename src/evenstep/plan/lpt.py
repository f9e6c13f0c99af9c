"""Longest first onto the least-loaded slot that can take it: the classic, with hard limits."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["lpt"]

_MAX_SKIPS = 8  # full slots to look past, on average, before loads are scanned as an array instead
_STAGED = 1 << 24  # samples times rows up to which stages are looked at one by one
_NEVER = np.iinfo(np.int64).max


def lpt(problem: Problem, order: Int, row: Int, first_slot: int = 0) -> None:
    """Put samples, in ``order``, onto the least-loaded slot with room among the empty ones from ``first_slot``.

    Args:
        problem: The window.
        order: Sample positions, the costliest first.
        row: Row of each sample, int64 ``[n]``, filled in; stays -1 for samples that fit nowhere.
        first_slot: Earlier slots are left alone.
    """
    if len(problem.costs) > 1 and len(order) * problem.num_rows <= _STAGED:
        _staged(problem, order, row, first_slot)
        return
    if len(problem.limits) > 1 or problem.rows > 64:
        _scan(problem, order, row, 0, first_slot)
        return
    placed, stopped = (_heap_rows if problem.rows == 1 else _heap_slots)(problem, order, first_slot)
    row[order] = np.array(placed, dtype=np.int64)
    if stopped < len(order):
        _scan(problem, order, row, stopped, first_slot)


def _heap_rows(problem: Problem, order: Int, first: int) -> tuple[list[int], int]:
    """One row per slot: (rows in ``order``, where patience ended).

    A heap entry is load and slot in one integer, ``load << bits | slot``: half the time of a heap of pairs.
    """
    column, bits = problem.weights[0][order], (problem.slots - 1).bit_length()
    tokens, work = column.tolist(), [cost << bits for cost in problem.work[order].tolist()]
    smallest = np.minimum.accumulate(column[::-1])[::-1]
    cap, mask = int(problem.limits[0]), (1 << bits) - 1
    free = [cap] * problem.slots
    placed = [-1] * len(tokens)
    # The first samples get a row each, as long as they cost something.
    start = min(problem.slots - first, len(tokens))
    for position in range(start):
        free[first + position] = cap - tokens[position]
    placed[:start] = range(first, first + start)
    heap = [cost | slot for slot, cost in enumerate(work[:start], first)]
    heap += range(first + start, problem.slots)
    heapify(heap)
    skipped: list[int] = []
    patience = _MAX_SKIPS * (len(tokens) + len(heap))
    for position in range(start, len(tokens)):
        need = tokens[position]
        while heap:
            entry = heap[0]
            slot = entry & mask
            left = free[slot] - need
            if left >= 0:
                free[slot] = left
                placed[position] = slot
                heapreplace(heap, entry + work[position])
                break
            heappop(heap)
            if free[slot] >= smallest[position]:
                skipped.append(entry)
        if skipped:
            patience -= len(skipped)
            _push_back(heap, skipped)
            if patience < 0:
                return placed, position + 1
    return placed, len(tokens)


def _heap_slots(problem: Problem, order: Int, first: int) -> tuple[list[int], int]:
    """Several rows per slot; the fullest row that can take the sample keeps the others open for long ones."""
    column = problem.weights[0][order]
    tokens, work = column.tolist(), problem.work[order].tolist()
    smallest = np.minimum.accumulate(column[::-1])[::-1].tolist()
    rows, cap = problem.rows, int(problem.limits[0])
    heap = [(0, index) for index in range(first, problem.slots)]
    free = [[cap] * rows for _ in range(problem.slots)]
    placed = [-1] * len(tokens)
    skipped: list[tuple[int, int]] = []
    patience = _MAX_SKIPS * (len(tokens) + len(heap))
    for position, need in enumerate(tokens):
        while heap:
            load, slot = heap[0]
            left = free[slot]
            fitting = [room for room in left if room >= need]
            if fitting:
                best = left.index(min(fitting))
                left[best] -= need
                placed[position] = slot * rows + best
                heapreplace(heap, (load + work[position], slot))
                break
            heappop(heap)
            if max(left) >= smallest[position]:
                skipped.append((load, slot))
        if skipped:
            patience -= len(skipped)
            _push_back(heap, skipped)
            if patience < 0:
                return placed, position + 1
    return placed, len(tokens)


def _push_back(heap: list[Any], skipped: list[Any]) -> None:
    if len(skipped) * 4 > len(heap):
        heap += skipped
        heapify(heap)
    else:
        for entry in skipped:
            heappush(heap, entry)
    skipped.clear()


def _scan(problem: Problem, order: Int, row: Int, start: int, first_slot: int) -> None:
    """The same rule by one array scan per sample: any number of limits, and no cost for full slots."""
    begin, rows = first_slot * problem.rows, problem.rows
    done = order[:start]
    done = done[row[done] >= 0]
    free = np.repeat(problem.limits[:, None], problem.num_rows - begin, axis=1)
    load = np.zeros(problem.slots - first_slot, dtype=np.int64)
    for weight, left in zip(problem.weights, free, strict=True):
        np.subtract.at(left, row[done] - begin, weight[done])
    np.add.at(load, row[done] // rows - first_slot, problem.work[done])
    by_row = np.repeat(load, rows)
    weights, work = np.ascontiguousarray(problem.weights.T)[:, :, None], problem.work.tolist()
    for sample in order[start:].tolist():
        need = weights[sample]
        fits = (free >= need).all(axis=0)
        best = int(np.where(fits, by_row, _NEVER).argmin())
        if not fits[best]:
            row[sample] = -1
            continue
        first = best - best % rows
        if rows > 1:
            inside = slice(first, first + rows)
            best = first + int(np.where(fits[inside], free[0, inside], _NEVER).argmin())
        row[sample] = best + begin
        free[:, best] -= need[:, 0]
        by_row[first : first + rows] += work[sample]


def _staged(problem: Problem, order: Int, row: Int, first_slot: int) -> None:
    """Costs of several stages: onto the slot whose stages then exceed their fair share the least."""
    begin, rows = first_slot * problem.rows, problem.rows
    slots = problem.slots - first_slot
    free = np.repeat(problem.limits[:, None], problem.num_rows - begin, axis=1)
    costs = problem.costs.astype(np.float64)
    fair = costs[:, order].sum(axis=1) / slots
    load = np.zeros((len(costs), slots))
    # The square of each stage's load over its fair share grows with what the stage already holds.
    scale = 1.0 / np.where(fair > 0, fair, 1.0)
    parts, weights = (costs * scale[:, None]).T[:, :, None].copy(), problem.weights.T[:, :, None].copy()
    for sample in order.tolist():
        part, need = parts[sample], weights[sample]
        price = ((load + part) ** 2 - load**2).sum(axis=0) + load.max(axis=0)
        fits = (free >= need).all(axis=0)
        best = int(np.where(fits, np.repeat(price, rows) if rows > 1 else price, np.inf).argmin())
        if not fits[best]:
            row[sample] = -1
            continue
        slot = best // rows
        if rows > 1:
            inside = slice(slot * rows, (slot + 1) * rows)
            best = slot * rows + int(np.where(fits[inside], free[0, inside], _NEVER).argmin())
        row[sample] = best + begin
        free[:, best] -= need[:, 0]
        load[:, slot] += part[:, 0]
