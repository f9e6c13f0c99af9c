"""Batch samplers that know only their own rank's micro-batches, as in Megatron-style trainers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor
from evenstep.errors import StateMismatch
from evenstep.sampling.order import check_count

__all__ = ["LocalStep", "LocalStepSource", "RankLocalBatchSampler"]


@dataclass(frozen=True, slots=True)
class LocalStep:
    """One data-parallel rank's part of an optimizer step.

    Attributes:
        micro_batches: Dataset indices of each micro-batch, int64 ``[n_i]``.
        next_cursor: The position after this step, equal on every rank.
    """

    micro_batches: list[npt.NDArray[np.int64]]
    next_cursor: Cursor


@runtime_checkable
class LocalStepSource(Protocol):
    """What a reader needs of indices that only this rank knows.

    Unlike a `Sampler` it has a position of its own, so steps must be asked for in order. Its state rides
    beside the cursor, keyed by data-parallel rank; it cannot go to another number of ranks. To be able to
    begin a step again, take `state` before `local_step`.
    """

    def start(self) -> Cursor:
        """The beginning of epoch 0."""

    def local_step(self, cursor: Cursor) -> LocalStep | None:
        """This rank's part of the step that begins at ``cursor``; None at the end of the epoch.

        Raises:
            StateMismatch: ``cursor`` is not where this source stands.
        """

    def state(self) -> Mapping[str, Any]:
        """A copy of this rank's position: plain values and whatever the batch sampler keeps."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned."""


