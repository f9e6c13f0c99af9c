"""First-fit-decreasing into a fixed number of rows, and the longest run of samples that it packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RowLimits", "fill_empty_rows", "first_fit_decreasing", "longest_run", "most_that_could_fit"]

_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The rows of a step and what each of them can hold.

    Attributes:
        rows: Number of rows.
        seq_len: Tokens of a row.
        max_segments: Samples of a row at most; None means no limit.
        budgets: Largest sums of further features in a row, in units of `evenstep.budget`.
    """

    rows: int
    seq_len: int
    max_segments: int | None = None
    budgets: tuple[int, ...] = ()


def first_fit_decreasing(lengths: _I64, limits: RowLimits, features: _I64 | None = None) -> _I32 | None:
    """The row of each sample, longest first into the first row with room; None if the rows do not suffice.

    Ties go by position.

    Args:
        lengths: int64 ``[n]``, each in ``[1, seq_len]``.
        limits: The rows.
        features: int64 ``[len(budgets), n]``, none above its budget; not needed without budgets.

    Returns:
        int32 ``[n]``, or None.
    """
    by_length = np.argsort(-lengths, kind="stable")
    if limits.budgets:
        assert features is not None
        placed = _by_scan(lengths[by_length], features[:, by_length], limits)
    else:
        placed = _by_tree(lengths[by_length], limits)
    if placed is None:
        return None
    result = np.empty(len(lengths), dtype=np.int32)
    result[by_length] = placed
    return result


def _by_tree(sizes: _I64, limits: RowLimits) -> list[int] | None:
    """Rows of the descending ``sizes``; a tournament tree over the free room finds each in O(log rows)."""
    rows, capacity = limits.rows, limits.seq_len
    own_row = int(np.searchsorted(-sizes, -(capacity // 2)))  # longer than half: no two share a row
    if own_row > rows:
        return None
    leaves = 1 << max(rows - 1, 1).bit_length()
    segments = limits.max_segments or len(sizes)
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
    return placed


def _by_scan(sizes: _I64, features: _I64, limits: RowLimits) -> list[int] | None:
    """Rows of the descending ``sizes`` under budgets as well: with several limits no tree finds the first fit."""
    needs = np.vstack([sizes, np.ones(len(sizes)), features]).T
    most = np.array([limits.seq_len, limits.max_segments or np.inf, *limits.budgets])
    used = np.zeros((limits.rows, len(most)))
    placed = []
    for need in needs:  # sequential by nature, as above
        fits = (used + need <= most).all(axis=1)
        row = int(fits.argmax())
        if not fits[row]:
            return None
        used[row] += need
        placed.append(row)
    return placed


def most_that_could_fit(lengths: _I64, limits: RowLimits, features: _I64 | None = None) -> int:
    """The length of the longest prefix of ``lengths`` that no simple bound rules out.

    The bounds: tokens and budgets in total; a row holds at most m samples longer than ``seq_len / (m + 1)``;
    ``max_segments``.
    """
    top = int(np.searchsorted(np.cumsum(lengths), limits.rows * limits.seq_len, side="right"))
    for k, budget in enumerate(limits.budgets):
        assert features is not None
        total = np.cumsum(features[k, :top])
        top = int(np.searchsorted(total, limits.rows * budget, side="right"))
    for m in (1, 2, 3, 4):
        longer = np.flatnonzero(lengths[:top] * (m + 1) > limits.seq_len)
        if len(longer) > m * limits.rows:
            top = int(longer[m * limits.rows])
    return top if limits.max_segments is None else min(top, limits.rows * limits.max_segments)


def longest_run(lengths: _I64, limits: RowLimits, features: _I64 | None = None) -> tuple[int, _I32]:
    """The longest prefix of ``lengths`` that first-fit-decreasing packs, and its rows.

    Candidates are tried one by one from the simple bounds down, as first-fit-decreasing is not monotone: a
    longer run may pack where a shorter one does not. After ``max(4, 2**17 / candidate)`` failures, by which
    a step of up to 360 samples has been searched in full, the rest is searched by growing strides and
    bisection, whose result packs while one sample more does not.

    Returns:
        ``(n, rows)``: the samples of the run, and int32 ``[n]``, the row of each.
    """

    def pack(count: int) -> _I32 | None:
        return first_fit_decreasing(
            lengths[:count], limits, None if features is None else features[:, :count]
        )

    top = most_that_could_fit(lengths, limits, features)
    exhaustive = max(4, (1 << 17) // (top + 1))
    too_long, stride = top + 1, 1
    while True:
        # As many samples as rows always fit, so the search ends.
        run = max(too_long - stride, min(limits.rows, top))
        packed = pack(run)
        if packed is not None:
            break
        too_long = run
        if top - run >= exhaustive:
            stride *= 2
    while too_long - run > 1:
        middle = (run + too_long) // 2
        candidate = pack(middle)
        if candidate is None:
            too_long = middle
        else:
            run, packed = middle, candidate
    return run, packed


def fill_empty_rows(packed: _I32, lengths: _I64, rows: int) -> _I32:
    """``packed`` with the shortest samples that do not sit alone moved to its empty rows, one to each."""
    counts = np.bincount(packed, minlength=rows)
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return packed
    packed = packed.copy()
    spare = iter(np.argsort(lengths, kind="stable").tolist())
    for row in empty.tolist():
        for sample in spare:
            if counts[packed[sample]] > 1:
                counts[packed[sample]] -= 1
                packed[sample] = row
                break
    return packed
