"""First-fit-decreasing into a fixed number of rows, and the longest run of samples that it packs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["first_fit_decreasing", "longest_run"]

_I64 = npt.NDArray[np.int64]


def first_fit_decreasing(
    lengths: _I64, rows: int, capacity: int, max_segments: int | None = None
) -> npt.NDArray[np.int32] | None:
    """The row of each sample, longest first into the first row with room; None if ``rows`` do not suffice.

    Ties go by position. A tournament tree over the free room finds the row in O(log rows).

    Args:
        lengths: int64 ``[n]``, each in ``[1, capacity]``.
        rows: Number of rows.
        capacity: Tokens of a row.
        max_segments: Samples of a row at most.

    Returns:
        int32 ``[n]``, or None.
    """
    by_length = np.argsort(-lengths, kind="stable")
    sizes = lengths[by_length]
    own_row = int(np.searchsorted(-sizes, -(capacity // 2)))  # longer than half: no two share a row
    if own_row > rows:
        return None
    leaves = 1 << max(rows - 1, 1).bit_length()
    segments = max_segments or len(lengths)
    level = np.full(leaves, -1, dtype=np.int64)
    level[:rows] = capacity
    level[:own_row] -= sizes[:own_row] if segments > 1 else capacity + 1
    levels = [level]
    while len(level) > 1:
        level = level.reshape(-1, 2).max(axis=1)
        levels.append(level)
    tree = [-1, *np.concatenate(levels[::-1]).tolist()]
    used = [1] * own_row + [0] * (rows - own_row)
    placed = list(range(own_row))
    leaf, previous = 0, -1
    for size in sizes[own_row:].tolist():  # sequential by nature: each choice depends on the last one
        if size != previous or tree[leaf] < size:  # else the first row for this size is still the same
            if tree[1] < size:
                return None
            leaf = 1
            while leaf < leaves:
                leaf += leaf
                if tree[leaf] < size:
                    leaf += 1
            previous = size
        row = leaf - leaves
        placed.append(row)
        used[row] += 1
        room = tree[leaf] - size if used[row] < segments else -1
        tree[leaf] = room
        node = leaf
        while node > 1:
            if tree[node ^ 1] > room:
                room = tree[node ^ 1]
            node >>= 1
            if tree[node] == room:
                break
            tree[node] = room
    result = np.empty(len(lengths), dtype=np.int32)
    result[by_length] = placed
    return result


def most_that_could_fit(lengths: _I64, rows: int, capacity: int, max_segments: int | None = None) -> int:
    """The length of the longest prefix of ``lengths`` that no simple bound rules out.

    The bounds: tokens; a row holds at most m samples longer than ``capacity / (m + 1)``; ``max_segments``.
    """
    top = int(np.searchsorted(np.cumsum(lengths), rows * capacity, side="right"))
    for m in (1, 2, 3, 4):
        longer = np.flatnonzero(lengths[:top] * (m + 1) > capacity)
        if len(longer) > m * rows:
            top = int(longer[m * rows])
    return top if max_segments is None else min(top, rows * max_segments)


def longest_run(
    lengths: _I64, rows: int, capacity: int, max_segments: int | None = None
) -> tuple[int, npt.NDArray[np.int32]]:
    """The longest prefix of ``lengths`` that first-fit-decreasing packs, and its rows.

    Candidates are tried one by one from the simple bounds down, as first-fit-decreasing is not monotone: a
    longer run may pack where a shorter one does not. After ``max(4, 2**17 / candidate)`` failures, by which
    any step of a hundred samples has been searched in full, the rest is searched by growing strides and
    bisection, whose result packs while one sample more does not.

    Returns:
        ``(n, rows)``: the samples of the run, and int32 ``[n]``, the row of each.
    """
    top = most_that_could_fit(lengths, rows, capacity, max_segments)
    exhaustive = max(4, (1 << 17) // (top + 1))
    too_long, stride = top + 1, 1
    while True:
        # As many samples as rows always fit, so the search ends.
        run = max(too_long - stride, min(rows, top))
        packed = first_fit_decreasing(lengths[:run], rows, capacity, max_segments)
        if packed is not None:
            break
        too_long = run
        if top - run >= exhaustive:
            stride *= 2
    while too_long - run > 1:
        middle = (run + too_long) // 2
        candidate = first_fit_decreasing(lengths[:middle], rows, capacity, max_segments)
        if candidate is None:
            too_long = middle
        else:
            run, packed = middle, candidate
    return run, packed


def fill_empty_rows(packed: npt.NDArray[np.int32], lengths: _I64, rows: int) -> npt.NDArray[np.int32]:
    """``packed`` with the shortest sample of the fullest rows moved to each empty row, where possible."""
    counts = np.bincount(packed, minlength=rows)
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return packed
    packed = packed.copy()
    by_length = np.lexsort((np.arange(len(packed)), lengths))
    spare = iter(by_length.tolist())
    for row in empty.tolist():
        for sample in spare:
            if counts[packed[sample]] > 1:
                counts[packed[sample]] -= 1
                packed[sample] = row
                break
    return packed
