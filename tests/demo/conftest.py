from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from evenstep.demo.records import StepRecord

MakeRecord = Callable[..., StepRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    """A step of given computing seconds ``[micro_batches][ranks]`` and samples."""

    def make(
        compute: npt.ArrayLike,
        *,
        step: int = 0,
        seconds: float | None = None,
        loss: float = 1.0,
        predicted: npt.ArrayLike | None = None,
        tokens: int = 75,
        padding: int = 25,
        share: float = 1.0,
        samples: Sequence[Sequence[dict[int, int]]] = (),
    ) -> StepRecord:
        table = np.asarray(compute, dtype=np.float64)
        return StepRecord(
            step=step,
            seconds=float(table.max(axis=1).sum()) if seconds is None else seconds,
            loss=loss,
            compute=table,
            elapsed=table / share,
            predicted=table if predicted is None else np.asarray(predicted, dtype=np.float64),
            tokens=np.full(table.shape, tokens),
            padding=np.full(table.shape, padding),
            samples=[list(micro_batch) for micro_batch in samples],
        )

    return make
