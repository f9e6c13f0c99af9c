"""Room for samples that a greedy pass left over, and a sample for every empty row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evenstep.plan.problem import Int, Problem, room_in, sums

__all__ = ["fill_empty_rows", "place_left_over", "repaired", "spill"]

_AT_ONCE = 64  # samples looked at together for one that can make room
_NEVER = np.iinfo(np.int64).max

_GIVE_UP = (
    8  # a share of 1/8 without room is no dead end but a window that is too small, or another packer's job
)


def repaired(problem: Problem, assign: Callable[[Int], object]) -> Int | str:
    """A feasible layout that starts from what ``assign`` fills in, or why there is none."""
    row = np.full(problem.size, -1, dtype=np.int64)
    assign(row)
    spill(problem, row)
    left = int((row < 0).sum())
    if not place_left_over(problem.weights, problem.limits, row, problem.num_rows):
        return f"{left} samples found no row with room"
    fill_empty_rows(problem, row)
    return row


def spill(problem: Problem, row: Int) -> None:
    """Put samples at -1 where they raise the makespan of a group least, if a row has room; changes ``row``."""
    left_over = np.flatnonzero(row < 0)
    if not len(left_over):
        return
    placed = np.flatnonzero(row >= 0)
    free = problem.limits[:, None] - np.stack(
        [sums(weight[placed], row[placed], problem.num_rows) for weight in problem.weights]
    )
    load = sums(problem.work[placed], row[placed] // problem.rows, problem.slots)
    makespan = load.reshape(problem.groups, problem.ranks).max(axis=1)
    over = np.repeat(load - np.repeat(makespan, problem.ranks), problem.rows)
    for sample in left_over[np.argsort(-problem.work[left_over], kind="stable")].tolist():
        fits = room_in(free, problem.weights[:, sample])
        best = int(np.where(fits, over, _NEVER).argmin())
        if not fits[best]:
            continue
        row[sample] = best
        free[:, best] -= problem.weights[:, sample]
        slot, group = best // problem.rows, best // (problem.rows * problem.ranks)
        over[slot * problem.rows : (slot + 1) * problem.rows] += problem.work[sample]
        if over[best] > 0:
            width = problem.rows * problem.ranks
            over[group * width : (group + 1) * width] -= over[best]


def place_left_over(weights: Int, limits: Int, row: Int, rows: int) -> bool:
    """Place the samples at -1 by moving other samples out of their way; changes ``row``.

    Args:
        weights: What samples take of each limit, int64 ``[limits, n]``.
        limits: int64 ``[limits]``.
        row: Row of each sample, int64 ``[n]``.
        rows: Number of rows.

    Returns:
        Whether every one of them found room.
    """
    left_over = np.flatnonzero(row < 0)
    if not len(left_over):
        return True
    if len(left_over) * _GIVE_UP > max(len(row), 64):
        return False
    free = np.repeat(limits[:, None], rows, axis=1)
    placed = np.flatnonzero(row >= 0)
    for weight, left in zip(weights, free, strict=True):
        np.subtract.at(left, row[placed], weight[placed])
    by_tokens = left_over[np.argsort(-weights[0, left_over], kind="stable")]
    return all(_place(weights, row, free, sample) for sample in by_tokens.tolist())


def _place(weights: Int, row: Int, free: Int, sample: int) -> bool:
    target = _tightest(free, weights[:, sample])
    if target >= 0:
        _move(weights, row, free, sample, target)
        return True
    return _make_room(weights, row, free, sample) or _swap_for_room(weights, row, free, sample)


def _tightest(free: Int, need: Int, without: int = -1) -> int:
    """The row with the fewest free tokens that can take ``need``; -1 if none can."""
    fits = room_in(free, need)
    if without >= 0:
        fits[without] = False
    best = int(np.where(fits, free[0], _NEVER).argmin())
    return best if bool(fits[best]) else -1


def _make_room(weights: Int, row: Int, free: Int, sample: int) -> bool:
    """Move one sample from a row into another, so that the first has room for ``sample``."""
    placed = np.flatnonzero(row >= 0)
    opens = (free[:, row[placed]] + weights[:, placed] >= weights[:, sample, None]).all(axis=0)
    ways = placed[opens]
    ways = ways[np.argsort(weights[0, ways], kind="stable")]
    for begin in range(0, len(ways), _AT_ONCE):
        others = ways[begin : begin + _AT_ONCE]
        fits = np.asarray((free[:, None, :] >= weights[:, others, None]).all(axis=0))
        fits[np.arange(len(others)), row[others]] = False
        movable = np.flatnonzero(fits.any(axis=1))
        if len(movable):
            other = int(others[movable[0]])
            home, target = int(row[other]), _tightest(free, weights[:, other], without=int(row[other]))
            _move(weights, row, free, other, target)
            _move(weights, row, free, sample, home)
            return True
    return False


def _swap_for_room(weights: Int, row: Int, free: Int, sample: int) -> bool:
    """Swap a sample of the emptiest rows for a smaller one elsewhere, so that ``sample`` fits there."""
    need = weights[:, sample]
    placed = np.flatnonzero(row >= 0)
    if not len(placed):
        return False
    taken, at = weights[:, placed], row[placed]
    least, held = taken.min(axis=1), free[:, at] + taken
    for home in np.argsort(-free[0], kind="stable")[:16].tolist():
        # `smaller` comes here, `other` goes there: both rows must hold.
        others = placed[at == home]
        room = free[:, home, None] + weights[:, others] - need[:, None]
        tried: set[bytes] = set()
        for k in np.flatnonzero((room >= least[:, None]).all(axis=0)).tolist():
            other = int(others[k])
            kind = weights[:, other].tobytes()
            if kind in tried:
                continue
            tried.add(kind)
            fits = (taken <= room[:, k, None]).all(axis=0)
            fits &= (held >= weights[:, other, None]).all(axis=0)
            fits &= at != home
            if fits.any():
                smaller = int(placed[int(fits.argmax())])
                away = int(row[smaller])
                _move(weights, row, free, smaller, -1)
                _move(weights, row, free, other, away)
                _move(weights, row, free, smaller, home)
                _move(weights, row, free, sample, home)
                return True
    return False


def _move(weights: Int, row: Int, free: Int, sample: int, target: int) -> None:
    if row[sample] >= 0:
        free[:, row[sample]] += weights[:, sample]
    if target >= 0:
        free[:, target] -= weights[:, sample]
    row[sample] = target


def fill_empty_rows(problem: Problem, row: Int) -> None:
    """Give every empty row one sample while there are enough samples; changes ``row``.

    A sample of the same slot comes first, because that changes no load; then the cheapest sample that shares a row.
    """
    if problem.size < problem.num_rows:
        return
    count = np.bincount(row, minlength=problem.num_rows)
    for empty in np.flatnonzero(count == 0).tolist():
        shares = np.flatnonzero(count[row] > 1)
        same_slot = shares[row[shares] // problem.rows == empty // problem.rows]
        choices = same_slot if len(same_slot) else shares
        sample = int(choices[problem.work[choices].argmin()])
        count[row[sample]] -= 1
        count[empty] += 1
        row[sample] = empty
