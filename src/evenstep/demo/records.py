"""What was measured of an optimizer step: the facts that every table, picture and check is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LocalMicroBatch", "LocalStep", "StepRecord", "moved_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMicroBatch:
    """One micro-batch as one rank saw it.

    Attributes:
        loss_sum: Sum of the loss over its tokens.
        compute: Processor seconds of forward and backward; other programs on the machine do not count.
        elapsed: Wall seconds of the same; more than `compute` if the rank had to share its core.
        predicted: Seconds by the cost model.
        tokens: Real tokens.
        padding: Room of the rows that stayed empty, in tokens.
        samples: Dataset index of each sample and its tokens.
    """

    loss_sum: float
    compute: float
    elapsed: float
    predicted: float
    tokens: int
    padding: int
    samples: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """One optimizer step as one rank saw it.

    Attributes:
        step: Optimizer steps before this one.
        seconds: Wall time of the step, waiting included.
        loss_tokens: Tokens with a loss in the whole step, over all ranks.
        micro_batches: In the order of training.
    """

    step: int
    seconds: float
    loss_tokens: int
    micro_batches: list[LocalMicroBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step over all ranks; arrays are ``[micro_batches, ranks]``.

    Attributes:
        step: Optimizer steps before this one.
        seconds: Wall time of the slowest rank.
        loss: Mean loss of the step.
        compute: Processor seconds of forward and backward, float64.
        elapsed: Wall seconds of the same, float64.
        predicted: Seconds by the cost model, float64.
        tokens: Real tokens, int64.
        padding: Tokens of room that stayed empty, int64.
        samples: Dataset indices and their tokens of micro-batch m on rank r: ``samples[m][r]``.
    """

    step: int
    seconds: float
    loss: float
    compute: npt.NDArray[np.float64]
    elapsed: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    padding: npt.NDArray[np.int64]
    samples: list[list[dict[int, int]]]

    @classmethod
    def of(cls, ranks: Sequence[LocalStep]) -> StepRecord:
        """Put together what each rank saw, in rank order."""

        def table(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
            rows = [[getattr(micro_batch, name) for micro_batch in rank.micro_batches] for rank in ranks]
            return np.array(rows, dtype=dtype).T

        first = ranks[0]
        return cls(
            step=first.step,
            seconds=max(rank.seconds for rank in ranks),
            loss=float(table("loss_sum", np.float64).sum()) / first.loss_tokens,
            compute=table("compute", np.float64),
            elapsed=table("elapsed", np.float64),
            predicted=table("predicted", np.float64),
            tokens=table("tokens", np.int64),
            padding=table("padding", np.int64),
            samples=[
                [rank.micro_batches[m].samples for rank in ranks] for m in range(len(first.micro_batches))
            ],
        )

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return float(self.tokens.sum()) / self.seconds

    @property
    def padding_share(self) -> float:
        """Share of the rows that stayed empty."""
        return float(self.padding.sum()) / float(self.padding.sum() + self.tokens.sum())

    @property
    def makespan(self) -> float:
        """Predicted seconds of the slowest rank, summed over the micro-batches."""
        return float(self.predicted.max(axis=1).sum())

    @property
    def computed_makespan(self) -> float:
        """Processor seconds of the slowest rank, summed over the micro-batches."""
        return float(self.compute.max(axis=1).sum())

    @property
    def predicted_efficiency(self) -> float:
        """Sum of mean rank costs over sum of makespans, by the cost model; 1 is perfect."""
        return _efficiency(self.predicted)

    @property
    def measured_efficiency(self) -> float:
        """The same by the processor seconds that were measured."""
        return _efficiency(self.compute)


def _efficiency(loads: npt.NDArray[np.float64]) -> float:
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())


def moved_tokens(reference: StepRecord, balanced: StepRecord) -> int:
    """Tokens of the samples that balancing trained on another rank than the reference layout did."""
    home = _rank_of_samples(reference)
    return sum(
        length
        for micro_batch in balanced.samples
        for rank, samples in enumerate(micro_batch)
        for sample, length in samples.items()
        if home[sample] != rank
    )


def _rank_of_samples(record: StepRecord) -> dict[int, int]:
    return {
        sample: rank
        for micro_batch in record.samples
        for rank, samples in enumerate(micro_batch)
        for sample in samples
    }
