"""The best plan of a handful of samples, by trying all partitions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["MOST_SAMPLES", "exact"]

MOST_SAMPLES = 8  # 4140 partitions; a ninth sample would make them 21147


def exact(problem: Problem) -> Int | None:
    """The layout of the smallest makespans, for one stage and at most `MOST_SAMPLES` samples; None if none exists.

    Slots of like cost side by side make the best groups, so only the partition into slots has to be searched.
    """
    size = problem.size
    subset = np.arange(1 << size)
    member = (subset[:, None] >> np.arange(size)) & 1
    rows = _rows_needed(problem, member)
    possible = rows <= problem.rows
    if size >= problem.num_rows:
        possible &= member.sum(axis=1) >= problem.rows
    parts = _partitions(size)
    cells = np.zeros((len(parts), max(problem.slots, size)), dtype=np.int64)
    line = np.arange(len(parts))
    for sample in range(size):
        cells[line, parts[:, sample]] |= 1 << sample
    fits = possible[cells[:, : problem.slots]].all(axis=1) & (cells[:, problem.slots :] == 0).all(axis=1)
    if not fits.any():
        return None
    cells, parts = cells[fits][:, : problem.slots], parts[fits]
    load = -np.sort(-(member @ problem.work)[cells], axis=1)
    total = load[:, :: problem.ranks].sum(axis=1)
    # Among the best, the one with the smallest squares is the most even below the makespans too.
    least = np.flatnonzero(total == total.min())
    best = int(least[np.square(load[least].astype(np.float64)).sum(axis=1).argmin()])
    return _rows_of(problem, parts[best])


@lru_cache(maxsize=MOST_SAMPLES + 1)
def _partitions(size: int) -> Int:
    """All set partitions as restricted growth strings, int64 ``[partitions, size]``."""
    strings: list[tuple[int, ...]] = [()]
    for _ in range(size):
        strings = [(*s, cell) for s in strings for cell in range(max(s, default=-1) + 2)]
    return np.array(strings, dtype=np.int64).reshape(len(strings), size)


def _rows_needed(problem: Problem, member: Int) -> Int:
    """The fewest rows that hold each subset of the samples, int64 ``[2**n]``."""
    fits = np.asarray(((member @ problem.weights.T) <= problem.limits).all(axis=1))
    one_row: list[bool] = fits.tolist()
    needed = [0] * len(one_row)
    for subset in range(1, len(one_row)):
        best, part = len(one_row), subset
        while part:
            if one_row[part]:
                best = min(best, needed[subset ^ part] + 1)
            part = (part - 1) & subset
        needed[subset] = best
    return np.array(needed)


def _rows_of(problem: Problem, slot: Int) -> Int:
    """Rows for a partition into slots that is known to fit."""
    row = np.empty(problem.size, dtype=np.int64)
    for cell in range(int(slot.max(initial=-1)) + 1):
        inside = np.flatnonzero(slot == cell)
        inner = _search(problem, inside.tolist(), [])
        assert inner is not None, "a subset that was known to fit does not"
        row[inside] = cell * problem.rows + np.array(inner, dtype=np.int64)
    return row


def _search(problem: Problem, samples: list[int], bins: list[list[int]]) -> list[int] | None:
    if not samples:
        return []
    first, rest = samples[0], samples[1:]
    for index in range(min(len(bins) + 1, problem.rows)):
        inside = [*(bins[index] if index < len(bins) else []), first]
        if (problem.weights[:, inside].sum(axis=1) <= problem.limits).all():
            found = _search(problem, rest, [*bins[:index], inside, *bins[index + 1 :]])
            if found is not None:
                return [index, *found]
    return None
