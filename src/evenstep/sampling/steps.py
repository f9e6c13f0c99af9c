"""Which samples make an optimizer step, as a pure function of the cursor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor
from evenstep.sampling.order import (
    Order,
    check_choice,
    check_count,
    check_seed,
    checked_indices,
    order_digest,
    resolve_order,
)

__all__ = ["Remainder", "Sampler", "Step", "StepSampler"]

Remainder = Literal["drop", "wrap", "pad"]


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


class StepSampler:
    """A fixed number of samples per optimizer step: row r of the step is its sample r.

    Membership of a step depends on nothing but seed, order, position and ``global_batch_size``.

    Args:
        num_samples: Samples of one epoch, at least 1; 10**12 is fine.
        global_batch_size: Samples of one optimizer step over all ranks.
        order: ``"shuffled"`` (a new keyed permutation per epoch), ``"sequential"`` or an `Order`.
        seed: Seed of the shuffled order, in [0, 2**64).
        remainder: What to do when an epoch is no multiple of the step. ``"drop"`` leaves the last samples
            of the order out, ``"wrap"`` fills the last step from the epoch's beginning, ``"pad"`` gives the
            last step empty rows (index -1), so that every sample appears exactly once.

    Raises:
        ValueError: A value is out of range, or ``"drop"`` would leave no step at all.

    Example:
        >>> from evenstep.sampling import StepSampler
        >>> sampler = StepSampler(10, global_batch_size=4, order="sequential", remainder="pad")
        >>> step = sampler.step_at(sampler.start().at_epoch(1))
        >>> step.indices.tolist(), step.next_cursor.consumed_samples
        ([0, 1, 2, 3], 4)
        >>> StepSampler(10, global_batch_size=7, order="sequential").step_at(step.next_cursor) is None
        True
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        order: str | Order = "shuffled",
        seed: int = 0,
        remainder: Remainder = "drop",
    ) -> None:
        check_count("num_samples", num_samples, "samples")
        check_count("global_batch_size", global_batch_size, "samples per optimizer step")
        check_seed(seed)
        check_choice("remainder", remainder, ("drop", "wrap", "pad"))
        if remainder == "drop" and global_batch_size > num_samples:
            raise ValueError(
                f"global_batch_size {global_batch_size} is larger than the dataset of {num_samples} samples: "
                "remainder='drop' would leave no step at all; make the step smaller, or use 'wrap' or 'pad'"
            )
        self.num_samples: int = int(num_samples)
        self.dataset_size: int = self.num_samples
        self.global_batch_size: int = int(global_batch_size)
        self.seed: int = int(seed)
        self.remainder = remainder
        self.order: str
        self.order, self._order = resolve_order(order, self.num_samples, self.seed)
        self._stream = order_digest(self._order)

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all ranks: ``global_batch_size``."""
        return self.global_batch_size

    def start(self) -> Cursor:
        """The beginning of epoch 0, with the identity of this stream."""
        return Cursor(
            global_batch_size=self.global_batch_size,
            dataset_size=self.dataset_size,
            order=self.order,
            seed=self.seed,
            stream=self._stream,
        )

    def step_at(self, cursor: Cursor) -> Step | None:
        """The step that begins at ``cursor.consumed_samples``, or None at the end of its epoch.

        Any position will do, also one that another global batch size led to. The step starts at its first
        micro-batch; fields of the cursor that describe the layout are passed on.
        """
        begin = cursor.consumed_samples
        left = self.num_samples - begin
        if left <= 0 or (left < self.global_batch_size and self.remainder == "drop"):
            return None
        positions = np.arange(begin, begin + self.global_batch_size, dtype=np.int64)
        if left < self.global_batch_size and self.remainder == "wrap":
            positions %= self.num_samples
        real = positions[:left] if self.remainder == "pad" else positions
        indices = np.full(self.global_batch_size, -1, dtype=np.int64)
        indices[: len(real)] = checked_indices(self._order, cursor.epoch, real)
        return Step(
            indices,
            np.arange(self.global_batch_size, dtype=np.int32),
            advance(cursor, self.start(), consumed=min(begin + self.global_batch_size, self.num_samples)),
        )

    def __len__(self) -> int:
        """Steps of a full epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and self.remainder != "drop")


def advance(cursor: Cursor, stream: Cursor, *, consumed: int) -> Cursor:
    """The position after a complete step of ``stream`` (a sampler's `start`) that began at ``cursor``."""
    return replace(
        cursor,
        consumed_samples=consumed,
        micro_batch=0,
        plan=0,
        step=cursor.step + 1,
        global_batch_size=stream.global_batch_size,
        dataset_size=stream.dataset_size,
        order=stream.order,
        seed=stream.seed,
        stream=stream.stream,
    )
