"""Packed samples read where their documents are needed: each one read and opened once a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from evenstep.errors import SampleError
from evenstep.nodes.fetch import Pending, Unreadable

__all__ = ["OpenedSamples"]


class OpenedSamples:
    """Documents of the packed samples that a rank asked for.

    Args:
        pending: The packed samples, in the order in which their first documents are taken.
        explode: ``sample -> documents``.
    """

    def __init__(self, pending: Pending, explode: Callable[[Any], Iterable[Any]]) -> None:
        self._pending = pending
        self._explode = explode
        self._documents: dict[int, list[Any] | Unreadable] = {}

    def take(self, index: int, number: int, expected: int) -> Any:
        """Document ``number`` of sample ``index``, which has ``expected``; `Unreadable` where the sample is.

        Raises:
            SampleError: It has another number of documents.
        """
        if index not in self._documents:
            self._documents[index] = self._open(index, expected)
        documents = self._documents[index]
        return documents if isinstance(documents, Unreadable) else documents[number]

    def cancel(self) -> None:
        """Nobody will take the rest."""
        self._pending.cancel()

    def _open(self, index: int, expected: int) -> list[Any] | Unreadable:
        (value,) = self._pending.take(1)
        if isinstance(value, Unreadable):
            return value
        try:
            documents = list(self._explode(value))
        except Exception as error:
            return Unreadable(error)
        if len(documents) != expected:
            raise SampleError(
                f"sample {index} has {len(documents)} documents, its metadata says {expected}: the rows were planned for "
                "others. Compute the metadata from the dataset as it is now.",
                index,
            )
        return documents
