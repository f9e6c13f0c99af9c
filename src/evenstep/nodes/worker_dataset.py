"""The dataset inside a worker process: each sample with its own seed, each fault with its own index."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from evenstep.nodes.fetch import Unreadable, fetch_samples
from evenstep.nodes.sample_seed import SeedKey
from evenstep.nodes.worker_message import rebuilt
from evenstep.sampling import sample_seed

__all__ = ["Chunk", "FailedSample", "GuardedDataset"]

Chunk: TypeAlias = tuple[SeedKey, list[int]]


class GuardedDataset(Dataset[Any]):
    """A dataset whose errors come back as values, so that they keep their index.

    Args:
        dataset: Anything with ``dataset[i]``, optionally ``__getitems__``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, chunk: Chunk) -> list[Any]:
        """The samples of a chunk; `FailedSample` where one could not be read."""
        key, indices = chunk
        try:
            return [_portable(value) for value in self._read(key, indices)]
        except (
            KeyboardInterrupt,
            SystemExit,
            GeneratorExit,
        ):  # of the dataset: it would end the worker untold
            return [_portable(value) for index in indices for value in self._read_one(key, index)]

    def _read(self, key: SeedKey, indices: list[int]) -> list[Any]:
        if callable(getattr(self._dataset, "__getitems__", None)):
            _seed_everything(sample_seed(key.seed, key.epoch, indices[0]))
            return fetch_samples(self._dataset, indices, key)
        values: list[Any] = []
        for index in indices:
            _seed_everything(sample_seed(key.seed, key.epoch, index))
            values += fetch_samples(self._dataset, [index], key)
        return values

    def _read_one(self, key: SeedKey, index: int) -> list[Any]:
        try:
            return self._read(key, [index])
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
            told = (
                f"the dataset raised {type(error).__name__}({str(error)!r}), which would end a worker process"
            )
            failed = RuntimeError(told)
            failed.__cause__ = error
            return [Unreadable(failed)]


def _seed_everything(seed: int) -> None:
    """The process is a worker, so its global generators are ours."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - datasets still draw from the legacy state
    random.seed(seed)


def _portable(value: Any) -> Any:
    """An error that another process can rebuild, with the traceback it cannot."""
    if not isinstance(value, Unreadable):
        return value
    text = "".join(traceback.format_exception(value.error))
    error = rebuilt(value.error)
    if error is None:
        error = RuntimeError(f"{type(value.error).__name__}: {value.error}")
    return FailedSample(error, text)


@dataclass(frozen=True, slots=True)
class FailedSample:
    """What a dataset raised, on its way to the reader.

    Attributes:
        error: The exception, rebuilt there if it can be.
        traceback: What it looked like in the worker.
    """

    error: Exception
    traceback: str

    def unwrap(self) -> Unreadable:
        """What the reader finds in place of the sample."""
        self.error.__cause__ = RuntimeError(f"in a worker process:\n{self.traceback}")
        return Unreadable(self.error)
