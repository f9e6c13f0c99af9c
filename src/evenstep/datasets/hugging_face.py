"""A tokenised ``datasets.Dataset`` as samples of tensors, with lengths read from its columns alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["HuggingFaceDataset"]

_CHUNK = 10_000  # rows of a column looked at at once


class HuggingFaceDataset:
    """Columns of a ``datasets.Dataset``; the library is not needed to import this, only to make one.

    Args:
        dataset: Map-style, already tokenised.
        columns: Columns that a sample gets; default: all. Lists of numbers become tensors.
        length_column: A column of token counts, if there is one; default: the lengths of ``tokens_column``, found in
            its Arrow offsets without reading a token.
        tokens_column: The column of token lists.

    Raises:
        TypeError: ``dataset`` has no columns (an IterableDataset is a source for `StepBuilder` instead).
        ValueError: A column does not exist.
    """

    def __init__(
        self,
        dataset: Any,
        columns: Sequence[str] | None = None,
        *,
        length_column: str | None = None,
        tokens_column: str = "input_ids",
    ) -> None:
        names = getattr(dataset, "column_names", None)
        if names is None or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} is no map-style datasets.Dataset; wrap a streaming one in "
                "evenstep.nodes.StepBuilder and pass no sampler"
            )
        self.columns: list[str] = list(names if columns is None else columns)
        for name in [*self.columns, length_column or tokens_column]:
            if name not in names:
                raise ValueError(f"the dataset has no column {name!r}, it has {', '.join(map(repr, names))}")
        self._dataset = dataset
        self._length_column = length_column
        self._tokens_column = tokens_column
        self._rows = dataset.select_columns(self.columns).with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index``: one entry per column."""
        row = self._rows[int(index)]
        return {name: _tensor(row[name]) for name in self.columns}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Many rows by one look-up."""
        columns = self._rows[[int(index) for index in indices]]
        return [{name: _tensor(columns[name][k]) for name in self.columns} for k in range(len(indices))]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, int64 ``[n]``."""
        name = self._length_column or self._tokens_column
        compute: Any = import_module("pyarrow.compute")
        column = self._dataset.select_columns([name]).with_format("arrow")
        parts = []
        for begin in range(0, len(self), _CHUNK):
            values = column[begin : begin + _CHUNK].column(name)
            if self._length_column is None:
                values = compute.list_value_length(values)
            parts.append(np.asarray(values.to_numpy(), dtype=np.int64))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _tensor(value: Any) -> Any:
    """Lists of numbers as tensors; all else as it is."""
    if isinstance(value, list) and (not value or isinstance(value[0], (int, float, bool))):
        return torch.tensor(value, dtype=torch.int64 if not value else None)
    return value
