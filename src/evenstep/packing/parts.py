"""Reads rows of plain text samples and writes them into a batch with few calls, for the one-pass form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from evenstep.packing.fields import INT32_MAX, as_tensor

__all__ = ["Fields", "RowParts", "read_rows"]

Sample = Mapping[str, Any]
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})


@dataclass(frozen=True, slots=True)
class RowParts:
    """What one row consists of.

    Attributes:
        input_ids: Tokens of each document, none empty.
        labels: Labels of each document; None where they are the tokens.
        lengths: Tokens of each document.
        boundaries: ``[0, ...]``, where each document ends.
    """

    input_ids: list[torch.Tensor]
    labels: list[torch.Tensor] | None
    lengths: list[int]
    boundaries: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return self.boundaries[-1]

    @classmethod
    def of(
        cls, input_ids: list[torch.Tensor], labels: list[torch.Tensor] | None, lengths: list[int]
    ) -> RowParts:
        """A row of these documents, the empty ones left out."""
        if 0 in lengths:
            kept = [k for k, length in enumerate(lengths) if length]
            input_ids = [input_ids[k] for k in kept]
            labels = None if labels is None else [labels[k] for k in kept]
            lengths = [lengths[k] for k in kept]
        return cls(input_ids, labels, lengths, list(accumulate(lengths, initial=0)))

    @classmethod
    def join(cls, rows: Sequence[RowParts]) -> RowParts:
        """All rows as one."""
        labels = None
        if any(row.labels is not None for row in rows):
            labels = [part for row in rows for part in (row.input_ids if row.labels is None else row.labels)]
        lengths = [length for row in rows for length in row.lengths]
        return cls.of([part for row in rows for part in row.input_ids], labels, lengths)


def read_rows(rows_of_samples: Sequence[Sequence[Sample]], seq_len: int) -> list[RowParts] | None:
    """The rows, or None if they hold anything but whole ``input_ids`` and ``labels`` that fit."""
    if not 0 < seq_len <= INT32_MAX:
        return None
    rows = [_read_row(samples, seq_len) for samples in rows_of_samples]
    whole = [row for row in rows if row is not None]
    return whole if rows and len(whole) == len(rows) else None


def _read_row(samples: Sequence[Sample], seq_len: int) -> RowParts | None:
    # One comprehension per question costs a third of one loop with all of them: this is what bounds the throughput.
    if not all(type(sample) is dict for sample in samples):
        return None
    input_ids = _read_field([sample.get("input_ids") for sample in samples])
    if input_ids is None:
        return None
    lengths = [part.numel() for part in input_ids]
    labels = None
    if {len(sample) for sample in samples} - {1}:
        if any(len(sample) != 1 + ("labels" in sample) for sample in samples):
            return None
        labels = _read_field(
            [sample.get("labels", part) for sample, part in zip(samples, input_ids, strict=True)]
        )
        if labels is None or [part.numel() for part in labels] != lengths:
            return None
    return RowParts.of(input_ids, labels, lengths) if sum(lengths) <= seq_len else None


def _read_field(values: list[Any]) -> list[torch.Tensor] | None:
    tensors = [value if type(value) is torch.Tensor else as_tensor(value) for value in values]
    for tensor in tensors:
        if tensor is None or tensor.dtype not in _WHOLE or tensor.ndim != 1:
            return None
    return [tensor for tensor in tensors if tensor is not None]


class Fields:
    """The three fields of a batch, int64 ``[rows, width]``, each allocated and written once.

    Args:
        rows: Rows of the batch.
        width: Tokens of each.
    """

    def __init__(self, rows: int, width: int) -> None:
        self._shape = (rows, width)
        self._input_ids, self._labels, self._positions = (
            torch.empty(rows * width, dtype=torch.int64) for _ in range(3)
        )
        # Slices of arrays cost a tenth of slices of tensors.
        self._ids_array, self._label_array, self._position_array = (
            field.numpy() for field in (self._input_ids, self._labels, self._positions)
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "input_ids": self._input_ids.view(self._shape),
            "labels": self._labels.view(self._shape),
            "position_ids": self._positions.view(self._shape),
        }

    def pad(self, start: int, end: int, pad_token_id: int, ignore_index: int) -> None:
        """Padding from ``start`` to ``end`` of the flattened batch."""
        self._ids_array[start:end] = pad_token_id
        self._label_array[start:end] = ignore_index
        self._position_array[start:end] = 0

    def write(self, start: int, row: RowParts, shifted: bool, ignore_index: int) -> None:
        """The documents of ``row`` from ``start`` of the flattened batch."""
        tokens = row.tokens
        if not tokens:
            return
        end = start + tokens
        torch.cat(row.input_ids, out=self._input_ids.narrow(0, start, tokens))
        count = np.arange(max(row.lengths))
        np.concatenate([count[:length] for length in row.lengths], out=self._position_array[start:end])
        boundaries = np.array(row.boundaries)
        labels = self._label_array[start:end]
        if shifted:
            if row.labels is None:
                labels[:-1] = self._ids_array[start + 1 : end]
            else:
                torch.cat([row.labels[0][1:], *row.labels[1:]], out=self._labels.narrow(0, start, tokens - 1))
            labels[boundaries[1:] - 1] = ignore_index
        else:
            if row.labels is None:
                labels[:] = self._ids_array[start:end]
            else:
                torch.cat(row.labels, out=self._labels.narrow(0, start, tokens))
            labels[boundaries[:-1]] = ignore_index
