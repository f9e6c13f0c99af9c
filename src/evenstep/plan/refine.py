"""A balanced layout that leaves samples where they are: each stays on its rank while that rank has room."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["refine"]

_NEVER = np.iinfo(np.int64).min


def refine(problem: Problem, order: Int, holders: Int, level: Int, beyond: int = 0) -> Int:
    """Put samples, costliest first, onto their own rank's roomiest slot, else onto the roomiest slot of all.

    Moves between the micro-batches of one rank are free, so only a rank with more work than its share gives any away.

    Args:
        problem: The window.
        order: Sample positions, the costliest first.
        holders: Dp rank that holds each sample, int64 ``[n]``.
        level: Cost that each group should not exceed, int64 ``[groups]``.
        beyond: Cost by which a slot may exceed its level with samples of its own rank.

    Returns:
        The row of each sample, int64 ``[n]``; -1 for samples that fit nowhere.
    """
    rows, ranks = problem.rows, problem.ranks
    free = _Free(problem)
    weights = problem.weights[:, order].T.tolist()
    work, home = problem.work[order].tolist(), holders[order].tolist()
    ceiling = np.repeat(level, ranks)
    room = ceiling.tolist()
    room_array = ceiling.copy()
    own = [
        [(-int(level[group]), group * ranks + rank) for group in range(problem.groups)]
        for rank in range(ranks)
    ]
    for heap in own:
        heapify(heap)
    placed = [-1] * len(work)
    for position, need in enumerate(weights):
        cost = work[position]
        heap = own[home[position]]
        slot, best = -1, -1
        skipped = []
        while heap and beyond - heap[0][0] >= cost:
            entry = heappop(heap)
            candidate = entry[1]
            if -entry[0] != room[candidate]:  # somebody else's sample came in since
                heappush(heap, (-room[candidate], candidate))
                continue
            best = free.fullest(candidate, need)
            if best >= 0:
                slot = candidate
                break
            skipped.append(entry)
        for entry in skipped:
            heappush(heap, entry)
        if slot < 0:
            for candidate in _roomiest(room_array, free.most, need[0]):
                best = free.fullest(candidate, need)
                if best >= 0:
                    slot = candidate
                    break
            else:
                continue
        free.take(slot, best, need)
        room[slot] -= cost
        room_array[slot] = room[slot]
        if slot % ranks == home[position]:
            heappush(heap, (-room[slot], slot))
        placed[position] = slot * rows + best
    row = np.empty(problem.size, dtype=np.int64)
    row[order] = placed
    return row


class _Free:
    """What is left of the limits of each row, and the most tokens that a row of each slot has left."""

    def __init__(self, problem: Problem) -> None:
        self.rows = problem.rows
        self.plain = problem.rows == 1 and len(problem.limits) == 1
        self.tokens = [int(problem.limits[0])] * problem.slots
        self.left = [[problem.limits.tolist() for _ in range(self.rows)] for _ in range(problem.slots)]
        self.most = np.full(problem.slots, problem.limits[0])

    def fullest(self, slot: int, need: list[int]) -> int:
        """The row of a slot with the fewest free tokens that can take a sample; -1 if none can."""
        if self.plain:
            return 0 if self.tokens[slot] >= need[0] else -1
        best, least = -1, -1
        for index, left in enumerate(self.left[slot]):
            if (best < 0 or left[0] < least) and all(map(int.__ge__, left, need)):
                best, least = index, left[0]
        return best

    def take(self, slot: int, row: int, need: list[int]) -> None:
        """Put a sample into a row."""
        if self.plain:
            self.tokens[slot] -= need[0]
            self.most[slot] = self.tokens[slot]
            return
        left = self.left[slot][row]
        for limit, weight in enumerate(need):
            left[limit] -= weight
        self.most[slot] = max(line[0] for line in self.left[slot])


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
