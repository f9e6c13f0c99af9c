"""A balanced layout that leaves samples where they are: each stays on its rank while that rank has room."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["refine"]


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
    anywhere = _Anywhere(room, free)
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
            slot, best = anywhere.find(need)
            if slot < 0:
                continue
        free.take(slot, best, need)
        room[slot] -= cost
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
        self.most = [[int(limit)] * problem.slots for limit in problem.limits]

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
            self.most[0][slot] = self.tokens[slot]
            return
        left = self.left[slot][row]
        for limit, weight in enumerate(need):
            left[limit] -= weight
            self.most[limit][slot] = max(line[limit] for line in self.left[slot])


class _Anywhere:
    """All slots, the ones furthest below their level first; one without the tokens for a sample waits for a shorter one.

    Args:
        room: Cost that each slot has left below its level; only falls, in the caller's hands.
        free: What is left of the limits.
    """

    def __init__(self, room: list[int], free: _Free) -> None:
        self._room = room
        self._free = free
        self._slots = [(-left, slot) for slot, left in enumerate(room)]
        heapify(self._slots)
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in free.most]

    def find(self, need: list[int]) -> tuple[int, int]:
        """The roomiest slot that can take a sample, and its row; -1 and -1 if none can."""
        slots, waiting, room, most = self._slots, self._waiting, self._room, self._free.most
        for weight, short in zip(need, waiting, strict=True):
            while short and -short[0][0] >= weight:
                slot = heappop(short)[1]
                heappush(slots, (-room[slot], slot))
        unfit, found = [], (-1, -1)
        while slots:
            below, slot = slots[0]
            if -below != room[slot]:
                heapreplace(slots, (-room[slot], slot))
            else:
                limit = next((k for k, weight in enumerate(need) if most[k][slot] < weight), -1)
                if limit >= 0:
                    heappop(slots)
                    heappush(waiting[limit], (-most[limit][slot], slot))
                    continue
                row = self._free.fullest(slot, need)
                if row >= 0:
                    found = (slot, row)
                    break
                unfit.append(heappop(slots))
        for entry in unfit:
            heappush(slots, entry)
        return found
