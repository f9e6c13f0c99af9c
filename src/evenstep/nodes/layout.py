"""How a step's rows fall on micro-batches, ranks and windows: arithmetic that readers share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.config import LoaderConfig
from evenstep.cursor import Cursor
from evenstep.nodes.items import Place
from evenstep.sampling import Step
from evenstep.topology import Topology

__all__ = ["Layout"]

# More samples than any rank-local row or step has.
_IN_ROW = 1 << 21
_IN_STEP = 1 << 28


@dataclass(frozen=True, slots=True)
class Layout:
    """The numbers of a step, resolved for a sampler, a mesh and a configuration.

    Attributes:
        rows_per_step: Rows of one optimizer step on all ranks; samples, if ``accumulation_steps`` is 0.
        micro_batch_size: Rows of one rank's micro-batch.
        accumulation_steps: Micro-batches per rank and step; 0 is "auto".
        window: Micro-batches planned together; 0 is "auto".
        dp_size: Data-parallel ranks.
    """

    rows_per_step: int
    micro_batch_size: int
    accumulation_steps: int
    window: int
    dp_size: int

    @classmethod
    def resolve(cls, rows_per_step: int, config: LoaderConfig, dp_size: int) -> Layout:
        """Derive what was left open.

        Raises:
            ValueError: The rows of a step do not divide into micro-batches of all ranks.
        """
        size = config.micro_batch_size
        if config.accumulation_steps == "auto":
            if rows_per_step < dp_size:
                raise ValueError(
                    f"the sampler makes steps of {rows_per_step} samples for {dp_size} data-parallel ranks: some "
                    "would train on nothing. Use a larger global_batch_size or fewer ranks."
                )
            return cls(rows_per_step, size, 0, 0, dp_size)
        steps, rest = divmod(rows_per_step, size * dp_size)
        if rest or not steps:
            raise ValueError(
                f"the sampler makes steps of {rows_per_step} rows, which micro_batch_size={size} x {dp_size} "
                f"data-parallel ranks = {size * dp_size} does not divide: ranks would take different numbers of "
                f"micro-batches. Choose a global batch that is a multiple of {size * dp_size}."
            )
        if config.accumulation_steps not in (None, steps):
            raise ValueError(
                f"accumulation_steps={config.accumulation_steps}, but {rows_per_step} rows a step are {steps} "
                f"micro-batches of {size} rows on {dp_size} ranks. Leave it at None to derive it."
            )
        return cls(rows_per_step, size, steps, min(config.balance_window or steps, steps), dp_size)

    def stamp(self, cursor: Cursor) -> Cursor:
        """``cursor`` taken in this layout."""
        return replace(
            cursor,
            global_batch_size=self.rows_per_step,
            micro_batch_size=self.micro_batch_size,
            accumulation_steps=self.accumulation_steps,
            window=self.window,
            dp_size=self.dp_size,
        )

    def same(self, cursor: Cursor) -> bool:
        """Whether ``cursor`` was taken in this layout."""
        return self.stamp(cursor) == cursor

    def position(self, cursor: Cursor, resume: str) -> Cursor:
        """Where reading goes on from a loaded ``cursor``: at its micro-batch, or again at its step's beginning."""
        if cursor.micro_batch == 0:
            return cursor
        again = replace(cursor, micro_batch=0, plan=0)
        if resume == "step":
            return again
        if not self.same(cursor):
            warnings.warn(
                f"the state stands after micro-batch {cursor.micro_batch} of step {cursor.step}, but was taken in "
                "another layout (global batch, micro-batch size, accumulation, window or dp size); resume="
                "'micro_batch' cannot continue inside this step, which starts again",
                stacklevel=2,
            )
            return again
        if self.accumulation_steps and cursor.micro_batch >= self.accumulation_steps:
            raise ValueError(
                f"cursor['micro_batch'] is {cursor.micro_batch}, but a step of this layout has "
                f"{self.accumulation_steps} micro-batches: nothing of the step would be left. The state is damaged."
            )
        return cursor

    def places(self, cursor: Cursor, end: Cursor, source: tuple[Any, Any] | None = None) -> Iterator[Place]:
        """The windows of the step at ``cursor``, from the one that holds its next micro-batch."""
        start = replace(self.stamp(cursor), micro_batch=0, plan=0)
        end = self.stamp(end)
        if not self.accumulation_steps:
            yield Place(start, end, 0, 0, 0, cursor.micro_batch, cursor.plan, source)
            return
        begin = cursor.micro_batch // self.window * self.window
        for first in range(begin, self.accumulation_steps, self.window):
            count = min(self.window, self.accumulation_steps - first)
            skip, digest = (cursor.micro_batch - first, cursor.plan) if first == begin else (0, 0)
            yield Place(start, end, first, count, self.accumulation_steps, skip, digest, source)

    def select(
        self, step: Step, place: Place, topology: Topology
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The samples of a window that this rank's balance group balances, in the order that all ranks share.

        Returns:
            Dataset indices int64 ``[n]``, reference rows int32 ``[n]`` numbered over the window and group, and the
            dp rank (int32 ``[n]``) in whose block each sample begins. Under "auto" the rows are unknown (0).
        """
        real = step.indices >= 0
        indices, rows = step.indices[real], step.rows[real]
        start, size = topology.group_start, topology.balance_group_size
        if not self.accumulation_steps:
            owner = np.repeat(
                np.arange(self.dp_size, dtype=np.int32),
                [len(block) for block in np.array_split(np.arange(len(indices)), self.dp_size)],
            )
            mine = (owner >= start) & (owner < start + size)
            return indices[mine], np.zeros(int(mine.sum()), dtype=np.int32), owner[mine]
        micro, dp, row = self._split(rows)
        mine = (micro >= place.first) & (micro < place.first + place.count)
        mine &= (dp >= start) & (dp < start + size)
        flat = ((micro - place.first) * size + (dp - start)) * self.micro_batch_size + row
        by_row = np.flatnonzero(mine)
        by_row = by_row[np.argsort(flat[by_row], kind="stable")]
        return indices[by_row], flat[by_row].astype(np.int32), dp[by_row].astype(np.int32)

    def select_local(
        self, counts: npt.NDArray[np.int64], place: Place, topology: Topology
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The samples of a window out of a rank-local step of ``counts`` (int64 ``[rows]``) samples a row.

        Returns:
            Which of the step's samples they are, int64 ``[n]``; the reference row of each, int32 ``[n]``, numbered
            over the window and group (under "auto" unknown: 0); and keys, int64 ``[n]``, that bring the samples of all
            ranks into one order, though nobody knows how many the others have.
        """
        number = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        if not place.total:
            mine = np.arange(len(number), dtype=np.int64)
            return mine, np.zeros(len(mine), dtype=np.int32), topology.dp_rank * _IN_STEP + mine
        micro, row = np.divmod(number, self.micro_batch_size)
        mine = np.flatnonzero((micro >= place.first) & (micro < place.first + place.count))
        dp, size = topology.dp_rank - topology.group_start, topology.balance_group_size
        flat = ((micro - place.first) * size + dp) * self.micro_batch_size + row
        within = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
        return mine, flat[mine].astype(np.int32), (flat * _IN_ROW + within)[mine]

    def _split(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], ...]:
        wide = rows.astype(np.int64)
        blocks, row = np.divmod(wide, self.micro_batch_size)
        micro, dp = np.divmod(blocks, self.dp_size)
        return micro, dp, row
