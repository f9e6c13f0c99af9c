"""Fetching samples by index: here, in threads, or in worker processes; a fault never loses its index."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from evenstep.nodes.sample_seed import SeedKey, begin_sample

__all__ = ["Fetcher", "InlineFetcher", "Pending", "ThreadFetcher", "Unreadable", "fetch_samples"]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a sample that could not be read.

    Attributes:
        error: What its dataset raised.
    """

    error: Exception


class Pending:
    """Samples that are being fetched, in the order they were asked for.

    Args:
        parts: Futures of consecutive lists of values.
    """

    def __init__(self, parts: Sequence[Future[list[Any]]]) -> None:
        self._parts = list(parts)[::-1]
        self._values: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """The next ``count`` values, waited for; `Unreadable` where a sample was.

        Raises:
            RuntimeError: A worker died; the message names it.
        """
        while len(self._values) < count:
            self._values += self._parts.pop().result()
        taken, self._values = self._values[:count], self._values[count:]
        return taken

    def cancel(self) -> None:
        """Nobody will take the rest."""
        for part in self._parts:
            part.cancel()


class Fetcher(Protocol):
    """Reads samples of one dataset."""

    ahead: bool
    """Whether it reads while nobody waits, so that asking early saves time."""

    def submit(self, indices: Sequence[int], key: SeedKey) -> Pending:
        """Begin to fetch ``indices``."""

    def renew(self) -> None:
        """The dataset has changed (``set_epoch``): what workers hold of it is old."""

    def close(self) -> None:
        """End every worker. Idempotent."""


def fetch_samples(dataset: Any, indices: Sequence[int], key: SeedKey) -> list[Any]:
    """``dataset[i]`` for each index, by one ``__getitems__`` if there is one; `Unreadable` where that raises."""
    if not indices:  # as on every rank that plans or builds, but reads nothing
        return []
    if dataset is None:
        raise ValueError(
            "this rank reads samples but was built with dataset=None; pass the dataset on every reader rank"
        )
    try:
        if callable(getattr(dataset, "__getitems__", None)):
            values = _fetch_together(dataset, indices)
            if values is not None:
                return values
        return [_fetch_one(dataset, index, key) for index in indices]
    finally:
        begin_sample(None)


def _fetch_together(dataset: Any, indices: Sequence[int]) -> list[Any] | None:
    """None if one of them cannot be read: then each is read by itself, to find which."""
    begin_sample(None)  # there is no one sample whose seed it could ask for
    try:
        values = list(dataset.__getitems__(list(indices)))
    except Exception:
        return None
    if len(values) != len(indices):
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__ returned {len(values)} samples for {len(indices)} indices"
        )
    return values


def _fetch_one(dataset: Any, index: int, key: SeedKey) -> Any:
    begin_sample(key, index)
    try:
        return dataset[index]
    except Exception as error:
        return Unreadable(error)


class InlineFetcher:
    """No workers: samples are read when they are taken, by whoever takes them."""

    ahead = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def submit(self, indices: Sequence[int], key: SeedKey) -> Pending:
        """Nothing is read yet."""
        return _Lazy(self._dataset, indices, key)

    def renew(self) -> None:
        """The dataset is used as it is."""

    def close(self) -> None:
        """There is nothing to end."""


class _Lazy(Pending):
    def __init__(self, dataset: Any, indices: Sequence[int], key: SeedKey) -> None:
        super().__init__([])
        self._dataset, self._indices, self._key = dataset, list(indices), key

    def take(self, count: int) -> list[Any]:
        mine, self._indices = self._indices[:count], self._indices[count:]
        return fetch_samples(self._dataset, mine, self._key)


class ThreadFetcher:
    """Reads in threads: for datasets that wait (files, network) or decode outside the interpreter lock.

    Args:
        dataset: Anything whose ``dataset[i]`` may be called by several threads at once.
        num_workers: Threads.
        name: Begins the names of the threads.
    """

    ahead = True

    def __init__(self, dataset: Any, num_workers: int, *, name: str = "evenstep-read") -> None:
        self._dataset = dataset
        self._workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def submit(self, indices: Sequence[int], key: SeedKey) -> Pending:
        """Begin to fetch ``indices``."""
        together = callable(getattr(self._dataset, "__getitems__", None))
        size = max(1, len(indices) // (2 * self._workers)) if together else 1
        return Pending(
            [
                self._pool.submit(fetch_samples, self._dataset, list(indices[k : k + size]), key)
                for k in range(0, len(indices), size)
            ]
        )

    def renew(self) -> None:
        """Threads see the dataset as it is."""

    def close(self) -> None:
        """Let every thread end after the sample that it reads."""
        self._finalizer()
