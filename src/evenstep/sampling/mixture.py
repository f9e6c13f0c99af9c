"""A weighted blend of several datasets, each shuffled and repeated on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.cursor import Cursor
from evenstep.sampling.blend import Blend
from evenstep.sampling.order import check_choice, check_count, check_seed
from evenstep.sampling.permutation import KeyedPermutation
from evenstep.sampling.steps import Remainder, Step, StepSampler

__all__ = ["MixtureOrder", "MixtureSampler"]

_I64 = npt.NDArray[np.int64]


class MixtureOrder:
    """The `Order` of a mixture: indices into the concatenation of its datasets.

    A pure function of the position with O(datasets) memory. The datasets go on from epoch to epoch: the
    count of a dataset's passes, each a new permutation, never starts again.

    Args:
        sizes: Samples of each dataset.
        weights: Share of each dataset, numbers >= 0 on any scale; 0 leaves a dataset out.
        num_samples: Samples of one epoch of the mixture.
        order: Inside each dataset, ``"shuffled"`` or ``"sequential"``.
        seed: Seed of the permutations.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        num_samples: int,
        order: str = "shuffled",
        seed: int = 0,
    ) -> None:
        check_seed(seed)
        check_choice("order", order, ("shuffled", "sequential"))
        self.sizes: tuple[int, ...]
        self.sizes, exact = _checked_mixture(sizes, weights)
        check_count("num_samples", num_samples, "samples")
        self.num_samples: int = int(num_samples)
        self.seed: int = int(seed)
        self.order = order
        self.offsets: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._taken = [i for i, weight in enumerate(exact) if weight]
        self._blend = Blend([exact[i] for i in self._taken])
        total = sum(exact)
        shares = tuple(str(weight / total) for weight in exact)
        self.identity: tuple[Any, ...] = ("mixture", self.sizes, shares, self.num_samples, order)

    def index_at(self, epoch: int, positions: _I64) -> _I64:
        """Indices into the concatenated datasets, int64 ``[n]``, at ``positions`` of ``epoch``."""
        before = epoch * self.num_samples
        if before + self.num_samples >= 1 << 62:
            raise ValueError(f"epoch {epoch} of {self.num_samples} samples lies beyond position 2**62")
        streams, counts = self._blend(positions + before)
        indices = np.empty(len(positions), dtype=np.int64)
        for stream in np.unique(streams).tolist():
            dataset = self._taken[stream]
            here = np.flatnonzero(streams == stream)
            indices[here] = self.offsets[dataset] + self._inside(dataset, counts[here])
        return indices

    def split(self, indices: _I64) -> tuple[_I64, _I64]:
        """Dataset number and index inside that dataset, int64 ``[n]`` each; -1 and -1 for padding."""
        datasets = np.searchsorted(self.offsets, indices, side="right") - 1
        return datasets, np.where(datasets < 0, -1, indices - self.offsets[datasets])

    def _inside(self, dataset: int, counts: _I64) -> _I64:
        size = self.sizes[dataset]
        passes, inside = np.divmod(counts, size)
        if self.order == "sequential" or size == 1:
            return inside
        for number in np.unique(passes).tolist():
            here = passes == number
            inside[here] = KeyedPermutation(size, (self.seed, dataset, number))(inside[here])
        return inside


class MixtureSampler(StepSampler):
    """A fixed number of samples per optimizer step from several datasets in given proportions.

    In any prefix of the stream, dataset d was taken ``weight_d / sum(weights)`` times its length, give or
    take less than 2 samples (see `Blend`). ``Step.indices`` point into the concatenation of the datasets, as
    in ``torch.utils.data.ConcatDataset``; `split` takes them apart. The rows of a step are shuffled, lest a
    regular blend and a regular layout send each dataset to a rank of its own.

    Args:
        sizes: Samples of each dataset, each at least 1.
        weights: Share of each dataset, numbers >= 0 on any scale; 0 leaves a dataset out.
        global_batch_size: Samples of one optimizer step over all ranks.
        seed: Seed of all permutations, in [0, 2**64).
        order: Inside each dataset, ``"shuffled"`` (a new keyed permutation per pass) or ``"sequential"``
            (then rows are not shuffled either).
        num_samples: Samples of one epoch of the mixture; None: the sum of the sizes. The datasets go on
            from epoch to epoch.
        remainder: As in `StepSampler`.

    Raises:
        ValueError: A size, weight or other value is out of range; the message names it.

    Example:
        >>> from evenstep.sampling import MixtureSampler
        >>> sampler = MixtureSampler([1000, 50], [0.75, 0.25], global_batch_size=8)
        >>> datasets, inside = sampler.split(sampler.step_at(sampler.start()).indices)
        >>> sorted(datasets.tolist())
        [0, 0, 0, 0, 0, 0, 1, 1]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        global_batch_size: int,
        seed: int = 0,
        order: str = "shuffled",
        num_samples: int | None = None,
        remainder: Remainder = "drop",
    ) -> None:
        length = sum(_checked_mixture(sizes, weights)[0]) if num_samples is None else num_samples
        mixture = MixtureOrder(sizes, weights, num_samples=length, order=order, seed=seed)
        super().__init__(
            length, global_batch_size=global_batch_size, order=mixture, seed=seed, remainder=remainder
        )
        self.sizes: tuple[int, ...] = mixture.sizes
        self.weights: tuple[float, ...] = tuple(weights)
        self.order = "mixture"
        self.dataset_size: int = sum(mixture.sizes)
        self._mixture = mixture

    def step_at(self, cursor: Cursor) -> Step | None:
        """The step that begins at ``cursor.consumed_samples``, or None at the end of its epoch."""
        step = super().step_at(cursor)
        if step is None or self._mixture.order == "sequential":
            return step
        key = (self.seed, cursor.epoch, cursor.consumed_samples, self.global_batch_size)
        real = np.count_nonzero(step.indices >= 0)
        shuffled = KeyedPermutation(int(real), key)(np.arange(real, dtype=np.int64))
        step.indices[:real] = step.indices[shuffled]
        return step

    def split(self, indices: _I64) -> tuple[_I64, _I64]:
        """Dataset number and index inside that dataset, int64 ``[n]`` each; -1 and -1 for padding."""
        return self._mixture.split(indices)


def _checked_mixture(
    sizes: Sequence[int], weights: Sequence[float]
) -> tuple[tuple[int, ...], list[Fraction]]:
    if len(sizes) != len(weights) or not len(sizes):
        raise ValueError(
            f"{len(sizes)} sizes and {len(weights)} weights: a mixture needs one of each per dataset"
        )
    for i, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        check_count(f"sizes[{i}]", size, "samples")
        if not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weights[{i}] is {weight!r}: a weight is a finite number >= 0")
    exact = [Fraction(w) if isinstance(w, (int, Fraction)) else Fraction(float(w)) for w in weights]
    if not any(exact):
        raise ValueError(f"all {len(exact)} weights are 0: the mixture would be empty")
    return tuple(int(size) for size in sizes), exact
