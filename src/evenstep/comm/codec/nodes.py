"""The contract of a place in a sample's structure: it reads and writes that place for many samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from evenstep.comm.codec.frame import Reader, Writer

__all__ = ["Node"]


class Node(Protocol):
    """One place in the structure of a sample.

    ``columns`` counts the field columns that it and its children add to a segment.
    """

    columns: int

    def spec(self) -> Any:
        """The node as JSON-able lists."""

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        """Write this place of every sample."""

    def decode(self, n: int, reader: Reader) -> list[Any]:
        """Read this place of ``n`` samples."""
