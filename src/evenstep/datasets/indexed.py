"""Megatron's ``.bin`` and ``.idx`` pairs, without Megatron: documents and, from the index alone, their lengths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evenstep.datasets.megatron_index import MegatronIndex

__all__ = ["IndexedDataset"]


class IndexedDataset:
    """The documents of an indexed corpus; the tokens are mapped.

    Args:
        prefix: Path without ``.bin`` and ``.idx``, as Megatron takes it; with one of them it will do as well.
        sequences: Items are the sequences that the documents are made of, instead of documents.

    Attributes:
        lengths: Tokens of each item, int64 ``[n]``.

    Raises:
        FileNotFoundError: One of the two files is missing.
        ValueError: The index is damaged, or does not fit the ``.bin`` file; tokens are no integers.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, sequences: bool = False) -> None:
        path = Path(prefix)
        if path.suffix in (".bin", ".idx"):
            path = path.with_suffix("")
        index_path, data_path = path.with_name(path.name + ".idx"), path.with_name(path.name + ".bin")
        for each in (index_path, data_path):
            if not each.is_file():
                raise FileNotFoundError(
                    f"{each} does not exist: an indexed corpus is a pair of .bin and .idx files; pass the path without "
                    "the endings"
                )
        self._made_of = (os.fspath(path), sequences)
        self._index = MegatronIndex.read(index_path)
        if self._index.dtype.kind not in "iu":
            raise ValueError(f"{index_path} is of {self._index.dtype}, tokens are integers")
        size, width = data_path.stat().st_size, self._index.dtype.itemsize
        needed = int((self._index.pointers + self._index.lengths * width).max(initial=0))
        if size < needed or (self._index.pointers < 0).any():
            raise ValueError(
                f"{data_path} has {size} bytes, its index points to {needed}: the two do not belong together, or the "
                "file was cut off"
            )
        self._bytes: npt.NDArray[np.uint8] = (
            np.memmap(data_path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
        )
        # Item i is made of the sequences bounds[i] .. bounds[i + 1].
        self._bounds = np.arange(len(self._index.lengths) + 1) if sequences else self._index.documents
        self.lengths: npt.NDArray[np.int64] = (
            self._index.lengths if sequences else self._index.document_lengths()
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Item ``index``: ``{"input_ids": int64 [length]}``, a copy."""
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        parts = [self._sequence(s) for s in range(self._bounds[index], self._bounds[index + 1])]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=self._index.dtype)
        return {"input_ids": torch.from_numpy(tokens.astype(np.int64))}

    def _sequence(self, sequence: int) -> npt.NDArray[Any]:
        begin = int(self._index.pointers[sequence])
        end = begin + int(self._index.lengths[sequence]) * self._index.dtype.itemsize
        # Megatron does not align: a view of bytes may begin anywhere.
        return np.frombuffer(self._bytes[begin:end].tobytes(), dtype=self._index.dtype)

    def __reduce__(self) -> Any:
        """Other processes map the files again instead of receiving them."""
        return _rebuild, self._made_of


def _rebuild(prefix: str, sequences: bool) -> IndexedDataset:
    return IndexedDataset(prefix, sequences=sequences)
