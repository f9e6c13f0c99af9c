"""A balanced layout that leaves samples where they are: each stays on its rank while that rank has room."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["refine"]

_NEVER = np.iinfo(np.int64).min


def refine(problem: Problem, order: Int, holders: Int, level: Int) -> Int:
    """Put samples, costliest first, onto their own rank's roomiest slot, else onto the roomiest slot of all.

    Moves between the micro-batches of one rank are free, so only a rank with more work than its share gives any away.

    Args:
        problem: The window.
        order: Sample positions, the costliest first.
        holders: Dp rank that holds each sample, int64 ``[n]``.
        level: Cost that each group should not exceed, int64 ``[groups]``.

    Returns:
        The row of each sample, int64 ``[n]``; -1 for samples that fit nowhere.
    """
    rows, ranks = problem.rows, problem.ranks
    weights = problem.weights[:, order].T.tolist()
    work, home = problem.work[order].tolist(), holders[order].tolist()
    free = [[problem.limits.tolist() for _ in range(rows)] for _ in range(problem.slots)]
    ceiling = np.repeat(level, ranks)
    room = ceiling.copy()
    most_free = np.full(problem.slots, problem.limits[0])
    own = [
        [(-int(level[group]), group * ranks + rank) for group in range(problem.groups)]
        for rank in range(ranks)
    ]
    for heap in own:
        heapify(heap)
    placed = [-1] * len(work)
    for position, need in enumerate(weights):
        cost = work[position]
        slot, best, skipped, heap = -1, -1, [], own[home[position]]
        while heap and -heap[0][0] >= cost:
            entry = heappop(heap)
            if -entry[0] != room[entry[1]]:  # somebody else's sample came in since
                heappush(heap, (-int(room[entry[1]]), entry[1]))
                continue
            best = _fullest(free[entry[1]], need)
            if best >= 0:
                slot = entry[1]
                break
            skipped.append(entry)
        for entry in skipped:
            heappush(heap, entry)
        if slot < 0:
            for candidate in _roomiest(room, most_free, need[0]):
                best = _fullest(free[candidate], need)
                if best >= 0:
                    slot = candidate
                    break
            else:
                continue
        left = free[slot][best]
        for limit, weight in enumerate(need):
            left[limit] -= weight
        most_free[slot] = left[0] if rows == 1 else max(line[0] for line in free[slot])
        room[slot] -= cost
        if slot % ranks == home[position]:
            heappush(heap, (-int(room[slot]), slot))
        placed[position] = slot * rows + best
    row = np.empty(problem.size, dtype=np.int64)
    row[order] = placed
    return row


def _fullest(lines: list[list[int]], need: list[int]) -> int:
    """The row with the fewest free tokens that can take a sample; -1 if none can."""
    best, least = -1, -1
    for index, left in enumerate(lines):
        if (best < 0 or left[0] < least) and all(map(int.__ge__, left, need)):
            best, least = index, left[0]
    return best


def _roomiest(room: Int, most_free: Int, tokens: int) -> Iterator[int]:
    """Slots with the tokens for a sample, the ones furthest below their level first."""
    open_room = np.where(most_free >= tokens, room, _NEVER)
    best = int(open_room.argmax())
    if open_room[best] == _NEVER:
        return
    yield best
    for slot in np.argsort(-open_room, kind="stable").tolist():
        if open_room[slot] == _NEVER:
            return
        yield slot
