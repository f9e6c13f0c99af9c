"""One window as integers: what every algorithm reads, checked and normalised in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.budget import budget_units, units_of
from evenstep.errors import Infeasible
from evenstep.plan.constraints import PackingConstraints

__all__ = ["Int", "Problem", "integer_costs", "room_in", "row_weights", "sums"]

Int = npt.NDArray[np.int64]
_BITS = 52  # integers below 2**53 stay exact in float64, and sums of them in int64 and in float64 scores


@dataclass(frozen=True, slots=True)
class Problem:
    """Samples to put into ``groups * ranks * rows`` rows, all in integers.

    A rank synchronises once per group. Where ranks synchronise once per step, a window is one group in which a rank
    has the rows of all its micro-batches.

    Attributes:
        costs: int64 ``[stages, n]``.
        work: Cost over all stages, int64 ``[n]``.
        weights: What each sample takes of each limit, int64 ``[limits, n]``; the first is tokens.
        limits: int64 ``[limits]``.
        groups: Synchronisations in the window.
        ranks: Data-parallel ranks.
        rows: Rows of one rank in one group.
        reference: Row of each sample before balancing, int64 ``[n]``, numbered ``(group * ranks + rank) * rows + row``;
            None without a reference layout.
    """

    costs: Int
    work: Int
    weights: Int
    limits: Int
    groups: int
    ranks: int
    rows: int
    reference: Int | None

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.work)

    @property
    def slots(self) -> int:
        """Micro-batches over all ranks; a slot holds `rows` rows."""
        return self.groups * self.ranks

    @property
    def num_rows(self) -> int:
        """Rows over all ranks and groups."""
        return self.groups * self.ranks * self.rows

    def used(self, row: Int) -> Int:
        """What the rows hold of each limit, int64 ``[limits, num_rows]``."""
        return np.stack([sums(weight, row, self.num_rows) for weight in self.weights])

    def loads(self, row: Int) -> Int:
        """Cost of each slot, int64 ``[groups, ranks, stages]``."""
        slot = row // self.rows
        stages = np.stack([sums(cost, slot, self.slots) for cost in self.costs], axis=-1)
        return stages.reshape(self.groups, self.ranks, -1)

    def makespans(self, row: Int) -> int:
        """The sum of makespans over groups and stages."""
        return int(self.loads(row).max(axis=1).sum())

    def broken_row(self, row: Int) -> tuple[int, int] | None:
        """The first (row, limit) that a layout exceeds, or None if it is feasible."""
        over = self.used(row) > self.limits[:, None]
        if not over.any():
            return None
        broken, limit = np.argwhere(over.T)[0].tolist()
        return int(broken), int(limit)


def room_in(free: Int, need: Int) -> npt.NDArray[np.bool_]:
    """Which rows can take ``need`` (int64 ``[limits]``) of their ``free`` room (int64 ``[limits, rows]``)."""
    return np.asarray((free >= need[:, None]).all(axis=0))


def sums(values: Int, index: Int, size: int) -> Int:
    """Exact integer sums of ``values`` by ``index``: float64 sums of integers below 2**53 do not round."""
    return np.bincount(index, weights=values, minlength=size).astype(np.int64)


def integer_costs(costs: npt.NDArray[np.float64]) -> tuple[Int, int]:
    """Costs ``[n]`` or ``[n, stages]`` as integers at a scale at which every sum is exact.

    Costs that are integers already and small enough stay as they are. Others are multiplied by a power of two and
    rounded to about 52 bits for the sum of all; equal costs stay equal.

    Returns:
        int64 ``[stages, n]``, and the shift by which they were scaled up: ``cost = integer / 2**shift``.
    """
    stacked = costs.T if costs.ndim == 2 else costs[None, :]
    largest = float(stacked.max(initial=0.0))
    if largest == 0.0:
        return np.zeros(stacked.shape, dtype=np.int64), 0
    # A bound of the sum, rather than the sum itself, whose rounding depends on the order of summation.
    bits = int(np.frexp(largest)[1]) + int(stacked.size - 1).bit_length()
    if bits <= _BITS and bool((stacked == np.rint(stacked)).all()):
        return np.ascontiguousarray(stacked).astype(np.int64), 0
    shift = _BITS - bits
    return np.rint(np.ldexp(stacked, shift)).astype(np.int64), shift


def row_weights(
    tokens: Int, features: Mapping[str, npt.NDArray[Any]], constraints: PackingConstraints
) -> tuple[Int, Int, tuple[str, ...]]:
    """What samples take of a row's limits, the limits, and a name for each of them.

    Returns:
        int64 ``[limits, n]``, int64 ``[limits]`` and names: ``"seq_len"``, each budget, ``"max_segments"``.

    Raises:
        Infeasible: A sample exceeds a limit and the policy is ``"error"`` (or ``"truncate"`` with a budget).
    """
    policy = constraints.oversized
    names, columns, limits = ["seq_len"], [tokens], [constraints.seq_len]
    if policy == "truncate":
        columns = [np.minimum(tokens, constraints.seq_len)]
    for name, limit in sorted((constraints.budgets or {}).items()):
        names.append(name)
        columns.append(units_of(features[name], float(limit)))
        limits.append(budget_units(float(limit)))
    if constraints.max_segments is not None:
        names.append("max_segments")
        columns.append(np.ones(len(tokens), dtype=np.int64))
        limits.append(constraints.max_segments)
    weights, bounds = np.stack(columns), np.array(limits, dtype=np.int64)
    over = weights > bounds[:, None]
    if not over.any():
        return weights, bounds, tuple(names)
    if policy != "single":
        sample, limit_index = np.argwhere(over.T)[0].tolist()
        raise _oversized(sample, names[limit_index], tokens, features, constraints)
    # Alone in its row: it fills the row in every limit, whatever it really takes.
    return np.where(over.any(axis=0), bounds[:, None], weights), bounds, tuple(names)


def _oversized(
    sample: int,
    name: str,
    tokens: Int,
    features: Mapping[str, npt.NDArray[Any]],
    constraints: PackingConstraints,
) -> Infeasible:
    if name == "seq_len":
        return Infeasible(
            f"sample {sample} of the window has {int(tokens[sample])} tokens, more than seq_len={constraints.seq_len}: "
            "it fits into no row. Filter or split such samples (evenstep.datasets.SplitDocuments), raise seq_len, or set "
            "oversized='single' or 'truncate'"
        )
    limit = (constraints.budgets or {})[name]
    return Infeasible(
        f"sample {sample} of the window has {name}={float(features[name][sample]):g}, more than the budget of "
        f"{limit:g}: it fits into no row. Filter such samples, raise budgets[{name!r}], or set oversized='single'"
    )
