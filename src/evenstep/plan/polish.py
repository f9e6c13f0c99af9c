"""The last percent: rounds of pairwise swaps towards the level that each group can reach."""

from __future__ import annotations

import numpy as np

from evenstep.plan.grouping import group_like_costs
from evenstep.plan.problem import Int, Problem
from evenstep.plan.swap import SwapTable

__all__ = ["polish"]

_FILL_ROUNDS = 12
_EVEN_ROUNDS = 24


def polish(problem: Problem, row: Int, hard_groups: int) -> Int:
    """Even out a feasible layout whose first ``hard_groups`` groups cannot cost less than they do.

    First the slots of hard groups take what still fits below their level; then all other slots even out.
    """
    state = SwapTable(problem, row)
    soft = np.arange(hard_groups * problem.ranks, problem.slots)
    if hard_groups and len(problem.costs) == 1:
        _fill_up(state, hard_groups, soft)
    _even_out(state, soft)
    return group_like_costs(problem, state.row[:-1])


def _fill_up(state: SwapTable, hard_groups: int, soft: Int) -> None:
    ranks = state.problem.ranks
    load = state.load[0]
    hard = hard_groups * ranks
    level = np.repeat(load[:hard].reshape(-1, ranks).max(axis=1), ranks)
    for turn in range(_FILL_ROUNDS):
        slack = level - load[:hard]
        takers = np.argsort(-slack, kind="stable")
        takers = takers[slack[takers] > 0][: len(soft)]
        if not len(takers):
            return
        givers = soft[np.argsort(-load[soft], kind="stable")]
        givers = np.roll(givers, -turn * len(takers))[: len(takers)]
        state.exchange(givers, takers, slack[takers][None, :])


def _even_out(state: SwapTable, soft: Int) -> None:
    half, stages = len(soft) // 2, len(state.load)
    idle = 0
    for turn in range(_EVEN_ROUNDS if half else 0):
        ranked = soft[np.argsort(-state.load[turn % stages, soft], kind="stable")]
        upper, lower = ranked[:half], ranked[len(ranked) - half :][::-1]
        if turn % 2:  # other partners than the opposite one, so that no two slots are stuck with each other
            lower = np.roll(lower, turn * 7 % half)
        want = (state.load[:, upper] - state.load[:, lower]) // 2
        useful = np.abs(want).sum(axis=0) > 0
        changed = state.exchange(upper[useful], lower[useful], want[:, useful])
        idle = 0 if changed else idle + 1
        if idle > stages:
            return
