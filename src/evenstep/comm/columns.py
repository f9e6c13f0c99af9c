"""Metadata of a window's samples as columns: what planning needs, about forty bytes a sample on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Columns"]


@dataclass(frozen=True, slots=True)
class Columns:
    """One entry per sample.

    Attributes:
        order: Place of the sample in its window, int64 ``[n]``; the same numbering on every rank.
        rows: Reference row, int32 ``[n]``, numbered over the window.
        tokens: int64 ``[n]``.
        loss_tokens: int64 ``[n]``; -1 where unknown.
        nbytes: Encoded size, int64 ``[n]``.
        structures: Key of the encoded structure, int64 ``[n]``.
        costs: Predicted cost, float64 ``[n, stages]``.
        features: Budgeted features, float64 ``[n, len(names)]``.
        names: Names of the budgeted features.
    """

    order: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int64]
    loss_tokens: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    structures: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    features: npt.NDArray[np.float64]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        """Number of cost stages."""
        return int(self.costs.shape[1])

    @property
    def packed_bytes(self) -> int:
        """Size of what `pack` returns."""
        return sum(column.nbytes for column in self._columns())

    @property
    def schema(self) -> int:
        """Digest of what the columns mean; equal on ranks whose columns fit together."""
        text = repr((self.stages, self.names)).encode()
        return int.from_bytes(blake2b(text, digest_size=7).digest(), "little")

    def feature(self, name: str) -> npt.NDArray[np.float64]:
        """One feature, float64 ``[n]``."""
        column: npt.NDArray[np.float64] = self.features[:, self.names.index(name)]
        return column

    def known_loss_tokens(self) -> int:
        """Sum of the loss tokens, or -1 if one of them is unknown."""
        return int(self.loss_tokens.sum()) if (self.loss_tokens >= 0).all() else -1

    def pack(self) -> bytes:
        """As bytes, column after column."""
        return b"".join(np.ascontiguousarray(column).tobytes() for column in self._columns())

    def _columns(self) -> list[npt.NDArray[Any]]:
        wide = [self.order, self.tokens, self.loss_tokens, self.nbytes, self.structures]
        return [*wide, self.costs, self.features, self.rows]

    @classmethod
    def unpack(cls, data: npt.NDArray[np.uint8], count: int, stages: int, names: tuple[str, ...]) -> Columns:
        """What `pack` wrote for ``count`` samples.

        Raises:
            ValueError: ``data`` has another size.
        """
        widths = [8, 8, 8, 8, 8, 8 * stages, 8 * len(names), 4]
        bounds = np.cumsum([0, *(width * count for width in widths)])
        if len(data) != bounds[-1]:
            raise ValueError(f"{count} samples take {bounds[-1]} bytes of columns, got {len(data)}")
        parts = [data[a:b] for a, b in pairwise(bounds)]
        order, tokens, loss, nbytes, structures = (part.view(np.int64) for part in parts[:5])
        costs = parts[5].view(np.float64).reshape(count, stages)
        features = parts[6].view(np.float64).reshape(count, len(names))
        return cls(order, parts[7].view(np.int32), tokens, loss, nbytes, structures, costs, features, names)

    @classmethod
    def gather(cls, parts: Sequence[Columns]) -> tuple[Columns, npt.NDArray[np.int32]]:
        """The columns of all ranks in window order, and which of ``parts`` each sample came from (int32)."""
        owner = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        order = np.concatenate([part.order for part in parts])
        by_order = np.argsort(order, kind="stable")
        merged = [
            np.concatenate(columns)[by_order]
            for columns in zip(*(part._columns() for part in parts), strict=True)
        ]
        _, tokens, loss, nbytes, structures, costs, features, rows = merged
        names = parts[0].names
        whole = cls(order[by_order], rows, tokens, loss, nbytes, structures, costs, features, names)
        return whole, owner[by_order]


def as_bytes(columns: Columns, size: int) -> torch.Tensor:
    """``columns`` as uint8 ``[size]``, padded with zeros."""
    row = torch.zeros(size, dtype=torch.uint8)
    data = columns.pack()
    row.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return row
