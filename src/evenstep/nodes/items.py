"""What travels between the nodes, from a window of samples to the rows of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.comm.columns import Columns
from evenstep.cursor import Cursor
from evenstep.samples import BatchInfo

__all__ = ["Counts", "GatheredWindow", "Place", "PlannedBatch", "RoutedBatch", "Window"]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many samples were not trained on as they are, each under a named option.

    Attributes:
        dropped: Left out because they have no tokens.
        skipped: Left out because they could not be read.
        truncated: Cut to the length of a row.
    """

    dropped: int = 0
    skipped: int = 0
    truncated: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.dropped + other.dropped, self.skipped + other.skipped, self.truncated + other.truncated
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a window stands in the stream.

    Attributes:
        start: Cursor at the beginning of its optimizer step.
        end: Cursor after that step.
        first: Its first micro-batch in the step.
        count: Its micro-batches; 0 if only the plan will tell.
        total: Micro-batches of the step; 0 if only the plan will tell.
        skip: Its micro-batches delivered before a resume.
        plan: Digest of the plan under which those were delivered; 0 if none were.
        source: Rank-local states of an external source (at ``start``, at ``end``); None if it has none.
    """

    start: Cursor
    end: Cursor
    first: int
    count: int
    total: int
    skip: int = 0
    plan: int = 0
    source: tuple[Any, Any] | None = None

    def begin(self) -> dict[str, Any]:
        """The state at the beginning of this window's optimizer step."""
        return self._state(self.start, 0)

    def end_state(self) -> dict[str, Any]:
        """The state after this window's optimizer step."""
        return self._state(self.end, 1)

    def after(self, delivered: int, digest: int) -> dict[str, Any]:
        """The state once ``delivered`` micro-batches of this window have been handed out."""
        done = self.first + delivered
        if done == self.total:
            return self.end_state()
        under_way = digest if delivered < self.count else 0
        return self._state(replace(self.start, micro_batch=done, plan=under_way), 0)

    def _state(self, cursor: Cursor, side: int) -> dict[str, Any]:
        state = cursor.to_dict()
        return state if self.source is None else {**state, "source": self.source[side]}


@dataclass(frozen=True, slots=True)
class Window:
    """What one reader knows of a window.

    Attributes:
        place: Where it stands.
        columns: Metadata of this reader's samples; of all samples where lengths are known ahead.
        indices: Dataset index of each of those samples, int64 ``[n]``; -1 for a stream.
        samples: Their payloads; empty where they are read after planning.
        counts: Of this reader; of all where lengths are known ahead.
        owners: Dp rank whose reader would have read each sample, int32 ``[n]``, where none has been read.
        parts: Where samples are documents of packed ones that nobody has read: the number of each in its packed sample, and
            how many that has, int64 ``[n, 2]``.
    """

    place: Place
    columns: Columns
    indices: npt.NDArray[np.int64]
    samples: list[Any] = field(repr=False)
    counts: Counts = Counts()
    owners: npt.NDArray[np.int32] | None = None
    parts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class GatheredWindow:
    """A window as every rank of its balance group knows it.

    Attributes:
        place: Where it stands.
        columns: Metadata of all samples of the group, in window order.
        holders: Group position that holds each sample, int32 ``[n]``; None where nobody has read it yet.
        indices: Dataset index of each sample, int64 ``[n]``; None where only its holder knows.
        local: This rank's payloads by position in ``columns``.
        step_loss_tokens: Loss tokens of the whole optimizer step on all ranks; None if unknown.
        counts: Of the balance group.
        owners, parts: As of the `Window`.
    """

    place: Place
    columns: Columns
    holders: npt.NDArray[np.int32] | None
    indices: npt.NDArray[np.int64] | None
    local: dict[int, Any] = field(repr=False)
    step_loss_tokens: int | None
    counts: Counts = Counts()
    owners: npt.NDArray[np.int32] | None = None
    parts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One micro-batch of a planned window, on all ranks of the balance group.

    Attributes:
        window: The window, its number of micro-batches resolved.
        assignment: Flat row of every sample of the window, int32 ``[n]``.
        micro_batch: Position inside the window.
        digest: Digest of the plan.
    """

    window: GatheredWindow
    assignment: npt.NDArray[np.int32]
    micro_batch: int
    digest: int


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """The payloads of this rank's rows of one micro-batch.

    Attributes:
        rows: Samples of each row, in window order; empty lists where a row has none.
        seq_len: Capacity of a row.
        info: What the training loop is told.
    """

    rows: list[list[Any]] = field(repr=False)
    seq_len: int
    info: BatchInfo
