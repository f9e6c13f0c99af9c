"""What a plan is judged by: the time that ranks lose waiting for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The score of a plan; smaller is better.

    Attributes:
        sync: Where ranks wait for each other: after every ``"micro_batch"`` (FSDP, ZeRO-3, pipelines), so that the
            largest rank cost of each micro-batch counts, or once per ``"step"`` (DDP under ``no_sync``), so that
            only each rank's sum over the micro-batches counts.
        kind: ``"makespan"`` sums the largest rank costs; ``"balance"`` averages the squared coefficient of variation
            of rank costs. Stages count one by one, because each ends with a collective.

    Raises:
        ValueError: A field has an unknown value.
    """

    sync: Literal["micro_batch", "step"] = "micro_batch"
    kind: Literal["makespan", "balance"] = "makespan"

    def __post_init__(self) -> None:
        if self.sync not in ("micro_batch", "step"):
            raise ValueError(
                f"sync={self.sync!r} does not say where ranks wait; use 'micro_batch' (FSDP, ZeRO-3, pipelines) "
                "or 'step' (DDP with no_sync)"
            )
        if self.kind not in ("makespan", "balance"):
            raise ValueError(f"kind={self.kind!r} is no objective; use 'makespan' or 'balance'")

    def score(self, loads: npt.NDArray[Any]) -> float:
        """The score of rank costs ``loads``, ``[micro_batches, dp_size]`` or ``[micro_batches, dp_size, stages]``.

        Returns:
            The sum of makespans in the unit of the costs, or the mean squared coefficient of variation. Sums of
            integer loads are exact before they are rounded to float64, so equal loads give equal scores anywhere.
        """
        stacked = loads[:, :, None] if loads.ndim == 2 else loads
        if self.sync == "step":
            stacked = stacked.sum(axis=0, keepdims=True)
        if self.kind == "makespan":
            return float(stacked.max(axis=1, initial=0).sum())
        by_group = np.moveaxis(stacked, 1, 2).reshape(-1, stacked.shape[1])
        return sum(map(_squared_variation, by_group.tolist())) / max(len(by_group), 1)


def _squared_variation(loads: list[int] | list[float]) -> float:
    largest = max(loads)
    if largest == 0:
        return 0.0
    if isinstance(largest, float):  # squares of costs like 1e300 would overflow
        loads = [load / largest for load in loads]
    total = sum(loads)
    squares = sum(load * load for load in loads)
    # One division of exact integers rounds once, where a variance in floats would depend on its order.
    return max((len(loads) * squares - total * total) / (total * total), 0.0)
