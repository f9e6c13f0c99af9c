"""What an ordinary packed distributed sampler does: the layout that the demo compares with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor
from evenstep.errors import Infeasible
from evenstep.sampling import Step
from evenstep.sampling.hashing import stream_digest
from evenstep.sampling.order import ShuffledOrder
from evenstep.sampling.steps import advance

__all__ = ["GreedySampler"]


class GreedySampler:
    """Shuffled documents fill row after row; one that does not fit opens the next row (next-fit).

    Consecutive rows go to the ranks in turn. Like every sampler it is a pure function of the cursor: a step
    is the samples from ``consumed_samples`` on that fill ``rows_per_step`` rows, on any number of ranks.

    Args:
        lengths: Tokens of each sample, integers ``[n]``, each in ``[0, seq_len]``; empty samples take no room.
        rows_per_step: Rows of one optimizer step over all ranks.
        seq_len: Tokens of a row.
        seed: Seed of the shuffled order; every epoch has its own permutation.

    Raises:
        Infeasible: A sample is longer than ``seq_len``.
    """

    def __init__(self, lengths: npt.ArrayLike, *, rows_per_step: int, seq_len: int, seed: int = 0) -> None:
        self.lengths: npt.NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        if self.lengths.max(initial=0) > seq_len:
            at = int(self.lengths.argmax())
            raise Infeasible(
                f"sample {at} has {int(self.lengths[at])} tokens, a row holds seq_len={seq_len}: it fits nowhere; "
                "split it first"
            )
        self.rows_per_step = rows_per_step
        self.seq_len = seq_len
        self.seed = seed
        self._start = Cursor(
            global_batch_size=rows_per_step,
            dataset_size=len(self.lengths),
            order="shuffled",
            seed=seed,
            stream=stream_digest(("greedy rows", seq_len, self.lengths)),
        )
        self._shuffled = ShuffledOrder(len(self.lengths), seed)
        self._epoch: tuple[int, npt.NDArray[np.int64]] | None = None

    def start(self) -> Cursor:
        """The beginning of epoch 0, with the identity of this stream."""
        return self._start

    def step_at(self, cursor: Cursor) -> Step | None:
        """The step that begins at ``cursor``; None once the rest of the epoch does not fill every row."""
        begin = cursor.consumed_samples
        order = self._order(cursor.epoch)
        ends = np.cumsum(self.lengths[order[begin:]])
        bounds = [0]  # samples before each row
        while len(bounds) <= self.rows_per_step and bounds[-1] < len(ends):
            before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
            bounds.append(int(np.searchsorted(ends, before + self.seq_len, side="right")))
        if len(bounds) <= self.rows_per_step:
            return None
        rows = np.repeat(np.arange(self.rows_per_step, dtype=np.int32), np.diff(bounds))
        consumed = begin + bounds[-1]
        following = advance(cursor, self._start, consumed=consumed)
        return Step(order[begin:consumed], rows, following)

    def __len__(self) -> int:
        """Steps of epoch 0; other epochs may differ by a few."""
        count, cursor = 0, self._start
        while (step := self.step_at(cursor)) is not None:
            count, cursor = count + 1, step.next_cursor
        return count

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._epoch is None or self._epoch[0] != epoch:
            positions = np.arange(len(self.lengths), dtype=np.int64)
            self._epoch = (epoch, self._shuffled.index_at(epoch, positions))
        return self._epoch[1]
