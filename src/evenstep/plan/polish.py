"""The last percent: rounds of pairwise exchanges towards the level that each group can reach."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.plan.grouping import group_like_costs, like_costs_per_rank
from evenstep.plan.problem import Int, Problem
from evenstep.plan.swap import SwapTable

__all__ = ["polish", "polish_at_home"]

_FILL_ROUNDS = 4
_SMALL = 160  # slots up to which a window gets more rounds
_ROUNDS = 12
_MORE_EVEN_ROUNDS, _MORE_SHARPEN_ROUNDS = 28, 48
_PAIRS = 16  # of the costliest and the cheapest slots of a group, in the last rounds
_ENOUGH = 1e-8  # of the makespans: what the groups could still gain


def polish(problem: Problem, row: Int, hard_groups: int) -> Int:
    """Even out a feasible layout whose first ``hard_groups`` groups cannot cost less than they do.

    First the slots of hard groups take what still fits below their level, then all other slots even out, and last the
    costliest slots of each group.
    """
    state = SwapTable(problem, row)
    _polish(state, hard_groups)
    return group_like_costs(problem, state.row[:-1])


def polish_at_home(
    problem: Problem, row: Int, hard_groups: int, holders: Int, price: npt.NDArray[np.float64]
) -> Int:
    """The same where a sample that leaves the rank that holds it has a ``price``; no slot changes its rank."""
    state = SwapTable(problem, row, holders, price)
    _polish(state, hard_groups)
    return like_costs_per_rank(problem, state.row[:-1])


def _polish(state: SwapTable, hard_groups: int) -> None:
    problem = state.problem
    soft = np.arange(hard_groups * problem.ranks, problem.slots)
    if hard_groups and len(problem.costs) == 1:
        _fill_up(state, hard_groups, soft)
    if problem.ranks > 1 and len(soft):
        _even_out(state, soft)
        _sharpen(state, soft)


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
        state.exchange(givers, takers, slack[takers][None, :], turn)


def _even_out(state: SwapTable, soft: Int) -> None:
    """The upper half of the slots against the lower half."""
    half, stages, idle = len(soft) // 2, len(state.load), 0
    for turn in range(_MORE_EVEN_ROUNDS if len(soft) <= _SMALL else _ROUNDS):
        ranked = soft[np.argsort(-state.load[turn % stages, soft], kind="stable")]
        upper, lower = ranked[:half], ranked[len(ranked) - half :][::-1]
        if turn % 2:  # other partners than the opposite one, so that no two slots are stuck with each other
            lower = np.roll(lower, turn * 7 % half)
        if stages == 1 and not _worthwhile(state, ranked):
            return
        idle = 0 if _level(state, upper, lower, turn) else idle + 1
        if idle > stages:
            return


def _sharpen(state: SwapTable, soft: Int) -> None:
    """The few costliest slots of each group against its few cheapest."""
    ranks, stages, idle = state.problem.ranks, len(state.load), 0
    pairs = max(1, min(ranks // 2, _PAIRS * state.problem.ranks // len(soft), _PAIRS))
    for turn in range(_MORE_SHARPEN_ROUNDS if len(soft) <= _SMALL else _ROUNDS):
        ranked = soft[np.argsort(-state.load[turn % stages, soft], kind="stable")]
        if stages == 1 and not _worthwhile(state, ranked):
            return
        groups = ranked.reshape(-1, ranks)
        upper, lower = groups[:, :pairs], groups[:, ranks - pairs :]
        lower = np.roll(lower[:, ::-1], turn, axis=1)
        idle = 0 if _level(state, upper.reshape(-1), lower.reshape(-1), turn) else idle + 1
        if idle > max(stages, min(pairs, 4)):
            return


def _level(state: SwapTable, upper: Int, lower: Int, turn: int) -> int:
    want = (state.load[:, upper] - state.load[:, lower]) // 2
    useful = np.abs(want).sum(axis=0) > 0
    if not useful.any():
        return 0
    return state.exchange(upper[useful], lower[useful], want[:, useful], turn)


def _worthwhile(state: SwapTable, ranked: Int) -> bool:
    """Whether the groups of like cost that ``ranked`` slots make could still gain something."""
    groups = state.load[0, ranked].reshape(-1, state.problem.ranks)
    gain = groups[:, 0].sum() - groups.sum() / state.problem.ranks
    return bool(gain > _ENOUGH * groups[:, 0].sum())
