"""Token-first packing: how few rows, or micro-batches, a set of samples needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.plan.problem import Int, room_in

__all__ = ["best_fit", "first_fit", "fullest_rows"]

_WORDS = 50_000_000  # machine words that `fullest_rows` may shift, a few tenths of a second


def first_fit(weights: Int, limits: Int) -> npt.NDArray[np.int64]:
    """First-fit in the given order: the row of each sample, int64 ``[n]``, rows numbered as they are opened.

    Args:
        weights: What each sample takes of each limit, int64 ``[limits, n]``; none exceeds its limit.
        limits: int64 ``[limits]``.
    """
    size = weights.shape[1]
    row = np.empty(size, dtype=np.int64)
    free = np.empty((len(limits), size), dtype=np.int64)
    opened = 0
    first = 0  # rows before it are full to the last token
    for sample in range(size):
        need = weights[:, sample]
        fits = room_in(free[:, first:opened], need)
        where = int(fits.argmax()) + first if fits.size else opened
        if where >= opened or not fits[where - first]:
            where = opened
            free[:, opened] = limits
            opened += 1
        free[:, where] -= weights[:, sample]
        row[sample] = where
        while first < opened and free[0, first] == 0:
            first += 1
    return row


def best_fit(weights: Int, limits: Int, order: Int) -> npt.NDArray[np.int64]:
    """Best-fit by tokens in ``order``: each sample joins the fullest row that can take it."""
    size = weights.shape[1]
    row = np.empty(size, dtype=np.int64)
    free = np.empty((len(limits), size), dtype=np.int64)
    opened = 0
    never = np.iinfo(np.int64).max
    for sample in order.tolist():
        need = weights[:, sample]
        where = opened
        if opened:
            fits = room_in(free[:, :opened], need)
            best = int(np.where(fits, free[0, :opened], never).argmin())
            where = best if fits[best] else opened
        if where == opened:
            free[:, opened] = limits
            opened += 1
        free[:, where] -= weights[:, sample]
        row[sample] = where
    return row


def fullest_rows(tokens: Int, cap: int, rows: int) -> npt.NDArray[np.int64] | None:
    """Pack one row after the other as full as it can be, around the largest sample left (minimum bin slack).

    Subset sums are bits of one integer: bit t is set if some samples sum to t tokens. It finds the tight packings that
    greedy rules miss, in time that grows with ``rows * n * cap``.

    Returns:
        The row of each sample, -1 for those that found none; None where it would take too long.
    """
    if rows * len(tokens) * cap // 64 > _WORDS:
        return None
    row = np.full(len(tokens), -1, dtype=np.int64)
    left = np.argsort(-tokens, kind="stable").tolist()
    sizes = tokens.tolist()
    for index in range(rows):
        if not left:
            break
        room = cap - sizes[left[0]]
        chosen = {left[0]} | {
            left[1:][at] for at in _fullest_subset([sizes[sample] for sample in left[1:]], room)
        }
        row[list(chosen)] = index
        left = [sample for sample in left if sample not in chosen]
    return row


def _fullest_subset(sizes: list[int], room: int) -> list[int]:
    """Positions of samples that sum to as much as fits into ``room``; large samples where there is a choice."""
    mask = (1 << (room + 1)) - 1
    reachable, history = 1, []
    for size in reversed(sizes):
        history.append(reachable)
        reachable |= (reachable << size) & mask if size <= room else 0
    target, chosen = reachable.bit_length() - 1, []
    for at, before in enumerate(reversed(history)):
        # With this sample if the later, smaller ones can make up what is then missing.
        if sizes[at] <= target and before >> (target - sizes[at]) & 1:
            chosen.append(at)
            target -= sizes[at]
    return chosen
