"""Which rank gets which planned slot: the one that already holds most of it."""

from __future__ import annotations

import numpy as np

from evenstep.plan.problem import Int, Problem

__all__ = ["match_holders"]

_SWAP_RANKS = 128  # up to here pairs of ranks are compared all at once
_SWAP_ROUNDS = 96


def match_holders(problem: Problem, row: Int, holders: Int, value: Int) -> Int:
    """Renumber the slots of each group so that samples stay with their holders; loads per group do not change.

    A greedy matching in descending value, then exchanges of two slots while one gains.

    Args:
        problem: The window.
        row: Row of each sample, int64 ``[n]``.
        holders: Dp rank that holds each sample, int64 ``[n]``.
        value: What staying is worth, int64 ``[n]``: payload bytes or tokens.
    """
    ranks, slots = problem.ranks, problem.slots
    slot = row // problem.rows
    key, inverse = np.unique(slot * ranks + holders, return_inverse=True)
    kept = np.bincount(inverse, weights=value).astype(np.int64)
    taken = np.full(slots, -1, dtype=np.int64)  # rank of each slot
    given = np.full((problem.groups, ranks), -1, dtype=np.int64)  # slot of each group and rank
    for where in key[np.argsort(-kept, kind="stable")].tolist():
        planned, rank = divmod(where, ranks)
        group = planned // ranks
        if taken[planned] < 0 and given[group, rank] < 0:
            taken[planned] = rank
            given[group, rank] = planned
    for group in range(problem.groups):
        inside = taken[group * ranks : (group + 1) * ranks]
        inside[inside < 0] = np.flatnonzero(given[group] < 0)
    target = taken.reshape(problem.groups, ranks)
    # A layout that already keeps more, such as a refined one, stays as it is.
    planned, rank = key // ranks, key % ranks
    as_matched = np.bincount(planned // ranks, kept * (taken[planned] == rank), minlength=problem.groups)
    as_it_is = np.bincount(planned // ranks, kept * (planned % ranks == rank), minlength=problem.groups)
    target[as_it_is >= as_matched] = np.arange(ranks)
    if 1 < ranks <= _SWAP_RANKS:
        table = np.zeros(slots * ranks, dtype=np.int64)
        table[key] = kept
        _exchange(table.reshape(problem.groups, ranks, ranks), target)
    place = (np.arange(problem.groups)[:, None] * ranks + target).reshape(-1)
    return place[slot] * problem.rows + row % problem.rows


def _exchange(kept: Int, target: Int) -> None:
    """Best exchange of two slots in every group at once, until none gains; changes ``target``."""
    groups, ranks, _ = kept.shape
    lines = np.arange(groups)
    for _ in range(_SWAP_ROUNDS):
        mine = np.take_along_axis(kept, target[:, :, None], axis=2)[:, :, 0]
        other = np.take_along_axis(kept, np.broadcast_to(target[:, None, :], kept.shape), axis=2)
        gain = other + other.transpose(0, 2, 1) - mine[:, :, None] - mine[:, None, :]
        best = gain.reshape(groups, -1).argmax(axis=1)
        first, second = best // ranks, best % ranks
        better = gain[lines, first, second] > 0
        if not better.any():
            return
        at, one, two = lines[better], first[better], second[better]
        target[at, one], target[at, two] = target[at, two], target[at, one]
