"""What makes local steps, of whatever kind, as rows of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor
from evenstep.nodes.fetch import Fetcher
from evenstep.nodes.sample_seed import SeedKey
from evenstep.nodes.stage import call
from evenstep.nodes.streams import open_stream, pass_epoch_on
from evenstep.sampling import LocalStepSource

__all__ = ["LocalRows", "LocalStream", "PaddingRow", "is_local_step", "local_stream"]


class PaddingRow(list[Any]):
    """A row that is meant to be without samples, where a stream ends in the middle of a step."""


@dataclass(frozen=True, slots=True)
class LocalRows:
    """One rank's rows of an optimizer step.

    Attributes:
        rows: The samples (or `Unreadable`) of each row.
        indices: Dataset index of every sample, row after row, int64 ``[n]``; None for a stream.
        next_cursor: The position after the step; None where it follows from the number of rows.
    """

    rows: list[list[Any]]
    indices: npt.NDArray[np.int64] | None = None
    next_cursor: Cursor | None = None


class LocalStream(Protocol):
    """A source of local steps with a position of its own."""

    def begin(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``."""

    def load(self, epoch: int, state: Any) -> None:
        """Go to where `state` was taken."""

    def state(self) -> Any:
        """A copy of the position."""

    def next(self, cursor: Cursor) -> LocalRows:
        """The step at ``cursor``, or StopIteration at the end of the epoch."""


def local_stream(source: Any, fetcher: Fetcher | None, micro_batch_size: int) -> LocalStream:
    """What drives ``source``.

    Raises:
        TypeError: It is nothing that makes steps.
    """
    if isinstance(source, LocalStepSource):
        assert fetcher is not None
        return _IndexedSteps(source, fetcher, micro_batch_size)
    return _Steps(source)


def is_local_step(value: Any) -> bool:
    """Whether ``value`` can be one rank's rows of a step: a list of them, or another sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, Mapping))


class _Steps:
    """A stream whose items are steps."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._stream = open_stream(source, "local steps [[sample, ...], ...]")

    def begin(self, epoch: int) -> None:
        self._stream.begin(epoch)

    def load(self, epoch: int, state: Any) -> None:
        pass_epoch_on(self._source, epoch)
        self._stream.load(state)

    def state(self) -> Any:
        return self._stream.state()

    def next(self, cursor: Cursor) -> LocalRows:  # noqa: ARG002 - it has a position of its own
        step = self._stream.next()
        if not is_local_step(step):
            raise TypeError(
                f"the external source gave a {type(step).__name__}, expected a local step: a list of rows, each a list "
                "of samples. evenstep.nodes.StepBuilder makes steps of a stream of samples."
            )
        return LocalRows([_row(row) for row in step])


def _row(row: Any) -> list[Any]:
    if isinstance(row, PaddingRow):
        return row
    return list(row) if isinstance(row, (list, tuple)) else [row]


class _IndexedSteps:
    """A rank-local batch sampler over a dataset."""

    def __init__(self, source: LocalStepSource, fetcher: Fetcher, micro_batch_size: int) -> None:
        self._source = source
        self._fetcher = fetcher
        self._size = micro_batch_size

    def begin(self, epoch: int) -> None:
        """The source goes to the epoch of the cursor by itself."""

    def load(self, epoch: int, state: Any) -> None:  # noqa: ARG002 - it is part of the state
        self._source.load_state(state)

    def state(self) -> Any:
        # Whether it has met its end says nothing of where it stands, and a restored one finds out again.
        state = dict(self._source.state())
        return {**state, "ended": False} if "ended" in state else state

    def next(self, cursor: Cursor) -> LocalRows:
        step = call("the batch sampler", self._source.local_step, cursor)
        if step is None:
            raise StopIteration
        indices = np.concatenate(step.micro_batches)
        values = call("reading", self._read, indices, SeedKey(cursor.seed, cursor.epoch))
        rows: list[list[Any]] = []
        for batch in step.micro_batches:
            mine, values = values[: len(batch)], values[len(batch) :]
            rows += self._split(mine)
        return LocalRows(rows, indices, step.next_cursor)

    def _read(self, indices: npt.NDArray[np.int64], key: SeedKey) -> list[Any]:
        return self._fetcher.submit(indices.tolist(), key).take(len(indices))

    def _split(self, micro_batch: list[Any]) -> list[list[Any]]:
        if self._size == 1:
            return [micro_batch]
        if len(micro_batch) != self._size:
            raise ValueError(
                f"the batch sampler gave a micro-batch of {len(micro_batch)} samples for micro_batch_size="
                f"{self._size} rows: with more than one row each holds one sample. Use micro_batch_size=1 to put "
                "several samples into a row."
            )
        return [[sample] for sample in micro_batch]
