"""The arguments of one planning call, checked before anything is computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.plan.constraints import PackingConstraints
from evenstep.plan.objective import Objective
from evenstep.plan.problem import Int, Problem, integer_costs, row_weights
from evenstep.shown import shown

__all__ = ["Window", "check_positive", "feature_columns", "token_column"]


@dataclass(frozen=True, slots=True)
class Window:
    """Checked inputs of `plan_window`; arrays are ``[n]`` over the samples of the window.

    Attributes:
        tokens: int64.
        costs: float64 ``[n]`` or ``[n, stages]``.
        integers: `costs` as int64 ``[stages, n]``.
        shift: ``costs = integers / 2**shift``.
        weights: int64 ``[limits, n]``, see `row_weights`.
        limits: int64 ``[limits]``.
        names: Name of each limit.
        dp_size: Data-parallel ranks.
        rows: Rows of one rank's micro-batch.
        reference: Flat row before balancing, int64, or None.
        holders: Dp rank that holds each sample, int64, or None if nobody does.
        payload_bytes: int64, or None if unknown.
        objective: What plans are judged by.
        constraints: Hard limits of a row.
    """

    tokens: Int
    costs: npt.NDArray[np.float64]
    integers: Int
    shift: int
    weights: Int
    limits: Int
    names: tuple[str, ...]
    dp_size: int
    rows: int
    reference: Int | None
    holders: Int | None
    payload_bytes: Int | None
    objective: Objective
    constraints: PackingConstraints

    @classmethod
    def check(
        cls,
        tokens: npt.ArrayLike,
        costs: npt.ArrayLike,
        *,
        dp_size: int,
        rows: int,
        reference: npt.ArrayLike | None,
        constraints: PackingConstraints,
        objective: Objective,
        features: Mapping[str, npt.ArrayLike] | None,
        holders: npt.ArrayLike | None,
        payload_bytes: npt.ArrayLike | None,
    ) -> Window:
        """Arrays of the right type, shape and range, or an error that names the argument and the sample."""
        check_positive("dp_size", dp_size)
        check_positive("rows", rows)
        if not isinstance(constraints, PackingConstraints):
            raise TypeError(
                f"constraints is {shown(constraints)}, expected evenstep.PackingConstraints(seq_len, ...)"
            )
        if not isinstance(objective, Objective):
            raise TypeError(
                f"objective is {shown(objective)}, expected an evenstep.Objective, or None for the default"
            )
        column = token_column(tokens)
        size = len(column)
        cost_table = _numbers("costs", costs, size, stages=True)
        integers, shift = integer_costs(cost_table)
        columns = feature_columns(features, constraints, size)
        weights, limits, names = row_weights(column, columns, constraints)
        layout = None if reference is None else _integers("reference", reference, size)
        holding = None if holders is None else _integers("holders", holders, size)
        if holding is not None and size and int(holding.max()) >= dp_size:
            sample = int(holding.argmax())
            raise ValueError(
                f"holders[{sample}] is {int(holding[sample])}, but there are only {dp_size} data-parallel ranks; "
                f"pass dp ranks in [0, {dp_size})"
            )
        if holding is None and layout is not None:
            holding = layout // rows % dp_size
        return cls(
            tokens=column,
            costs=cost_table,
            integers=integers,
            shift=shift,
            weights=weights,
            limits=limits,
            names=names,
            dp_size=dp_size,
            rows=rows,
            reference=layout,
            holders=holding,
            payload_bytes=None if payload_bytes is None else _integers("payload_bytes", payload_bytes, size),
            objective=objective,
            constraints=constraints,
        )

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.tokens)

    @property
    def reference_micro_batches(self) -> int:
        """Micro-batches that the reference layout needs; 0 without one."""
        if self.reference is None:
            return 0
        return int(self.reference.max(initial=0)) // (self.dp_size * self.rows) + 1

    def problem(self, micro_batches: int) -> Problem:
        """The window over ``micro_batches``, with the reference layout if it has no more than these."""
        per_step = self.objective.sync == "step"
        reference = None
        if self.reference is not None and self.reference_micro_batches <= micro_batches:
            reference = self.to_internal(self.reference, micro_batches)
        return Problem(
            costs=self.integers,
            work=self.integers.sum(axis=0),
            weights=self.weights,
            limits=self.limits,
            groups=1 if per_step else micro_batches,
            ranks=self.dp_size,
            rows=micro_batches * self.rows if per_step else self.rows,
            reference=reference,
        )

    def check_reference(self, micro_batches: int) -> None:
        """Refuse a reference layout with rows beyond ``micro_batches``."""
        if self.reference_micro_batches <= micro_batches:
            return
        assert self.reference is not None, "no layout needs micro-batches"
        sample = int(self.reference.argmax())
        raise ValueError(
            f"reference[{sample}] is row {int(self.reference[sample])}, but the window has only "
            f"micro_batches * dp_size * rows = {micro_batches} * {self.dp_size} * {self.rows} rows; "
            "pass flat rows (micro_batch * dp_size + dp_rank) * rows + row"
        )

    def to_internal(self, flat: Int, micro_batches: int) -> Int:
        """Flat rows as rows of a `Problem`, where a rank's micro-batches are one slot if ranks wait once a step."""
        if self.objective.sync != "step":
            return flat
        slot = flat // self.rows
        rank, group = slot % self.dp_size, slot // self.dp_size
        return (rank * micro_batches + group) * self.rows + flat % self.rows

    def to_flat(self, row: Int, micro_batches: int) -> Int:
        """The inverse of `to_internal`."""
        if self.objective.sync != "step":
            return row
        slot = row // self.rows
        rank, group = slot // micro_batches, slot % micro_batches
        return (group * self.dp_size + rank) * self.rows + row % self.rows

    def loads(self, flat: Int, micro_batches: int) -> npt.NDArray[np.float64]:
        """Costs summed per micro-batch and rank, in the order of the samples (equal on every machine)."""
        slots, slot = micro_batches * self.dp_size, flat // self.rows
        if self.costs.ndim == 1:
            return _by_slot(slot, self.costs, slots).reshape(micro_batches, self.dp_size)
        stages = np.stack([_by_slot(slot, stage, slots) for stage in self.costs.T], axis=-1)
        return stages.reshape(micro_batches, self.dp_size, -1)

    def score(self, row: Int, problem: Problem) -> float:
        """The objective's score of a layout of `problem`, in integer cost units."""
        return self.objective.score(problem.loads(row))

    def in_cost_units(self, score: float) -> float:
        """An integer score in the unit of the costs (inf where it leaves float64); a balance has no unit."""
        if self.objective.kind == "balance":
            return score
        try:
            return math.ldexp(score, -self.shift)
        except OverflowError:
            return math.inf


