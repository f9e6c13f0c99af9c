"""Makes the row of a rank that has no samples left, which its model still has to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from evenstep.packing.fields import Padding, as_tensor, token_dim
from evenstep.packing.layout import boundaries

__all__ = ["padding_row"]


def padding_row(
    like: Mapping[str, Any] | None = None,
    *,
    seq_len: int | None = None,
    pad_token_id: int = 0,
    ignore_index: int = -100,
    pad_values: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A row without documents: ``num_tokens`` 0, ``cu_seqlens`` [0], every label ignored.

    Args:
        like: A row, of any pack, whose fields, types and shapes it repeats; None: the fields that ``pack_text`` always
            makes, and those named in ``pad_values``. The built-in collates give it the other fields of its batch.
        seq_len: Its tokens; None: as many as ``like``.
        pad_token_id: As in ``pack_text``.
        ignore_index: As in ``pack_text``.
        pad_values: As in ``pack_text``: without ``like`` each is a field ``[seq_len]`` of the type of its value.

    Raises:
        ValueError: Neither ``like`` nor ``seq_len`` is given.
    """
    if seq_len is None:
        if like is None:
            raise ValueError("a padding row needs its length; give seq_len, or a row to be like")
        seq_len = len(like["input_ids"])
    padding = Padding(pad_token_id, ignore_index, pad_values or {})
    nothing = boundaries(np.empty(0, dtype=np.int64))
    if like is None:
        tokens = {
            name: torch.full((seq_len,), int(padding.of(name)), dtype=torch.int64)
            for name in ("input_ids", "labels", "position_ids")
        }
        declared = {
            name: torch.full((seq_len,), value, dtype=torch.as_tensor(value).dtype)
            for name, value in padding.values.items()
            if name not in tokens and name not in nothing
        }
        return {**tokens, **declared, **nothing}
    length = len(like["input_ids"])
    listed = isinstance(like["input_ids"], list)
    row: dict[str, Any] = {}
    for name, value in like.items():
        if name in nothing:
            row[name] = nothing[name]
        elif isinstance(value, list) and not listed:
            row[name] = []
        else:
            row[name] = _emptied(name, value, length, seq_len, padding.of(name))
    return row


def _emptied(name: str, value: Any, length: int, seq_len: int, pad: float) -> Any:
    """A value of the kind of ``value`` for a row of ``seq_len`` padding tokens."""
    tensor = as_tensor(value)
    if tensor is None:
        return value if not isinstance(value, int | float) else type(value)(0)
    shape = list(tensor.shape)
    dim = token_dim(name, tensor, length, {})
    if dim is not None:
        shape[dim] = seq_len
    elif shape:
        shape[0] = 0
    emptied = torch.full(shape, pad, dtype=tensor.dtype)
    if isinstance(value, np.ndarray):
        return emptied.numpy()
    return emptied.tolist() if isinstance(value, list) else emptied
