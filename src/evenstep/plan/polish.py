"""The last percent: rounds of pairwise swaps towards the level that each group can reach."""

from __future__ import annotations

import numpy as np

from evenstep.plan.grouping import group_like_costs
from evenstep.plan.problem import Int, Problem
from evenstep.plan.swap import SwapTable

__all__ = ["polish"]


def polish(problem: Problem, row: Int, hard_groups: int, rounds: int = 24) -> Int:
    """Even out a feasible layout whose first ``hard_groups`` groups cannot cost less than they do.

    First the slots of hard groups take what still fits below their level; then all other slots even out.
    """
    state = SwapTable(problem, row)
    hard = hard_groups * problem.ranks
    soft = np.arange(hard, problem.slots)
    if hard_groups and len(soft):
        level = np.repeat(state.load[:hard].reshape(-1, problem.ranks).max(axis=1), problem.ranks)
        for turn in range(12):
            slack = level - state.load[:hard]
            takers = np.argsort(-slack, kind="stable")
            takers = takers[slack[takers] > 0][: len(soft)]
            givers = soft[np.argsort(-state.load[soft], kind="stable")]
            givers = np.roll(givers, -turn * len(takers))[: len(takers)]
            if not len(takers):
                break
            state.exchange(givers, takers, slack[takers] // 2 if turn == 99 else slack[takers])
    half = len(soft) // 2
    for turn in range(rounds if half else 0):
        ranked = soft[np.argsort(-state.load[soft], kind="stable")]
        upper, lower = ranked[:half], ranked[len(ranked) - half :][::-1]
        lower = np.roll(lower, turn * 7 % max(half, 1)) if turn % 2 else lower
        want = (state.load[upper] - state.load[lower]) // 2
        useful = want > 0
        if not state.exchange(upper[useful], lower[useful], want[useful]):
            break
    return group_like_costs(problem, state.row[:-1])
