"""What no plan of a window can beat, from pigeonholes and fractional knapsacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.plan.prices import priced_bound
from evenstep.plan.problem import Int, Problem

__all__ = ["makespan_bound"]

Float = npt.NDArray[np.float64]
_SHARES = 8  # rows are considered with room for at most 1, 2, ... this many large samples
_PRICES = 16  # prices of a token that are tried
_THRESHOLDS = 4  # sizes below half a row that are tried as the smallest that no giant leaves room for
_MOST_GIANTS = 4096  # more are not looked at one by one
_LEVELS = 1 + np.array([0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 3, np.inf])


def makespan_bound(problem: Problem) -> float:
    """A lower bound of the sum of makespans over groups and stages, in integer cost units.

    Let T_1 >= T_2 >= ... be the makespans of the groups and t_k a floor of T_k (see `_floors`). The K costliest groups
    hold at most ``held`` work (see `_held` and `_held_beside_giants`); the other groups take at least the rest divided
    by the ranks. So for every K the sum is at least ``t_1 + ... + t_K + (total - held) / ranks``.
    """
    return float(sum(_stage_bound(problem, cost) for cost in problem.costs))


def _stage_bound(problem: Problem, cost: Int) -> float:
    total, ranks = int(cost.sum()), problem.ranks
    if total == 0:
        return 0.0
    each = _floors(problem, cost)
    floor = np.cumsum(each).astype(np.float64)
    # The bound grows with every T_k, because T_k adds itself to the sum and at most ranks * T_k to what is held.
    best = floor + np.maximum(total - _held(problem, cost, floor), 0.0) / ranks
    if problem.rows == 1 and ranks > 1:
        best[0] = max(best[0], _beside_costliest(problem, cost, total))
        for threshold in _thresholds(problem):
            best = np.maximum(best, _beside_giants(problem, cost, floor, total, threshold))
        best[-1] = max(best[-1], priced_bound(problem, cost, each))
    # Makespans are sums of costs, so multiples of what divides them all.
    unit = int(np.gcd.reduce(cost))
    return float(np.ceil(max(total / ranks, float(best.max())) / unit * (1 - 1e-12)) * unit)


def _floors(problem: Problem, cost: Int) -> Int:
    """A floor of the k-th largest makespan for each k, non-increasing int64 ``[groups]``.

    A row holds at most j samples of more than ``seq_len / (j + 1)`` tokens, so k - 1 groups hold at most
    ``j * rows * ranks * (k - 1)`` of them, and the next one lies in a k-th group.
    """
    best = np.zeros(problem.groups, dtype=np.int64)
    before = np.arange(problem.groups) * problem.ranks * problem.rows
    tokens, cap = problem.weights[0], int(problem.limits[0])
    for share in range(1, _SHARES + 1):
        large = np.sort(cost[tokens * (share + 1) > cap])[::-1]
        nth = before * share
        inside = nth < len(large)
        best[inside] = np.maximum(best[inside], large[nth[inside]])
    best[0] = max(int(best[0]), _pigeonhole(cost, problem.slots), int(cost.max(initial=0)))
    if problem.rows == 1:
        best[0] = max(int(best[0]), _crowded(problem, cost))
        for threshold in _thresholds(problem)[1:]:
            # No two of the samples that leave no room for this one share a row, nor does one of them with it.
            alone = cost[tokens > cap - threshold]
            large = np.sort(np.append(alone, cost[tokens == threshold].max()))[::-1]
            inside = before < len(large)
            best[inside] = np.maximum(best[inside], large[before[inside]])
    return np.maximum.accumulate(best[::-1])[::-1]


def _thresholds(problem: Problem) -> list[int]:
    """Half a row and a bit, and token counts of samples between a third and a half of it, the largest first."""
    tokens, cap = problem.weights[0], int(problem.limits[0])
    medium = np.unique(tokens[(tokens * 3 > cap) & (tokens * 2 <= cap)])[::-1]
    if len(medium) > _THRESHOLDS:
        medium = medium[np.linspace(0, len(medium) - 1, _THRESHOLDS).astype(np.int64)]
    return [cap // 2 + 1, *medium.tolist()]


def _pigeonhole(cost: Int, slots: int) -> int:
    """Some slot holds q + 1 of the ``q * slots + 1`` costliest samples, so it costs what the q + 1 cheapest do."""
    most = (len(cost) - 1) // slots
    if most < 1:
        return 0
    descending = np.concatenate(([0], np.cumsum(np.sort(cost)[::-1])))
    share = np.arange(1, most + 1)
    last = share * slots + 1
    return int((descending[last] - descending[last - share - 1]).max())


def _crowded(problem: Problem, cost: Int) -> int:
    """What the row of a giant costs where the other rows cannot hold all other tokens.

    The rows of the j costliest samples hold at least what the other rows do not, the cheapest tokens at best. They lie
    in distinct rows, or two of them share one.
    """
    tokens, cap = problem.weights[0], int(problem.limits[0])
    order = np.argsort(-cost, kind="stable")[: min(problem.num_rows, len(cost))]
    most = np.arange(1, len(order) + 1)
    left = int(tokens.sum()) - (problem.num_rows - most) * cap - np.cumsum(tokens[order])
    if not len(order) or left.max() <= 0:
        return 0
    used = np.flatnonzero(tokens)
    cheapest = used[np.argsort(cost[used] / tokens[used], kind="stable")]
    extra = np.interp(left, _from_zero(tokens[cheapest]), _from_zero(cost[cheapest]))
    together = np.floor((np.cumsum(cost[order]) + np.where(left > 0, extra, 0.0)) / most)
    sharing = np.append(np.inf, cost[order][1:] + cost[order][:-1])
    if problem.groups > 1:  # only the row of the very costliest is known to lie in the costliest group
        return int(together[0])
    return int(np.minimum(together, sharing).max())


def _held(problem: Problem, cost: Int, floor: Float) -> Float:
    """What the k costliest groups hold at most: their makespans, or the densest samples in their tokens."""
    rows = np.arange(1, problem.groups + 1) * problem.ranks * problem.rows
    most = _densest(problem.weights[0], cost, rows * int(problem.limits[0]))
    return np.minimum(problem.ranks * floor, most)


def _densest(tokens: Int, cost: Int, room: Int) -> Float:
    """Most cost in ``room`` tokens if samples could be cut (fractional knapsack), float64 ``[len(room)]``."""
    used = np.flatnonzero(tokens)
    order = used[np.argsort(-(cost[used] / tokens[used]), kind="stable")]
    most = np.interp(room, _from_zero(tokens[order]), _from_zero(cost[order]))
    return np.asarray(most + int(cost[tokens == 0].sum()), dtype=np.float64)


def _beside_costliest(problem: Problem, cost: Int, total: int) -> float:
    """The bound from the group of the costliest sample: its row holds no more than the makespan of the group.

    With a makespan T the group holds T in that row and the densest of the other samples in its other rows, so the sum is
    at least ``T + (total - T - densest) / ranks``, which grows with T.
    """
    first = int(cost.argmax())
    others = np.arange(len(cost)) != first
    room = np.array([(problem.ranks - 1) * int(problem.limits[0])])
    tokens = problem.weights[0]
    held = _densest(tokens[others], cost[others], room)[0] + cost[first]
    return float(cost[first] + max(total - held, 0.0) / problem.ranks)


def _beside_giants(problem: Problem, cost: Int, floor: Float, total: int, threshold: int) -> Float:
    """The bound for one row per slot, where a giant leaves tokens of its row unused; float64 ``[groups]``.

    A giant leaves no room for a sample of ``threshold`` tokens, so a row holds one giant, or at most two medium samples
    (between the two), and small ones; beside a giant no more than the level T_1 allows. With a price on tokens, what
    rows hold is at most the surplus of all small samples over the price, and for each row its giant, or the surplus of
    its medium samples, and the price of the tokens it can use (Lagrangian relaxation). For T_1 between two levels, the
    lower one counts for the sum and the higher one for what is held.
    """
    tokens, cap, ranks = problem.weights[0], int(problem.limits[0]), problem.ranks
    giant, small = tokens > cap - threshold, tokens < threshold
    if tokens.max() * 2 <= cap or giant.sum() > _MOST_GIANTS or not (small & (tokens > 0)).any():
        return np.zeros(problem.groups)
    small_cost, small_tokens = cost[small].astype(np.float64), tokens[small].astype(np.float64)
    used = small_tokens > 0
    density = np.sort(small_cost[used] / small_tokens[used])
    price = density[np.unique(np.linspace(len(density) // 4, len(density) - 1, _PRICES).astype(np.int64))]
    surplus = np.maximum(small_cost - price[:, None] * small_tokens, 0.0).sum(axis=1)
    level = np.float64(floor[0]) * _LEVELS
    giant_cost, giant_tokens = cost[giant].astype(np.float64), tokens[giant].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.minimum(cap - giant_tokens, np.maximum(level[1:, None] - giant_cost, 0.0) / density[0])
    room = np.nan_to_num(room, nan=0.0, posinf=cap)
    plain = (price * cap)[:, None, None]
    value = np.maximum(giant_cost + price[:, None, None] * room, plain)
    medium = ~giant & ~small
    if medium.any():
        pairs = _pair_surplus(cost[medium] - price[:, None] * tokens[medium])[:, None, :] + plain
        value = np.concatenate((value, np.broadcast_to(pairs, (*value.shape[:2], pairs.shape[2]))), axis=2)
    rows = np.arange(1, problem.groups + 1) * ranks
    best = -np.sort(-value, axis=2)[:, :, : int(rows[-1])]
    held = np.concatenate((np.zeros((*best.shape[:2], 1)), np.cumsum(best, axis=2)), axis=2)
    inside = np.minimum(rows, best.shape[2])
    held = held[:, :, inside] + plain * (rows - inside) + surplus[:, None, None]
    rest = np.maximum(total - held.min(axis=0), 0.0) / ranks
    return np.asarray((level[:-1, None] - level[0] + floor + rest).min(axis=0), dtype=np.float64)


def _pair_surplus(surplus: Float) -> Float:
    """The largest surpluses two by two, float64 ``[prices, pairs]`` of float64 ``[prices, samples]``."""
    ordered = -np.sort(-np.maximum(surplus, 0.0), axis=1)
    if ordered.shape[1] % 2:
        ordered = np.concatenate((ordered, np.zeros((len(ordered), 1))), axis=1)
    return np.asarray(ordered.reshape(len(ordered), -1, 2).sum(axis=2), dtype=np.float64)


def _from_zero(values: Int) -> Int:
    return np.concatenate(([0], np.cumsum(values)))
