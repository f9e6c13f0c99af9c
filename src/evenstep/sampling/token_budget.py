"""Steps of a fixed number of well-filled rows, where the lengths of all samples are known ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor
from evenstep.sampling.first_fit import (
    RowLimits,
    fill_empty_rows,
    first_fit_decreasing,
    longest_run,
    most_that_could_fit,
)
from evenstep.sampling.hashing import stream_digest
from evenstep.sampling.order import (
    Order,
    check_choice,
    check_count,
    check_seed,
    checked_indices,
    order_digest,
    resolve_order,
)
from evenstep.sampling.row_needs import RowNeeds
from evenstep.sampling.steps import Step, advance

__all__ = ["TokenBudgetSampler"]

_I64 = npt.NDArray[np.int64]
_REMEMBERED = 16  # steps: look-ahead and its consumer ask for the same ones


class TokenBudgetSampler:
    """The longest run of consecutive samples that first-fit-decreasing packs into the rows of a step.

    That packing is the reference layout. How "longest" is found, step by step, is said at
    `evenstep.sampling.first_fit.longest_run`; the samples of a step depend on nothing but seed, order,
    position, what the samples take of a row, and the arguments here. No row stays empty
    while the step has as many samples as rows. Samples of length 0 belong to a step and take no room.

    Args:
        lengths: Tokens of each sample, integers ``[n]``, each >= 0; kept, not copied, if it is an array.
        rows_per_step: Rows of one optimizer step over all ranks.
        seq_len: Tokens of a row.
        order: ``"shuffled"``, ``"sequential"`` or an `Order`.
        seed: Seed of the shuffled order, in [0, 2**64).
        remainder: ``"drop"`` leaves out an epoch's last step unless it needs every row (or reaches
            ``fill``); ``"pad"`` keeps it and gives each of its empty rows one index -1.
        fill: End a step as soon as its tokens are this fraction of ``rows_per_step * seq_len``; in (0, 1].
            None: as full as it gets.
        oversized: A sample longer than ``seq_len`` is an error, sits ``"single"`` in its own row, or is cut
            by the packer (``"truncate"``) and takes a whole row.
        max_segments: Samples of a row at most.
        budgets: Largest sum of a named feature in a row, as in `LoaderConfig`.
        features: One column of numbers ``[n]`` for each budget.

    Raises:
        Infeasible: A sample is above ``seq_len`` or a budget, and ``oversized`` does not allow it.
        ValueError: A value is out of range, or ``"drop"`` would leave no step at all.

    Example:
        >>> from evenstep.sampling import TokenBudgetSampler
        >>> sampler = TokenBudgetSampler([3, 6, 2, 5, 4, 9], rows_per_step=2, seq_len=10, order="sequential")
        >>> step = sampler.step_at(sampler.start())
        >>> step.indices.tolist(), step.rows.tolist()
        ([0, 1, 2, 3, 4], [1, 0, 1, 1, 0])
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        rows_per_step: int,
        seq_len: int,
        order: str | Order = "shuffled",
        seed: int = 0,
        remainder: Literal["drop", "pad"] = "drop",
        fill: float | None = None,
        oversized: Literal["error", "single", "truncate"] = "error",
        max_segments: int | None = None,
        budgets: Mapping[str, float] | None = None,
        features: Mapping[str, npt.ArrayLike] | None = None,
    ) -> None:
        check_count("rows_per_step", rows_per_step, "rows per optimizer step")
        check_count("seq_len", seq_len, "tokens per row")
        if max_segments is not None:
            check_count("max_segments", max_segments, "samples per row")
        check_seed(seed)
        check_choice("remainder", remainder, ("drop", "pad"))
        check_choice("oversized", oversized, ("error", "single", "truncate"))
        if fill is not None and not 0 < fill <= 1:
            raise ValueError(f"fill is {fill!r}: expected a fraction of the step's tokens in (0, 1], or None")
        self._needs = RowNeeds(lengths, int(seq_len), oversized, features or {}, budgets or {})
        self.lengths: npt.NDArray[np.integer[Any]] = self._needs.lengths
        self.num_samples: int = len(self.lengths)
        with_tokens = int(np.count_nonzero(self.lengths))
        if (remainder == "drop" and with_tokens < rows_per_step) or not with_tokens:
            raise ValueError(
                f"{with_tokens} samples with tokens cannot fill {rows_per_step} rows: remainder={remainder!r} "
                "would leave no step at all; make the step smaller, or use 'pad'"
            )
        self.global_batch_size: int = int(rows_per_step)
        self.seq_len: int = int(seq_len)
        self.seed: int = int(seed)
        self.remainder = remainder
        self.fill = fill
        self.oversized = oversized
        self.limits: RowLimits = RowLimits(
            self.global_batch_size,
            self.seq_len,
            None if max_segments is None else int(max_segments),
            self._needs.budgets,
        )
        if remainder == "drop":
            self._check_a_step_is_full(with_tokens)
        self.order: str
        self.order, self._order = resolve_order(order, self.num_samples, self.seed)
        self._start = Cursor(
            global_batch_size=self.global_batch_size,
            dataset_size=self.num_samples,
            order=self.order,
            seed=self.seed,
            stream=stream_digest("token budget", self.lengths, order_digest(self._order)),
        )
        mean = float(min(self.lengths.mean(), seq_len))
        self._guess = int(1.1 * rows_per_step * seq_len / mean) + 16
        self._steps: dict[tuple[int, int], Step | None] = {}
        self._len: dict[int, int] = {}

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all ranks."""
        return self.global_batch_size

    def start(self) -> Cursor:
        """The beginning of epoch 0, with the identity of this stream."""
        return self._start

    def step_at(self, cursor: Cursor) -> Step | None:
        """The step that begins at ``cursor.consumed_samples``, or None at the end of its epoch."""
        begin, steps = cursor.consumed_samples, self._steps
        if (cursor.epoch, begin) not in steps:
            # A new dictionary, never a cleared one: another thread may be reading the old one.
            steps = dict(list(steps.items())[1 - _REMEMBERED :])
            steps[cursor.epoch, begin] = self._pack(cursor.epoch, begin)
            self._steps = steps
        step = steps[cursor.epoch, begin]
        if step is None:
            return None
        consumed = step.next_cursor.consumed_samples
        return replace(step, next_cursor=advance(cursor, self._start, consumed=consumed))

    def steps_in(self, epoch: int) -> int:
        """Steps of ``epoch``; packs the whole epoch once (some milliseconds per step) and remembers it."""
        if epoch not in self._len:
            count, begin = 0, 0
            while (step := self._pack(epoch, begin)) is not None:
                count, begin = count + 1, step.next_cursor.consumed_samples
            self._len[epoch] = count
        return self._len[epoch]

    def __len__(self) -> int:
        """Steps of epoch 0; shuffled epochs may differ by a few (`steps_in`). Packs the epoch once."""
        return self.steps_in(0)

    def _check_a_step_is_full(self, with_tokens: int) -> None:
        """Refuse lengths that one row less would hold: the only step of every epoch would be dropped."""
        rows, seq_len = self.rows_per_step, self.seq_len
        if with_tokens > (rows - 1) * seq_len:  # before anything of the size of the dataset is made
            return
        tokens, features = self._needs.at(np.flatnonzero(self.lengths))
        total = int(tokens.sum())
        if total > (rows - 1) * seq_len or (self.fill is not None and total >= self.fill * rows * seq_len):
            return
        packed = first_fit_decreasing(tokens, replace(self.limits, rows=rows - 1), features)
        if packed is not None:
            raise ValueError(
                f"{with_tokens} samples with {total} tokens fit into {int(packed.max()) + 1} of the {rows} rows of "
                f"{seq_len} tokens that a step has: remainder='drop' would leave no step at all; make the step "
                "smaller (rows_per_step or seq_len), or use 'pad'"
            )

    def _pack(self, epoch: int, begin: int) -> Step | None:
        rows = self.rows_per_step
        indices, lengths, features = self._read(epoch, begin)
        real = np.flatnonzero(lengths)
        if not len(real):
            return None
        sizes = lengths[real]
        filled = False
        if self.fill is not None:
            enough = int(np.searchsorted(np.cumsum(sizes), self.fill * rows * self.seq_len)) + 1
            enough = max(enough, rows)
            filled = enough <= len(sizes)
            sizes = sizes[:enough]
        run, packed = longest_run(sizes, self.limits, None if features is None else features[:, real])
        filled = filled and run == len(sizes)
        # Samples without tokens go with the step before them.
        end = int(real[run]) if run < len(real) else len(lengths)
        if run == len(real) and self.remainder == "drop" and not filled and int(packed.max()) + 1 < rows:
            return None
        packed = fill_empty_rows(packed, sizes[:run], rows)
        step_rows = np.full(end, rows - 1, dtype=np.int32)
        step_rows[real[:run]] = packed
        empty = np.flatnonzero(np.bincount(packed, minlength=rows) == 0).astype(np.int32)
        return Step(
            np.concatenate([indices[:end], np.full(len(empty), -1, dtype=np.int64)]),
            np.concatenate([step_rows, empty]),
            replace(self._start, epoch=epoch, consumed_samples=begin + end),
        )

    def _read(self, epoch: int, begin: int) -> tuple[_I64, _I64, _I64 | None]:
        """Indices, tokens and features of more samples than a step can hold, or of the rest of the epoch."""
        count = self._guess
        while True:
            end = min(begin + count, self.num_samples)
            positions = np.arange(begin, max(begin, end), dtype=np.int64)
            indices = checked_indices(self._order, epoch, positions)
            if len(indices) and indices.max() >= self.num_samples:
                raise ValueError(
                    f"the order gave index {int(indices.max())} in epoch {epoch}, but lengths has "
                    f"{self.num_samples} entries: every index needs a length"
                )
            lengths, features = self._needs.at(indices)
            real = lengths > 0
            bound = most_that_could_fit(
                lengths[real], self.limits, None if features is None else features[:, real]
            )
            if end >= self.num_samples or bound < np.count_nonzero(real):
                return indices, lengths, features
            count *= 2
