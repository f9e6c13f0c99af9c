"""Token-first packing: how few rows, or micro-batches, a set of samples needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.plan.problem import Int, room_in

__all__ = ["best_fit", "first_fit"]


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
