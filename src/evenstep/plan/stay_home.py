"""The refined layout: as even as the best plan but for a percent, with few samples away from their ranks."""

from __future__ import annotations

from functools import partial
from operator import itemgetter

import numpy as np

from evenstep.plan.matching import match_holders
from evenstep.plan.polish import polish_at_home
from evenstep.plan.problem import Int, Problem
from evenstep.plan.refine import refine
from evenstep.plan.repair import repaired

__all__ = ["stay_home"]

# Tries: by how much a group may exceed its level in the best plan, and by how much more a slot may with samples of its
# own rank, one part in each. Polishing evens out what is above. Later tries are for windows that move too much.
_TRIES = ((64, 0), (128, 50), (128, 25), (1024, 0))
_CLOSE, _FEW = 1.0115, 0.2  # times the makespans of the best plan, and share that moves: no more tries
_SMALL = 1 << 12  # samples times slots up to which tries cost next to nothing
_WORTH = 0.2  # a sample leaves its rank where that evens out more than this share of its work


def stay_home(
    problem: Problem, order: Int, holders: Int, value: Int, best: Int, hard: int, *, thorough: bool
) -> Int:
    """A feasible layout near the makespans of ``best`` that moves little.

    Args:
        problem: The window.
        order: Sample positions, the costliest first.
        holders: Dp rank that holds each sample, int64 ``[n]``.
        value: What staying is worth, int64 ``[n]``: payload bytes or tokens.
        best: Row of each sample in the best plan found, int64 ``[n]``.
        hard: Groups of that plan whose cost a giant sets; they come first.
        thorough: Whether to try again where the first try moves much, although the window is large.
    """
    price = value.astype(np.float64) * (_WORTH * float(problem.work.sum()) / max(float(value.sum()), 1.0))
    makespan = np.sort(problem.loads(best).sum(axis=2).max(axis=1))[::-1]
    enough, few = int(makespan.sum()) * _CLOSE, int(value.sum()) * _FEW
    tries = []
    thorough = thorough or problem.size * problem.slots <= _SMALL
    for slack, beyond in _TRIES if thorough else _TRIES[:1]:
        level = makespan + makespan // slack
        extra = int(level.min()) // beyond if beyond else 0
        start = repaired(problem, partial(np.copyto, src=refine(problem, order, holders, level, extra)))
        layout = best if isinstance(start, str) else start
        for _ in range(2 if thorough else 1):
            layout = match_holders(problem, layout, holders, value)
            layout = polish_at_home(problem, layout, hard, holders, price)
        length = problem.makespans(layout)
        leaves = int(value[layout // problem.rows % problem.ranks != holders].sum())
        tries.append(((max(length, enough), leaves), layout))
        if length <= enough and leaves <= few:
            break
    return min(tries, key=itemgetter(0))[1]