class RankLocalBatchSampler:
    """A rank-local batch sampler (one micro-batch of indices per iteration) as a `LocalStepSource`.

    ``set_epoch`` is called with the number of each epoch if the batch sampler has it; without it, a new
    epoch is one more ``iter()``, as in a DataLoader. ``state_dict`` and ``load_state_dict`` carry its
    position if it has both; they must count a micro-batch when it is yielded, not when the next one is asked
    for; the next epoch begins once this one is exhausted, so one that is left in its middle is iterated to its end (or,
    without ``len``, begun again). Without them a resume iterates the epoch again up to the saved micro-batch. Micro-batches that make
    no complete step at the end of an epoch are left out.

    Args:
        batch_sampler: Yields one micro-batch of dataset indices per iteration, for this rank alone.
        accumulation_steps: Micro-batches per rank and optimizer step.
        global_batch_size: Samples of one optimizer step over all ranks, by which the cursor advances; equal
            on every rank.

    Example:
        >>> from evenstep.sampling import RankLocalBatchSampler
        >>> batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> source = RankLocalBatchSampler(batches, accumulation_steps=2, global_batch_size=8)
        >>> step = source.local_step(source.start())
        >>> [batch.tolist() for batch in step.micro_batches], step.next_cursor.consumed_samples
        ([[0, 1], [2, 3]], 8)
    """

    def __init__(
        self,
        batch_sampler: Iterable[Sequence[int]],
        *,
        accumulation_steps: int,
        global_batch_size: int,
    ) -> None:
        check_count("accumulation_steps", accumulation_steps, "micro-batches per rank and step")
        check_count("global_batch_size", global_batch_size, "samples per optimizer step")
        self.batch_sampler: Any = batch_sampler
        self.accumulation_steps: int = int(accumulation_steps)
        self.global_batch_size: int = int(global_batch_size)
        self._stateful = callable(getattr(batch_sampler, "state_dict", None)) and callable(
            getattr(batch_sampler, "load_state_dict", None)
        )
        self._epoch = 0
        self._micro_batches = 0  # of this epoch, handed out
        self._consumed = 0  # as the cursor counts
        self._ended = False
        self._batches: Iterator[Sequence[int]] | None = None  # None: not begun
        self._epoch_start: Any = None  # the batch sampler's own state there
        self._loaded: Any = None  # its state until it is iterated: many only then go there, and say so

    def start(self) -> Cursor:
        """The beginning of epoch 0."""
        return Cursor(global_batch_size=self.global_batch_size, order="rank-local")

    def local_step(self, cursor: Cursor) -> LocalStep | None:
        """This rank's part of the step that begins at ``cursor``; None at the end of the epoch."""
        if (cursor.epoch, cursor.consumed_samples) != (self._epoch, self._consumed):
            restarts = cursor.epoch == self._epoch and self._stateful
            if cursor.consumed_samples or (restarts and self._epoch_start is None):
                raise StateMismatch(
                    f"the cursor is at sample {cursor.consumed_samples} of epoch {cursor.epoch}, this rank's "
                    f"{type(self.batch_sampler).__name__} at {self._consumed} of epoch {self._epoch}: a rank-local "
                    "sampler has one position, load the state that was saved beside the cursor"
                )
            begun = self._epoch_start if restarts or self._leave() else None
            self._go_to(cursor.epoch, begun)
        if self._ended:
            return None
        if self._batches is None:
            self._batches = self._open()
        step = [self._indices(batch) for batch in islice(self._batches, self.accumulation_steps)]
        if len(step) < self.accumulation_steps:
            self._ended = True
            return None
        self._micro_batches += len(step)
        self._consumed += self.global_batch_size
        return LocalStep(
            step,
            replace(
                cursor,
                consumed_samples=self._consumed,
                micro_batch=0,
                plan=0,
                step=cursor.step + 1,
                global_batch_size=self.global_batch_size,
                order="rank-local",
            ),
        )

    def state(self) -> dict[str, Any]:
        """A copy of this rank's position, for `load_state` on the same rank of as many ranks."""
        return {
            "epoch": self._epoch,
            "micro_batches": self._micro_batches,
            "consumed_samples": self._consumed,
            "ended": self._ended,
            "batch_sampler": self._own_state() if self._stateful else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned.

        Raises:
            ValueError: A key is missing, or its value is of another kind.
            StateMismatch: Only one of the saved and the present batch sampler has a state of its own.
        """
        counts = ("epoch", "micro_batches", "consumed_samples")
        missing = [key for key in (*counts, "ended", "batch_sampler") if key not in state]
        if missing:
            raise ValueError(f"this is not the state of a RankLocalBatchSampler: missing keys {missing}")
        for key in counts:
            if type(state[key]) is not int or state[key] < 0:
                raise ValueError(f"state[{key!r}] is {state[key]!r}: expected an integer >= 0")
        if type(state["ended"]) is not bool:
            raise ValueError(f"state['ended'] is {state['ended']!r}: expected a bool")
        own = state["batch_sampler"]
        if (own is not None) != self._stateful:
            raise StateMismatch(
                f"the state was saved {'with' if own is not None else 'without'} a state_dict of its batch sampler, "
                f"{type(self.batch_sampler).__name__} has {'one' if self._stateful else 'none'}: build the loader "
                "with the batch sampler it was saved with"
            )
        self._go_to(state["epoch"], own)
        self._epoch_start = None
        self._micro_batches = state["micro_batches"]
        self._consumed = state["consumed_samples"]
        self._ended = state["ended"]

    def __len__(self) -> int:
        """Steps of a full epoch.

        Raises:
            TypeError: The batch sampler has no length.
        """
        return len(self.batch_sampler) // self.accumulation_steps

    def _go_to(self, epoch: int, own: Any) -> None:
        self._epoch = epoch
        self._micro_batches = self._consumed = 0
        self._ended = False
        self._batches = None
        self._loaded = copy.deepcopy(own)
        if own is not None:
            self._set_epoch()
            self.batch_sampler.load_state_dict(copy.deepcopy(own))

    def _leave(self) -> bool:
        """End the pass under way: a batch sampler with a state may keep its position until it is exhausted.

        Returns:
            Whether it has no end to go to, and must go back to its beginning.
        """
        if not self._stateful or not self._micro_batches or self._ended:
            return False
        batches = iter(self.batch_sampler) if self._batches is None else self._batches
        endless = not isinstance(self.batch_sampler, Sized) and self._epoch_start is not None
        most = self.accumulation_steps if endless else None  # fewer are left at the end of an epoch
        return sum(1 for _ in islice(batches, most)) == most

    def _own_state(self) -> Any:
        return copy.deepcopy(self.batch_sampler.state_dict() if self._loaded is None else self._loaded)

    def _open(self) -> Iterator[Sequence[int]]:
        if not self._stateful:
            self._set_epoch()
        elif self._micro_batches == 0:
            self._set_epoch()
            self._epoch_start = self._own_state()
        self._loaded = None
        batches: Iterator[Sequence[int]] = iter(self.batch_sampler)
        if not self._stateful:
            next(islice(batches, self._micro_batches, self._micro_batches), None)  # what was handed out
        return batches

    def _set_epoch(self) -> None:
        if callable(getattr(self.batch_sampler, "set_epoch", None)):
            self.batch_sampler.set_epoch(self._epoch)

    def _indices(self, batch: Sequence[int]) -> npt.NDArray[np.int64]:
        indices = np.asarray(batch)
        if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu" or indices.min() < 0:
            raise ValueError(
                f"{type(self.batch_sampler).__name__} gave the micro-batch {batch!r}: expected at least one dataset "
                "index, all of them integers >= 0"
            )
        return indices.astype(np.int64)
