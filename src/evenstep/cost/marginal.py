"""Costs for rows that are padded, where a sample takes the place of padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from evenstep.cost.model import CostModel, check_model, padding_cost, stages_of
from evenstep.samples import MetadataTable

__all__ = ["MarginalCost"]


@dataclass(frozen=True, slots=True)
class MarginalCost:
    """What a sample adds to a padded row: its own cost less that of the padding it replaces.

    A row that is padded to its capacity pays ``padding`` for every token that no sample takes, so the cost of
    a row is ``padding * seq_len`` plus the marginal costs of its samples. The first term is the same for
    every row, so balancing the second finds the same plans as balancing whole rows.

    Attributes:
        model: A model with a `padding_cost`.

    Raises:
        TypeError: ``model`` is no cost model.
        ValueError: Padding costs nothing under ``model``, so that nothing would be replaced.
    """

    model: CostModel
    _padding: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_model("model", self.model)
        padding = padding_cost(self.model)
        if not padding.any():
            raise ValueError(
                f"padding costs nothing under {self.model!r}, so the marginal cost of a sample is its cost; "
                "use the model itself, or tell it what a padding token costs"
            )
        object.__setattr__(self, "_padding", padding)

    @property
    def stages(self) -> tuple[str, ...]:
        """Those of ``model``."""
        return stages_of(self.model)

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """float64 shaped like the costs of ``model``; 0 where padding costs more than the sample."""
        costs = self.model.cost(table)
        padding = self._padding[0] if costs.ndim == 1 else self._padding
        return np.maximum(costs - np.multiply.outer(table.tokens, padding), 0.0)
