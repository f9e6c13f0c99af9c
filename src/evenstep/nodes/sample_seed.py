"""The seed of the sample being read, so that a random transform gives the same again after a resume."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from evenstep.sampling.hashing import sample_seed

__all__ = ["SeedKey", "begin_sample", "current_sample_seed"]

_reading = threading.local()


@dataclass(frozen=True, slots=True)
class SeedKey:
    """What the seed of a sample depends on, besides its index.

    Attributes:
        seed: Of the loader's order.
        epoch: Of the window.
    """

    seed: int = 0
    epoch: int = 0


def current_sample_seed() -> int:
    """Inside ``dataset[i]``: a seed in [0, 2**64) that depends on nothing but loader seed, epoch and index.

    A transform that draws from ``numpy.random.default_rng(current_sample_seed())`` gives the same sample after a
    resume, on any rank and with any number of workers. In worker processes the global generators of torch,
    NumPy and Python are seeded with it as well. A dataset that reads many samples at once (``__getitems__``) has no
    one sample; `evenstep.sampling.sample_seed` gives the seed of each.

    Raises:
        RuntimeError: No loader is reading one sample in this thread.
    """
    sample: tuple[SeedKey, int] | None = getattr(_reading, "sample", None)
    if sample is None:
        raise RuntimeError("current_sample_seed() has a value only inside dataset[i], called by a loader")
    key, index = sample
    return sample_seed(key.seed, key.epoch, index)


def begin_sample(key: SeedKey | None, index: int = 0) -> None:
    """Say which sample this thread reads now; None: none."""
    _reading.sample = None if key is None else (key, index)
