"""Documents one after another in one array of tokens, mapped rather than read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["TokenArray"]


class TokenArray:
    """A long array of tokens, and where its documents begin.

    Args:
        tokens: Integers ``[total]``: an array, the path of an ``.npy`` file, or of a raw file with ``dtype``; files
            are mapped.
        offsets: Integers ``[n + 1]``, ascending, from 0 to ``total``: document i is ``tokens[offsets[i]:offsets[i +
            1]]``. An array, or the path of an ``.npy`` file.
        dtype: Of a raw file, for example ``"uint16"``.

    Attributes:
        lengths: Tokens of each document, int64 ``[n]``.

    Raises:
        TypeError: Tokens or offsets are no integers in one dimension.
        ValueError: The offsets do not fit the tokens; a raw file has no ``dtype``, or one that does not divide it.

    Example:
        >>> from evenstep.datasets import TokenArray
        >>> corpus = TokenArray([5, 6, 7, 8, 9], offsets=[0, 2, 5])
        >>> corpus.lengths.tolist(), corpus[1]["input_ids"].tolist()
        ([2, 3], [7, 8, 9])
    """

    def __init__(self, tokens: Any, offsets: Any, *, dtype: npt.DTypeLike | None = None) -> None:
        self._made_of = (tokens, offsets, dtype)
        self._tokens = _open(tokens, dtype)
        self._offsets = _open(offsets, None).astype(np.int64)
        for name, array in (("tokens", self._tokens), ("offsets", self._offsets)):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise TypeError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}, expected integers [n]"
                )
        total, bounds = len(self._tokens), self._offsets
        if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != total or (np.diff(bounds) < 0).any():
            raise ValueError(
                f"offsets do not ascend from 0 to the {total} tokens: documents would overlap, or tokens belong to none; "
                "offsets are [n + 1], the last one is the number of tokens"
            )
        self.lengths: npt.NDArray[np.int64] = np.diff(bounds)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Document ``index``: ``{"input_ids": int64 [length]}``, a copy."""
        return self.read(index, 0, len(self._tokens))

    def read(self, index: int, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Tokens ``begin`` to ``end`` of document ``index``, as far as it has them: ``{"input_ids": int64}``, a copy."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        first, last = int(self._offsets[index]), int(self._offsets[index + 1])
        tokens = self._tokens[first + begin : min(first + end, last)]
        return {"input_ids": torch.from_numpy(np.array(tokens, dtype=np.int64))}

    def __reduce__(self) -> Any:
        """Other processes map the files again instead of receiving them."""
        tokens, offsets, dtype = self._made_of
        return _rebuild, (tokens, offsets, dtype)


def _rebuild(tokens: Any, offsets: Any, dtype: Any) -> TokenArray:
    return TokenArray(tokens, offsets, dtype=dtype)


def _open(source: Any, dtype: npt.DTypeLike | None) -> npt.NDArray[Any]:
    if not isinstance(source, (str, os.PathLike)):
        return source if isinstance(source, np.ndarray) else np.asarray(source)
    path = Path(source)
    if path.suffix == ".npy":
        mapped: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return mapped
    if dtype is None:
        raise ValueError(
            f"{path} is no .npy file, so nothing says what its bytes are; pass dtype, for example 'uint16'"
        )
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, which {np.dtype(dtype)} does not divide: it is of another dtype or cut off"
        )
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
