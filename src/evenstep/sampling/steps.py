"""Which samples make an optimizer step, as a pure function of the cursor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor

__all__ = ["Sampler", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """The samples of one optimizer step.

    Attributes:
        indices: Dataset indices, int64 ``[n]``; -1 is padding.
        rows: Reference row of each sample, int32 ``[n]``, numbered over the whole step.
        next_cursor: The position after this step.
    """

    indices: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    next_cursor: Cursor


@runtime_checkable
class Sampler(Protocol):
    """Which samples make a step: a pure function of the cursor, equal on every rank."""

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all ranks (samples, where a step is a number of samples)."""

    def start(self) -> Cursor:
        """The beginning of epoch 0, with the identity of this stream (dataset size, order, seed, digest)."""

    def step_at(self, cursor: Cursor) -> Step | None:
        """The step that begins at ``cursor``, or None at the end of its epoch."""

    def __len__(self) -> int:
        """Steps of a full epoch."""