def _by_slot(slot: Int, costs: npt.NDArray[np.float64], slots: int) -> npt.NDArray[np.float64]:
    return np.asarray(np.bincount(slot, costs, minlength=slots), dtype=np.float64)


def check_positive(name: str, value: object) -> None:
    """Refuse anything but a positive int."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a positive integer")
    if value <= 0:
        raise ValueError(f"{name} is {value}, expected a positive integer")


def token_column(tokens: npt.ArrayLike) -> Int:
    """Tokens as int64 ``[n]``, or an error that names the sample."""
    return _integers("tokens", tokens, None)


def feature_columns(
    features: Mapping[str, npt.ArrayLike] | None, constraints: PackingConstraints, size: int
) -> dict[str, npt.NDArray[np.float64]]:
    """The feature column of every budget, float64 ``[n]``."""
    given = {} if features is None else features
    for name in constraints.budgets or {}:
        if name not in given:
            raise ValueError(
                f"budgets has {name!r}, but the samples have no such feature (they have {sorted(given)}): the budget "
                "could not be kept. Return it from metadata_fn, or drop the budget"
            )
    return {
        name: _numbers(f"features[{name!r}]", given[name], size, stages=False)
        for name in constraints.budgets or {}
    }


def _integers(name: str, values: npt.ArrayLike, size: int | None) -> Int:
    array: npt.NDArray[Any] = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {array.dtype} of shape {array.shape}, expected integers of shape [n]")
    _check_size(name, array, size)
    if array.size and int(array.min()) < 0:
        sample = int(array.argmin())
        raise ValueError(f"{name}[{sample}] is {int(array[sample])}, expected an integer >= 0")
    return np.ascontiguousarray(array, dtype=np.int64)


def _numbers(name: str, values: npt.ArrayLike, size: int, *, stages: bool) -> npt.NDArray[np.float64]:
    array: npt.NDArray[Any] = np.asarray(values)
    shapes = "[n] or [n, stages]" if stages else "[n]"
    if array.ndim not in ((1, 2) if stages else (1,)) or array.dtype.kind not in "iuf":
        raise TypeError(f"{name} is {array.dtype} of shape {array.shape}, expected numbers of shape {shapes}")
    _check_size(name, array, size)
    if array.ndim == 2 and array.shape[1] == 0:
        raise ValueError(f"{name} has no stages (shape {array.shape}), expected at least one")
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        where = tuple(np.argwhere(bad)[0].tolist())
        place = ", ".join(map(str, where))
        raise ValueError(f"{name}[{place}] is {array[where].item()!r}, expected a finite number >= 0")
    return np.ascontiguousarray(array, dtype=np.float64)


def _check_size(name: str, array: npt.NDArray[Any], size: int | None) -> None:
    if size is not None and len(array) != size:
        raise ValueError(f"{name} has {len(array)} entries for {size} samples; they must be as many")
