"""Where the documents of a flat batch stand, and where they go when each is padded for ranks to share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evenstep.packing.fields import Array, round_up
from evenstep.packing.varlen import global_boundaries

__all__ = ["PLACES", "TOKENS", "Places", "boundaries_of", "lengthen", "other_length"]

TOKENS = "input_ids"
PLACES = "cu_seqlens_padded"


@dataclass(frozen=True, slots=True)
class Places:
    """The places of documents before and after.

    Attributes:
        lengths: Real length of each document, int64 ``[n]``.
        starts: Where each will stand, and the end of the last, int64 ``[n + 1]``.
        length: Tokens of the batch now.
        total: Tokens of the batch then.
        old: Where each real token stands, int64 ``[num_tokens]``.
        new: Where it will.
    """

    lengths: Array
    starts: Array
    length: int
    total: int
    old: torch.Tensor
    new: torch.Tensor

    @classmethod
    def of(cls, batch: Any, divisor: int) -> Places | None:
        """The new places; None where all documents stand at multiples of ``divisor`` already."""
        known = batch if isinstance(batch, Mapping) else {}
        real, tokens = known.get("cu_seqlens"), known.get(TOKENS)
        if (
            not isinstance(tokens, torch.Tensor)
            or tokens.numel() != tokens.shape[-1]
            or not isinstance(real, torch.Tensor)
        ):
            shape = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise ValueError(
                "unit='document' divides the documents of one flat sequence, but this batch has input_ids of shape "
                f"{shape} and as cu_seqlens a {type(real).__name__}: nobody could tell where they end. Use "
                "collate=collate_varlen, or unit='row'."
            )
        length = tokens.shape[-1]
        ends: Array = np.asarray(real, dtype=np.int64)
        lengths: Array = np.diff(ends)
        before = np.asarray(batch.get(PLACES, real), dtype=np.int64)[: len(lengths)]
        if PLACES in batch and length % divisor == 0 and not (before % divisor).any():
            return None
        starts = np.concatenate(([0], np.cumsum(round_up(lengths, "divisor", divisor))))
        total = max(int(starts[-1]), int(round_up(length, "divisor", divisor)))
        within = np.arange(int(ends[-1])) - np.repeat(ends[:-1], lengths)
        old = torch.from_numpy(np.repeat(before, lengths) + within)
        return cls(
            lengths, starts, length, total, old, torch.from_numpy(np.repeat(starts[:-1], lengths) + within)
        )

    def move(self, name: str, whole: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """Field ``name`` with its tokens at their new places along ``dim``, and ``fill`` between them."""
        if whole.shape[dim] != self.length:
            raise other_length(name, whole.shape[dim], self.length)
        shape = list(whole.shape)
        shape[dim] = self.total
        out = torch.full(shape, fill, dtype=whole.dtype)
        return out.index_copy_(dim, self.new, whole.index_select(dim, self.old))

    def tell(self, batch: Any) -> Any:
        """``batch``, its tokens moved, with the boundaries that it had told anew."""
        told = global_boundaries(self.lengths, self.starts.copy(), self.total)
        batch = copy.copy(batch)
        batch.update({name: value for name, value in told.items() if name in batch or name == PLACES})
        return batch


def boundaries_of(batch: Any) -> torch.Tensor:
    """Where the documents stand, int ``[documents + 1]``, on the batch's device."""
    places = batch.get(PLACES) if isinstance(batch, Mapping) else None
    if not isinstance(places, torch.Tensor):
        raise ValueError(
            f"unit='document' needs {PLACES!r} in the batch to know where the documents stand; put ShardPad behind the "
            "Packer, or use unit='row'"
        )
    return places


def other_length(name: str, values: int, tokens: int) -> ValueError:
    """What to tell of a field that is not as long as the tokens."""
    return ValueError(
        f"field {name!r} has {values} values along the dimension that is divided by document, others have {tokens}: its "
        "values would stand in the wrong documents. Shard it with unit='row', or not at all."
    )


def lengthen(before: Any, batch: Any, total: int) -> Any:
    """Boundaries that cover all tokens cover the new padding too, as a segment of its own or with the last one."""
    if total == before[TOKENS].shape[-1] or not isinstance(batch.get(PLACES), torch.Tensor):
        return batch
    ends: Array = np.asarray(batch["cu_seqlens"], dtype=np.int64)
    lengths: Array = np.diff(ends)
    starts = np.asarray(batch[PLACES], dtype=np.int64).copy()
    if len(lengths):
        starts[-1] = total
    told = global_boundaries(lengths, starts, total)
    batch = copy.copy(batch)
    batch.update({name: value for name, value in told.items() if name in batch})
    return batch
