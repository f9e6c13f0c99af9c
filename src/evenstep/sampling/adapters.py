"""Samplers of `torch.utils.data` as pure functions of the cursor."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.sampling.hashing import mix64, stream_digest
from evenstep.sampling.order import check_seed
from evenstep.sampling.rank_local import LocalStep, LocalStepSource, RankLocalBatchSampler
from evenstep.sampling.steps import Remainder, StepSampler

__all__ = ["LocalStep", "LocalStepSource", "RankLocalBatchSampler", "TorchSamplerAdapter"]

_I64 = npt.NDArray[np.int64]
_KEPT_EPOCHS = 2  # look-ahead may be in the next one while its consumer is in this


class TorchSamplerAdapter(StepSampler):
    """Any `torch.utils.data.Sampler` over a dataset, or a part of it, as the order of a `StepSampler`.

    Each epoch of the sampler is written down once, O(samples) time and memory, after which the position
    costs nothing. The sampler must give the same order on every rank: its order of epoch 0 goes into the
    cursor's ``stream`` digest. What makes an epoch's order a function of the epoch:

    * a sampler with ``set_epoch``: that call;
    * one with a ``generator`` or with ``state_dict`` and ``load_state_dict``: its state when it was given to
      the adapter; later epochs are replayed from there, which takes O(samples) per epoch before a resume
      (torchdata's ``RandomSampler`` draws the seed of its generator when it is built: pass it one);
    * any other: torch's, NumPy's and Python's global CPU random state is set from ``(seed, epoch)`` while
      the epoch is written down, and put back. A ``generator`` that is None is lent a seeded one instead.

    Args:
        sampler: Yields dataset indices, not batches; with one replica only.
        global_batch_size: Samples of one optimizer step over all ranks.
        seed: Seed for samplers that have none of their own, in [0, 2**64).
        remainder: As in `StepSampler`.

    Raises:
        TypeError: The sampler yields something else than integers.
        ValueError: The sampler is empty, sees only one replica's part, or gives an index < 0 or >= 2**63.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        *,
        global_batch_size: int,
        seed: int = 0,
        remainder: Remainder = "drop",
    ) -> None:
        check_seed(seed)
        replicas = getattr(sampler, "num_replicas", 1)
        if replicas != 1:
            raise ValueError(
                f"{type(sampler).__name__} has num_replicas={replicas}: each rank would see another order, and "
                "evenstep divides the order among ranks itself. Build it with num_replicas=1, rank=0"
            )
        order = _TorchOrder(sampler, int(seed))
        super().__init__(
            order.num_samples,
            global_batch_size=global_batch_size,
            order=order,
            seed=seed,
            remainder=remainder,
        )
        self.order = "torch"
        self.sampler = sampler
        self._largest = int(order.index_at(0, np.arange(order.num_samples)).max())

    @property
    def largest_index(self) -> int:
        """The largest index in the sampler's epoch 0: the dataset needs one sample more, and may have any number."""
        return self._largest


class _TorchOrder:
    """The epochs of a torch sampler, written down one by one."""

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.sampler: Any = sampler
        self.seed = seed
        self.name = type(sampler).__name__
        self._stateful = callable(getattr(sampler, "state_dict", None)) and callable(
            getattr(sampler, "load_state_dict", None)
        )
        self._starts = {0: self._snapshot()}
        self._digests: dict[int, int] = {}
        self._epochs: dict[int, _I64] = {}
        self.num_samples = 0
        promised = len(sampler) if isinstance(sampler, Sized) else None
        self.num_samples = len(self._written(0))
        if promised not in (None, self.num_samples):
            raise ValueError(
                f"{self.name} gave {self.num_samples} samples, its length is {promised}: the others would never be "
                "used. Give the adapter a sampler that is not yet partly consumed"
            )
        self.identity = self._digests[0]

    def index_at(self, epoch: int, positions: _I64) -> _I64:
        """The sampler's indices at ``positions`` of its ``epoch``."""
        return self._written(epoch)[positions]

    def _written(self, epoch: int) -> _I64:
        if epoch not in self._epochs:
            order = self._write(epoch)
            if self._digests.setdefault(epoch, digest := stream_digest(order)) != digest:
                raise ValueError(
                    f"{self.name} gave another order for epoch {epoch} than before: a resume would skip and repeat "
                    "samples. Give it a set_epoch, a generator or a state_dict, so that its order is reproducible"
                )
            for old in sorted(self._epochs, key=lambda e: abs(e - epoch))[_KEPT_EPOCHS - 1 :]:
                del self._epochs[old]
            self._epochs[epoch] = order
        return self._epochs[epoch]

    def _write(self, epoch: int) -> _I64:
        if callable(getattr(self.sampler, "set_epoch", None)):
            self._restore(self._starts[0])
            self.sampler.set_epoch(epoch)
            return self._iterate(epoch)
        if self._starts[0] is None:
            with _seeded(self.sampler, mix64(self.seed, epoch)):
                return self._iterate(epoch)
        first = max(known for known in self._starts if known <= epoch)
        self._restore(self._starts[first])
        for replayed in range(first, epoch + 1):
            order = self._iterate(replayed)
            self._starts = {
                0: self._starts[0],
                replayed: self._starts.get(replayed),
                replayed + 1: self._snapshot(),
            }
        return order

    def _iterate(self, epoch: int) -> _I64:
        try:
            order = np.fromiter(map(operator.index, self.sampler), dtype=np.int64)
        except TypeError as error:
            raise TypeError(
                f"{self.name} does not yield dataset indices ({error}): expected integers; a batch sampler goes "
                "through RankLocalBatchSampler"
            ) from error
        except OverflowError as error:
            raise ValueError(
                f"{self.name} gave an index in epoch {epoch} that does not fit into 64 bits: no dataset has such a sample. "
                "Give it indices in [0, 2**63)"
            ) from error
        if not len(order):
            raise ValueError(f"{self.name} is empty in epoch {epoch}: a sampler needs at least one sample")
        if self.num_samples and len(order) != self.num_samples:
            raise ValueError(
                f"{self.name} gave {len(order)} samples in epoch {epoch} and {self.num_samples} in epoch 0: epochs "
                "of one length are needed to count steps"
            )
        return order

    def _snapshot(self) -> tuple[Any, Any] | None:
        """The sampler's own state, or None if it has none."""
        import torch  # takes most of a second, which samplers without torch need not wait for

        generator = getattr(self.sampler, "generator", None)
        drawn = generator.get_state() if isinstance(generator, torch.Generator) else None
        own = copy.deepcopy(self.sampler.state_dict()) if self._stateful else None
        return None if drawn is None and own is None else (drawn, own)

    def _restore(self, state: tuple[Any, Any] | None) -> None:
        drawn, own = state or (None, None)
        if drawn is not None:
            self.sampler.generator.set_state(drawn)
        if own is not None:
            self.sampler.load_state_dict(copy.deepcopy(own))


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Inside, ``sampler`` draws from random state set by ``seed``; outside, nothing has changed."""
    import torch

    if getattr(sampler, "generator", ...) is None:
        sampler.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            sampler.generator = None
        return
    # The CPU generator alone: torch.manual_seed would reset every accelerator's as well.
    torch_state, numpy_state, python_state = (
        torch.default_generator.get_state(),
        np.random.get_state(),  # noqa: NPY002 - samplers still draw from the legacy state
        random.getstate(),
    )
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what users' samplers draw from
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 - what users' samplers draw from
        random.setstate(python_state)
