"""What no plan of one row per rank can beat: a price on tokens, and the two ways in which long samples can lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.plan.problem import Int, Problem

__all__ = ["priced_bound"]

Float = npt.NDArray[np.float64]
_SIZES = 8  # token counts up to half a row that are tried as the smallest long sample
_FEW_SAMPLES = 1 << 13  # with more, only samples of more than half a row are called long, to save time
_PRICES = 24  # prices of a token that are tried at once
_ROUNDS = 3  # each between the neighbours of the best price so far


def priced_bound(problem: Problem, cost: Int, floor: Int) -> float:
    """A lower bound of the sum of makespans for one row per slot, in integer cost units.

    Either no two of the long samples share a row: then each is the floor of a row of its own. Or two of them do: then
    that row costs at least what the two cheapest do, and it is none of the rows of samples that leave no room for a
    long one. The smaller of both holds, whatever is called long.

    Args:
        problem: The window.
        cost: Cost of each sample in one stage, int64 ``[n]``.
        floor: A floor of the k-th largest makespan for each k, non-increasing int64 ``[groups]``.
    """
    tokens, cap = problem.weights[0], int(problem.limits[0])
    if tokens.max(initial=0) * 4 <= cap:  # none is long
        return 0.0
    used = np.flatnonzero(tokens)
    densest = used[np.argsort(-(cost[used] / tokens[used]), kind="stable")]
    best = 0.0
    for size in _sizes(problem):
        long, alone = tokens >= size, tokens > cap - size
        cases: list[float] = []
        if long.sum() <= problem.slots:
            cases.append(_apart(problem, cost, densest, _raised(problem, floor, cost[long]), long))
        two = np.sort(tokens[long])[:2]
        if len(two) == 2 and two.sum() <= cap and min(cases, default=np.inf) > best:
            rows = np.append(cost[alone], np.sort(cost[long])[:2].sum())
            cases.append(_apart(problem, cost, densest, _raised(problem, floor, rows), alone))
        best = max(best, min(cases, default=0.0))
    return best


def _sizes(problem: Problem) -> list[int]:
    """Half a row and a bit, and token counts of samples between a quarter and a half of it, the largest first."""
    tokens, cap = problem.weights[0], int(problem.limits[0])
    if problem.size > _FEW_SAMPLES:
        return [cap // 2 + 1]
    medium = np.unique(tokens[(tokens * 4 > cap) & (tokens * 2 <= cap)])[::-1]
    if len(medium) > _SIZES:
        medium = medium[np.linspace(0, len(medium) - 1, _SIZES).astype(np.int64)]
    return [cap // 2 + 1, *medium.tolist()]


def _raised(problem: Problem, floor: Int, rows: Int) -> Int:
    """Floors of the makespans where distinct rows cost at least ``rows``."""
    first = -np.sort(-rows)[:: problem.ranks][: problem.groups]
    raised = floor.copy()
    raised[: len(first)] = np.maximum(floor[: len(first)], first)
    return raised


def _apart(problem: Problem, cost: Int, densest: Int, floor: Int, long: npt.NDArray[np.bool_]) -> float:
    """The bound where no two of the samples ``long`` share a row (Lagrangian relaxation of the rows' tokens).

    With a price on tokens, a row is worth its long sample and the price of the tokens that this leaves, but no more than
    the makespan T_k of its group; all other samples are worth their surplus over the price on top. Rows hold most where
    the ones worth most are in the groups that cost most. What groups hold grows with ``ranks * T_k`` at most, so the
    sum is least at the floors t_k: ``t_1 + t_2 + ... + (total - surplus - held) / ranks``.
    """
    tokens, cap = problem.weights[0], int(problem.limits[0])
    long_cost, long_tokens = cost[long].astype(np.float64), tokens[long].astype(np.float64)
    short = densest[~long[densest]]
    density = np.append(cost[short] / tokens[short], 0.0)
    dense_cost, dense_tokens = (np.append(0, np.cumsum(column[short])) for column in (cost, tokens))
    total = float(cost[densest].sum())
    level = np.repeat(floor, problem.ranks).astype(np.float64)
    split = min(len(long_cost), problem.slots)

    def beyond(place: Int) -> Float:
        price = density[place][:, None]
        worth = np.maximum(long_cost + price * (cap - long_tokens), price * cap)
        held = np.minimum(-np.sort(-worth, axis=1)[:, :split], level[:split]).sum(axis=1)
        held += np.minimum(price * cap, level[split:]).sum(axis=1)
        surplus = dense_cost[place] - price[:, 0] * dense_tokens[place]
        return np.asarray(total - surplus - held, dtype=np.float64)

    # Prices at even distances in tokens first, because it is the tokens of the costliest groups that have a price.
    place = np.unique(np.searchsorted(dense_tokens, np.linspace(0, dense_tokens[-1], _PRICES)))
    most = 0.0
    for _ in range(_ROUNDS):
        value = beyond(place)
        best = int(value.argmax())
        most = max(most, float(value[best]))
        first, last = place[max(best - 1, 0)], place[min(best + 1, len(place) - 1)]
        place = np.unique(np.linspace(first, last, _PRICES).astype(np.int64))
    return float(floor.sum() + most / problem.ranks)
