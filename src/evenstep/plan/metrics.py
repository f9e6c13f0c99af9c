"""How even a plan is, in the words of the design: imbalance, efficiency, padding, movement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["efficiency", "fill", "imbalance", "moved", "rank_of", "sum_of_makespans", "sum_of_means"]

Loads = npt.NDArray[Any]
_NEAR_OVERFLOW = 1e290  # sums of loads up to it stay finite


def sum_of_makespans(loads: Loads) -> float:
    """The largest rank costs summed over micro-batches and stages, in the unit of the costs.

    Args:
        loads: Rank costs ``[micro_batches, dp_size]`` or ``[micro_batches, dp_size, stages]``.
    """
    return float(loads.max(axis=1, initial=0).sum())


def sum_of_means(loads: Loads) -> float:
    """The mean rank costs summed over micro-batches and stages: what a perfectly even plan would take."""
    return float(loads.sum()) / int(loads.shape[1])


def imbalance(loads: Loads) -> float:
    """Sum of makespans over sum of means; 1 is perfect, and 1 when there is no cost at all.

    Infinite where a rank's cost is beyond float64.
    """
    largest = float(loads.max(initial=0))
    if largest > _NEAR_OVERFLOW:
        if math.isinf(largest):
            return math.inf
        loads = loads / largest
    even = sum_of_means(loads)
    return sum_of_makespans(loads) / even if even > 0 else 1.0


def efficiency(loads: Loads) -> float:
    """Sum of mean rank costs over sum of makespans; the inverse of `imbalance`."""
    return 1.0 / imbalance(loads)


def fill(tokens: npt.NDArray[Any], *, rows: int, seq_len: int) -> float:
    """Share of the window's ``rows * seq_len`` token places that hold a token; the rest is padding."""
    return float(np.minimum(tokens, seq_len).sum()) / (rows * seq_len)


def rank_of(assignment: npt.NDArray[Any], *, dp_size: int, rows: int) -> npt.NDArray[np.int32]:
    """The dp rank of each flat row number ``(micro_batch * dp_size + dp_rank) * rows + row``, int32 ``[n]``."""
    return np.asarray(assignment // rows % dp_size, dtype=np.int32)


def moved(
    assignment: npt.NDArray[Any], holders: npt.NDArray[Any], *, dp_size: int, rows: int
) -> npt.NDArray[np.bool_]:
    """Which samples leave the dp rank that holds them, bool ``[n]``."""
    return np.asarray(rank_of(assignment, dp_size=dp_size, rows=rows) != holders)
