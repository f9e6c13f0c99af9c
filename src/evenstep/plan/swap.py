"""Many swaps at once: disjoint pairs of slots each exchange the two samples that even them out best."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.plan.problem import Int, Problem, sums

__all__ = ["SwapTable"]

_WIDTH = 32  # samples of a slot that take part in swaps
_CELLS = 1 << 18  # pairs of samples compared at once; bounds the memory


class SwapTable:
    """A feasible layout under swaps and moves that keep it feasible.

    Every slot has a line of sample positions; ``n`` stands for an empty place, so that a swap with an empty place is
    a move. A slot of more samples than places takes part with some of them, spread evenly over their costs.

    Attributes:
        row: Row of each sample, int64 ``[n + 1]``.
        load: Cost of each slot, int64 ``[stages, slots]``.
    """

    def __init__(self, problem: Problem, row: Int, width: int = _WIDTH) -> None:
        self.problem = problem
        size = problem.size
        self.row = np.append(row, 0)
        self.costs = _with_nobody(problem.costs)
        self.weights = _with_nobody(problem.weights)
        self.free = problem.limits[:, None] - problem.used(row)
        slot = row // problem.rows
        self.load = np.stack([sums(cost, slot, problem.slots) for cost in problem.costs])
        self.count = np.bincount(row, minlength=problem.num_rows)
        self.keep_filled = size >= problem.num_rows
        self.table = _table(problem, slot, width)

    def exchange(self, giver: Int, taker: Int, want: Int) -> int:
        """Let each pair of slots swap, or move a sample, so that about ``want`` cost goes from giver to taker.

        Args:
            giver: Distinct slots, int64 ``[pairs]``.
            taker: Distinct slots, none of them a giver.
            want: Cost to transfer in each stage, int64 ``[stages, pairs]``. A pair changes only if the miss, summed
                over stages, becomes less than the whole of it; so at most twice as much is transferred.

        Returns:
            The number of pairs that changed.
        """
        width = self.table.shape[1]
        step = max(1, _CELLS // (width * width))
        return sum(
            self._exchange(giver[at : at + step], taker[at : at + step], want[:, at : at + step])
            for at in range(0, len(giver), step)
        )

    def _exchange(self, giver: Int, taker: Int, want: Int) -> int:
        gives, takes = self.table[giver], self.table[taker]
        miss = np.zeros((len(giver), gives.shape[1], takes.shape[1]), dtype=np.int64)
        for cost, wanted in zip(self.costs, want, strict=True):
            transfer = cost[gives][:, :, None] - cost[takes][:, None, :]
            transfer -= wanted[:, None, None]
            miss += np.abs(transfer, out=transfer)
        miss[~self._feasible(giver, taker, gives, takes)] = np.iinfo(np.int64).max
        flat = miss.reshape(len(giver), -1)
        best = flat.argmin(axis=1)
        lines = np.flatnonzero(flat[np.arange(len(giver)), best] < np.abs(want).sum(axis=0))
        if len(lines):
            width = self.table.shape[1]
            self._apply(giver[lines], taker[lines], best[lines] // width, best[lines] % width)
        return len(lines)

    def _feasible(self, giver: Int, taker: Int, gives: Int, takes: Int) -> npt.NDArray[np.bool_]:
        nobody = self.problem.size
        give_row, take_row = self._rows(giver, gives), self._rows(taker, takes)
        ok = np.ones((*gives.shape, takes.shape[1]), dtype=np.bool_)
        for weight, free in zip(self.weights, self.free, strict=True):
            give, take = weight[gives], weight[takes]
            ok &= give[:, :, None] <= (free[take_row] + take)[:, None, :]
            ok &= take[:, None, :] <= (free[give_row] + give)[:, :, None]
        if self.keep_filled:
            alone_give = (self.count[give_row] == 1) & (gives != nobody)
            alone_take = (self.count[take_row] == 1) & (takes != nobody)
            ok &= ~(alone_give[:, :, None] & (takes == nobody)[:, None, :])
            ok &= ~((gives == nobody)[:, :, None] & alone_take[:, None, :])
        return ok

    def _rows(self, slot: Int, samples: Int) -> Int:
        """Row of each sample; for an empty place the row of the slot with the most free tokens."""
        rows = self.problem.rows
        emptiest = slot if rows == 1 else slot * rows + self.free[0].reshape(-1, rows)[slot].argmax(axis=1)
        return np.where(samples == self.problem.size, emptiest[:, None], self.row[samples])

    def _apply(self, giver: Int, taker: Int, give_place: Int, take_place: Int) -> None:
        given, taken = self.table[giver, give_place], self.table[taker, take_place]
        from_row = self._rows(giver, given[:, None])[:, 0]
        to_row = self._rows(taker, taken[:, None])[:, 0]
        nobody = self.problem.size
        self.table[giver, give_place], self.table[taker, take_place] = taken, given
        self.row[given], self.row[taken] = to_row, from_row
        self.row[nobody] = 0
        transfer = self.costs[:, given] - self.costs[:, taken]
        self.load[:, giver] -= transfer
        self.load[:, taker] += transfer
        change = self.weights[:, given] - self.weights[:, taken]
        self.free[:, from_row] += change
        self.free[:, to_row] -= change
        balance = (given != nobody).astype(np.int64) - (taken != nobody)
        self.count[from_row] -= balance
        self.count[to_row] += balance


def _with_nobody(columns: Int) -> Int:
    """Columns with one more entry for an empty place, which takes nothing."""
    return np.concatenate((columns, np.zeros((len(columns), 1), dtype=np.int64)), axis=1)


def _table(problem: Problem, slot: Int, width: int) -> Int:
    size = problem.size
    order = np.lexsort((-problem.work, slot))
    count = np.bincount(slot, minlength=problem.slots)
    start = np.cumsum(count) - count
    width = int(min(width, count.max(initial=0) + 2))
    places = np.arange(width)
    # The last place stays empty for moves; crowded slots are sampled evenly over their sorted costs.
    used = np.minimum(count, width - 1)
    spread = np.where(
        count[:, None] <= width - 1,
        places[None, :],
        places[None, :] * (count[:, None] - 1) // max(width - 2, 1),
    )
    index = np.minimum(start[:, None] + spread, max(size - 1, 0))
    table = order[index] if size else np.zeros((problem.slots, width), dtype=np.int64)
    return np.where(places[None, :] < used[:, None], table, size)
