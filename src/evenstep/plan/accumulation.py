"""Steps that are a number of samples: their reference layout, and the fewest micro-batches that hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from evenstep.plan.constraints import PackingConstraints
from evenstep.plan.packing import best_fit, first_fit
from evenstep.plan.problem import Int, row_weights
from evenstep.plan.repair import place_left_over
from evenstep.plan.window import Window, check_positive, feature_columns, token_column

__all__ = ["fewest_micro_batches", "reference_layout"]


def reference_layout(
    tokens: npt.ArrayLike,
    *,
    dp_size: int,
    rows: int,
    constraints: PackingConstraints,
    features: Mapping[str, npt.ArrayLike] | None = None,
) -> tuple[npt.NDArray[np.int32], int]:
    """The layout of a step that is a number of samples, before balancing.

    Dp rank d holds the d-th contiguous block of the samples, packed first-fit into rows.

    Args:
        tokens: Tokens of each sample, integers ``[n]``.
        dp_size: Data-parallel ranks.
        rows: Rows of one rank's micro-batch.
        constraints: Hard limits of a row.
        features: Columns ``[n]`` that ``constraints.budgets`` names.

    Returns:
        Flat row of each sample, int32 ``[n]``, and the micro-batches of every rank: the maximum over ranks, at least 1.

    Raises:
        Infeasible: A sample exceeds a limit that the policy does not allow.
        TypeError: An argument has the wrong type.
        ValueError: An argument has the wrong shape or range.
    """
    check_positive("dp_size", dp_size)
    check_positive("rows", rows)
    column = token_column(tokens)
    size = len(column)
    weights, limits, _ = row_weights(column, feature_columns(features, constraints, size), constraints)
    rank = np.arange(dp_size + 1)
    edges = (rank * (size // dp_size) + np.minimum(rank, size % dp_size)).tolist()
    flat = np.zeros(size, dtype=np.int64)
    micro_batches = 1
    for rank_index in range(dp_size):
        block = slice(edges[rank_index], edges[rank_index + 1])
        local = first_fit(weights[:, block], limits)
        micro_batches = max(micro_batches, int(local.max(initial=0)) // rows + 1)
        flat[block] = (local // rows * dp_size + rank_index) * rows + local % rows
    return flat.astype(np.int32), micro_batches


def fewest_micro_batches(window: Window) -> int:
    """The fewest micro-batches for which a packing is found, never more than the reference layout has."""
    weights, limits = window.weights, window.limits
    per_group = window.dp_size * window.rows
    order = np.argsort(-weights[0], kind="stable")
    packed = best_fit(weights, limits, order)
    fewest = int(packed.max(initial=0)) // per_group + 1
    if window.reference is not None:
        fewest = min(fewest, window.reference_micro_batches)
    needed = int((-(-weights.sum(axis=1) // np.maximum(limits, 1))).max(initial=0))
    while (fewest - 1) * per_group >= max(needed, 1) and _fits(window, packed, (fewest - 1) * per_group):
        fewest -= 1
    return fewest


def _fits(window: Window, packed: Int, rows: int) -> bool:
    row = np.where(packed < rows, packed, -1)
    return place_left_over(window.weights, window.limits, row, rows)
