"""Works out, from where documents end in a row, what labels, positions and boundaries follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from evenstep.packing.fields import Array

__all__ = ["boundaries", "mask_labels", "positions", "shift"]


def mask_labels(labels: torch.Tensor, ends: Array, shifted: bool, ignore_index: int) -> None:
    """Takes the loss from every token that would be predicted from another document; in place."""
    if shifted:
        shift(labels, ends, 0, ignore_index)
    else:
        starts = np.concatenate(([0], ends[:-1]))
        labels[torch.from_numpy(starts)] = ignore_index


def shift(column: torch.Tensor, ends: Array, dim: int, fill: float) -> None:
    """Moves what belongs to token t + 1 to t along ``dim``, ``fill`` at the last token of every document."""
    total = int(ends[-1])
    moved = column.narrow(dim, 1, total - 1).clone()
    column.narrow(dim, 0, total - 1).copy_(moved)
    column.index_fill_(dim, torch.from_numpy(ends - 1), fill)


def positions(ends: Array, length: int) -> torch.Tensor:
    """int64 ``[length]``: 0, 1, 2... from the start of each document, 0 behind the last."""
    total = int(ends[-1]) if len(ends) else 0
    starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    out = np.zeros(length, dtype=np.int64)
    np.subtract(np.arange(total), np.repeat(starts, ends - starts), out=out[:total])
    return torch.from_numpy(out)


def boundaries(ends: Array) -> dict[str, Any]:
    """``cu_seqlens``, ``max_seqlen`` and ``num_tokens`` of documents that end at ``ends``."""
    cu_seqlens = np.zeros(len(ends) + 1, dtype=np.int32)
    cu_seqlens[1:] = ends
    return {
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "max_seqlen": int(np.diff(cu_seqlens).max()) if len(ends) else 0,
        "num_tokens": int(cu_seqlens[-1]),
    }
