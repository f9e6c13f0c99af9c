"""Many exchanges at once: disjoint pairs of slots each swap the few samples that even them out best."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.plan.problem import Int, Problem, sums

__all__ = ["SwapTable"]

_CELLS = 1 << 16  # offers compared at once; bounds time and memory of a round
_SMALL = 160  # slots up to which it is twice that
_WIDTH = 40  # samples of a slot that take part in exchanges
_FEWEST, _MOST = 12, 160  # offers of a slot


class SwapTable:
    """A feasible layout under exchanges that keep it feasible.

    Every slot has a line of sample positions; ``n`` stands for an empty place, and the last place is always empty. An
    offer is two places of a line: two samples, one and an empty place, or nothing at all. Two slots exchange an offer
    each, so that moves are exchanges for nothing. A slot of more samples than places takes part with some of them.

    With ``holders`` and ``price`` an exchange must be worth what it takes its samples away from their ranks.

    Args:
        problem: The window.
        row: Row of each sample, int64 ``[n]``; a feasible layout.
        holders: Dp rank that holds each sample, int64 ``[n]``.
        price: What it costs a sample to be elsewhere, in cost units, float64 ``[n]``.

    Attributes:
        row: Row of each sample, int64 ``[n + 1]``.
        load: Cost of each slot, int64 ``[stages, slots]``.
    """

    def __init__(
        self,
        problem: Problem,
        row: Int,
        holders: Int | None = None,
        price: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.problem = problem
        self.home: Int | None = None if holders is None else np.append(holders, -1)
        self.price: npt.NDArray[np.float32] = np.append(0.0 if price is None else price, 0.0).astype(
            np.float32
        )
        self.row: Int = np.append(row, 0)
        self.costs: Int = _with_nobody(problem.costs)
        self.weights: Int = _with_nobody(problem.weights)
        self.rank_cost: Int = np.append(problem.work, -1)  # sorts empty places last
        # Offers are compared in single precision, which only makes a choice a little less than the best.
        self.rough: npt.NDArray[np.float32] = self.costs.astype(np.float32)
        self.free: Int = problem.limits[:, None] - problem.used(row)
        slot = row // problem.rows
        self.load: Int = np.stack([sums(cost, slot, problem.slots) for cost in problem.costs])
        self.count: Int = np.bincount(row, minlength=problem.num_rows)
        self.keep_filled: bool = problem.size >= problem.num_rows
        self.table: Int = _table(problem, slot)

    def exchange(self, giver: Int, taker: Int, want: Int, turn: int = 0) -> int:
        """Let each pair of slots exchange samples, so that about ``want`` cost goes from giver to taker.

        Args:
            giver: Distinct slots, int64 ``[pairs]``.
            taker: Distinct slots, none of them a giver.
            want: Cost to transfer in each stage, int64 ``[stages, pairs]``. A pair changes only if the miss, summed
                over stages, and the price of leaving home become less than the whole of it; so without a price at
                most twice as much is transferred.
            turn: Odd turns try other offers than even ones.

        Returns:
            The number of pairs that changed.
        """
        cells = _CELLS if self.problem.slots > _SMALL else 2 * _CELLS
        offers = int(np.clip(np.sqrt(cells / max(len(giver), 1)), _FEWEST, _MOST))
        first, second = _offers(self.table.shape[1], offers, self.problem.rows == 1, turn % 4)
        step = max(1, cells // len(first) ** 2)
        return sum(
            self._exchange(
                giver[at : at + step], taker[at : at + step], want[:, at : at + step], first, second
            )
            for at in range(0, len(giver), step)
        )

    def _exchange(self, giver: Int, taker: Int, want: Int, first: Int, second: Int) -> int:
        gives, takes = self.table[giver], self.table[taker]
        miss: npt.NDArray[np.float32] | None = None
        for rough, wanted in zip(self.rough, want.astype(np.float32), strict=True):
            give, take = rough[gives], rough[takes]
            give = give[:, first] + give[:, second] - wanted[:, None]
            transfer = give[:, :, None] - (take[:, first] + take[:, second])[:, None, :]
            np.abs(transfer, out=transfer)
            miss = transfer if miss is None else np.add(miss, transfer, out=miss)
        assert miss is not None, "a problem has a stage"
        if self.home is not None:
            ranks = self.problem.ranks
            give, take = (
                self._leaving(self.home, line, source % ranks, target % ranks)
                for line, source, target in ((gives, giver, taker), (takes, taker, giver))
            )
            miss += (give[:, first] + give[:, second])[:, :, None]
            miss += (take[:, first] + take[:, second])[:, None, :]
        fits = self._one_row if self.problem.rows == 1 else self._many_rows
        allowed = fits(giver, taker, gives, takes, first, second)
        if allowed is not None:
            miss[~allowed] = np.inf
        flat = miss.reshape(len(giver), -1)
        best = flat.argmin(axis=1)
        lines = np.arange(len(giver))
        least = flat[lines, best]
        give_offer, take_offer = best // len(first), best % len(first)
        given = np.stack([gives[lines, place[give_offer]] for place in (first, second)])
        taken = np.stack([takes[lines, place[take_offer]] for place in (first, second)])
        moved = self.costs[:, given].sum(axis=1) - self.costs[:, taken].sum(axis=1)
        whole = np.abs(want).sum(axis=0)
        better = np.isfinite(least) & (np.abs(moved - want).sum(axis=0) < whole)
        if self.home is not None:
            better &= least < whole
        if better.any():
            self._apply(giver[better], taker[better], given[:, better], taken[:, better], moved[:, better])
        return int(better.sum())

    def _leaving(self, home: Int, line: Int, source: Int, target: Int) -> npt.NDArray[np.float32]:
        """The price of going from rank ``source`` to ``target``, negative on the way home; ``[pairs, places]``."""
        held = home[line]
        left = (held != target[:, None]).astype(np.float32) - (held != source[:, None])
        return np.asarray(left * self.price[line], dtype=np.float32)

    def _one_row(
        self, giver: Int, taker: Int, gives: Int, takes: Int, first: Int, second: Int
    ) -> npt.NDArray[np.bool_] | None:
        """Which offers fit where a slot is one row; None if all do."""
        allowed: Any = None
        for weight, free in zip(self.weights, self.free, strict=True):
            give, take = weight[gives], weight[takes]
            give, take = give[:, first] + give[:, second], take[:, first] + take[:, second]
            if (give.max(axis=1) <= free[taker]).all() and (take.max(axis=1) <= free[giver]).all():
                continue
            need = give[:, :, None] - take[:, None, :]
            fits = need <= free[taker][:, None, None]
            fits &= need >= -free[giver][:, None, None]
            allowed = fits if allowed is None else np.logical_and(allowed, fits, out=allowed)
        if self.keep_filled and min(self.count[giver].min(), self.count[taker].min()) <= 2:
            if allowed is None:
                allowed = np.ones((len(giver), len(first), len(first)), dtype=np.bool_)
            nobody = self.problem.size
            give, take = gives != nobody, takes != nobody
            give = give[:, first].astype(np.int64) + give[:, second]
            take = take[:, first].astype(np.int64) + take[:, second]
            allowed &= ~((give == self.count[giver][:, None])[:, :, None] & (take == 0)[:, None, :])
            allowed &= ~((give == 0)[:, :, None] & (take == self.count[taker][:, None])[:, None, :])
        return allowed  # type: ignore[no-any-return]  # numpy's stubs lose the dtype

    def _many_rows(
        self, giver: Int, taker: Int, gives: Int, takes: Int, first: Int, second: Int
    ) -> npt.NDArray[np.bool_] | None:
        """Which offers of one sample fit: each goes to the row of the other, or to the emptiest row for nothing."""
        del second
        gives, takes = gives[:, first], takes[:, first]
        nobody = self.problem.size
        give_row, take_row = self._rows(giver, gives), self._rows(taker, takes)
        allowed = np.ones((*gives.shape, takes.shape[1]), dtype=np.bool_)
        for weight, free in zip(self.weights, self.free, strict=True):
            give, take = weight[gives], weight[takes]
            allowed &= give[:, :, None] <= (free[take_row] + take)[:, None, :]
            allowed &= take[:, None, :] <= (free[give_row] + give)[:, :, None]
        if self.keep_filled:
            alone_give = (self.count[give_row] == 1) & (gives != nobody)
            alone_take = (self.count[take_row] == 1) & (takes != nobody)
            allowed &= ~(alone_give[:, :, None] & (takes == nobody)[:, None, :])
            allowed &= ~((gives == nobody)[:, :, None] & alone_take[:, None, :])
        return allowed

    def _rows(self, slot: Int, samples: Int) -> Int:
        """Row of each sample; for an empty place the row of the slot with the most free tokens."""
        rows = self.problem.rows
        emptiest = slot if rows == 1 else slot * rows + self.free[0].reshape(-1, rows)[slot].argmax(axis=1)
        return np.where(samples == self.problem.size, emptiest[:, None], self.row[samples])

    def _apply(self, giver: Int, taker: Int, given: Int, taken: Int, moved: Int) -> None:
        """Carry out exchanges: ``given`` and ``taken`` int64 ``[2, pairs]`` samples, ``moved`` their cost."""
        nobody = self.problem.size
        from_row = self._rows(giver, given[0][:, None])[:, 0]
        to_row = self._rows(taker, taken[0][:, None])[:, 0]
        self.load[:, giver] -= moved
        self.load[:, taker] += moved
        change = self.weights[:, given].sum(axis=1) - self.weights[:, taken].sum(axis=1)
        self.free[:, from_row] += change
        self.free[:, to_row] -= change
        balance = (given != nobody).sum(axis=0) - (taken != nobody).sum(axis=0)
        self.count[from_row] -= balance
        self.count[to_row] += balance
        give_line, take_line = self.table[giver], self.table[taker]
        for left, came in ((given, taken), (taken, given)):
            self.row[left] = to_row if left is given else from_row
            line = give_line if left is given else take_line
            kept = np.where((line == left[0][:, None]) | (line == left[1][:, None]), nobody, line)
            merged = np.concatenate((kept[:, :-1], came.T), axis=1)
            order = np.argsort(-self.rank_cost[merged], axis=1, kind="stable")[:, : line.shape[1]]
            merged = np.take_along_axis(merged, order, axis=1)
            merged[:, -1] = nobody
            self.table[giver if left is given else taker] = merged


def _with_nobody(columns: Int) -> Int:
    """Columns with one more entry for an empty place, which takes nothing."""
    return np.concatenate((columns, np.zeros((len(columns), 1), dtype=np.int64)), axis=1)


@lru_cache(maxsize=256)
def _offers(width: int, most: int, pairs: bool, turn: int) -> tuple[Int, Int]:
    """At most about ``most`` pairs of places: each alone (with the last, empty one), nothing, then two together."""
    nothing = width - 1
    alone = np.arange(nothing)
    if len(alone) >= most:  # spread over the line, which is sorted by cost
        alone = alone[np.arange(most - 1) * len(alone) // (most - 1)]
    first, second = np.append(alone, nothing), np.full(len(alone) + 1, nothing)
    if pairs and len(first) < most:
        one, two = np.triu_indices(nothing, k=1)
        # Those of the cheapest samples are the fine adjustment; others trade one long sample for two short ones.
        chosen = np.argsort(-(one + two), kind="stable")
        if turn % 2:
            chosen = np.roll(chosen, -len(chosen) * turn // 4)[:: max(1, len(chosen) // (most - len(first)))]
        chosen = chosen[: most - len(first)]
        first, second = np.concatenate((first, one[chosen])), np.concatenate((second, two[chosen]))
    return first, second


def _table(problem: Problem, slot: Int) -> Int:
    size = problem.size
    order = np.lexsort((-problem.work, slot))
    count = np.bincount(slot, minlength=problem.slots)
    start = np.cumsum(count) - count
    width = int(min(_WIDTH, count.max(initial=0) + 3))
    most = width - 1
    places = np.arange(width)
    # Crowded slots take part with samples spread evenly over their sorted costs.
    spread = np.where(count[:, None] <= most, places, places * (count[:, None] - 1) // max(most - 1, 1))
    index = np.minimum(start[:, None] + spread, max(size - 1, 0))
    table = order[index] if size else np.zeros((problem.slots, width), dtype=np.int64)
    return np.where(places < np.minimum(count, most)[:, None], table, size)
