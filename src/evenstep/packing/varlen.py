"""Joins packed rows into one flat sequence with global boundaries, as variable-length attention kernels take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evenstep.packing.collate import check_rows, describe, num_tokens
from evenstep.packing.fields import INT32_MAX, Array, Padding, concatenate, round_up

__all__ = ["collate_varlen"]


def collate_varlen(
    rows: Sequence[Mapping[str, Any]],
    *,
    pad_to_multiple_of: int = 1,
    pad_documents_to_multiple_of: int = 1,
    pad_to: int | None = None,
    pad_token_id: int = 0,
    ignore_index: int = -100,
    pad_values: Mapping[str, float] | None = None,
    token_dims: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Joins the documents of all rows into one sequence ``[1, total]``; the padding of the rows is left out.

    Two kinds of boundaries come back, because kernels read them differently. ``cu_seqlens`` and
    ``cu_seqlens_padded`` describe the real documents, as Transformer Engine takes them for its ``thd`` layout
    (``cu_seqlens_q`` and ``cu_seqlens_q_padded``). ``cu_seq_lens_q`` and ``cu_seq_lens_k``, the names of
    transformers, cover every token: padding is a segment of its own, because flash-attention leaves the output of
    tokens outside of all segments uninitialised, and a NaN there poisons the gradients of the weights. Without
    padding all four are equal.

    Args:
        rows: At least one row of ``pack_text``.
        pad_to_multiple_of: ``total`` becomes a multiple of this (8 or 64 for tensor cores, twice the context-parallel
            size); the padding stands at the end.
        pad_documents_to_multiple_of: Every document becomes a multiple of this (twice the context-parallel size for
            Transformer Engine); the padding stands behind each. Plan with the padded lengths, or rows outgrow memory.
        pad_to: ``total`` itself, for static shapes; ``pad_to_multiple_of`` must divide it.
        pad_token_id: As in ``pack_text``.
        ignore_index: As in ``pack_text``.
        pad_values: As in ``pack_text``.
        token_dims: As in ``pack_text``.

    Returns:
        Per-token fields with a dimension of size 1 before their token dimension (``[1, total]``,
        ``[3, 1, total]``, ``[1, total, width]``); other tensors concatenated in row order; per-sample lists
        joined into one; ``cu_seqlens`` int32 ``[documents + 1]``, cumulative real lengths from 0 to
        ``num_tokens``, strictly increasing; ``cu_seqlens_padded`` int32 ``[documents + 1]``, where the documents
        start, and ``total``; ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 ``[segments + 1]`` from 0 to ``total``; ``max_seqlen``, ``max_length_q``,
        ``max_length_k``, ``num_tokens``: ints. Without any document the sequence is padding of ``pad_to_multiple_of`` tokens.

    Raises:
        ValueError: No rows, rows with different fields, or more tokens than int32 boundaries can count.
    """
    padding = Padding(pad_token_id, ignore_index, pad_values or {})
    names = check_rows(rows, boundaries=True)
    lengths = np.concatenate([_lengths(row, k) for k, row in enumerate(rows)])
    padded = round_up(lengths, "pad_documents_to_multiple_of", pad_documents_to_multiple_of)
    total = flat_length(int(padded.sum()), pad_to_multiple_of, pad_to)
    starts = np.concatenate(([0], np.cumsum(padded)))
    slots = None
    if pad_documents_to_multiple_of > 1:
        real_starts = np.cumsum(lengths) - lengths
        slots = torch.from_numpy(
            np.repeat(starts[:-1] - real_starts, lengths) + np.arange(int(lengths.sum()))
        )
    batch: dict[str, Any] = {}
    for name in names:
        example, dim = describe(name, rows, token_dims or {})
        if dim is not None:
            batch[name] = _join(name, rows, example, dim, total, padding.of(name), slots)
        elif isinstance(example, torch.Tensor) and example.dim():
            batch[name] = torch.cat([row[name] for row in rows if name in row])
        elif isinstance(example, list):
            batch[name] = [value for row in rows for value in row.get(name, [])]
        else:
            batch[name] = [row.get(name) for row in rows]
    batch.update(global_boundaries(lengths, starts, total))
    return batch


def _lengths(row: Mapping[str, Any], position: int) -> Array:
    """Tokens of each document of ``row``, int64."""
    boundaries = np.asarray(row["cu_seqlens"], dtype=np.int64)
    tokens = num_tokens(row)
    if boundaries[0] != 0 or boundaries[-1] != tokens or (np.diff(boundaries) < 1).any():
        raise ValueError(
            f"cu_seqlens of row {position} is {boundaries.tolist()}, but the row has {tokens} tokens; documents would be read "
            "from wrong places; give strictly increasing boundaries of the real documents, from 0 to num_tokens"
        )
    return np.diff(boundaries)


def flat_length(tokens: int, pad_to_multiple_of: int, pad_to: int | None) -> int:
    """Length of the flat sequence that holds ``tokens`` tokens, at least 1."""
    total = round_up(max(tokens, 1), "pad_to_multiple_of", pad_to_multiple_of)
    if pad_to is not None:
        if pad_to < total or pad_to % pad_to_multiple_of:
            raise ValueError(
                f"pad_to is {pad_to}, but the documents take {total} tokens in multiples of {pad_to_multiple_of}; they would "
                "be cut; give the largest micro-batch, rounded up to pad_to_multiple_of"
            )
        total = pad_to
    if total > INT32_MAX:
        raise ValueError(
            f"the rows have {total} tokens together; the boundaries of attention kernels are int32 and would overflow "
            f"above {INT32_MAX}; use fewer or shorter rows per micro-batch"
        )
    return total


def global_boundaries(lengths: Array, starts: Array, total: int) -> dict[str, Any]:
    """The boundaries of documents of ``lengths`` (int64 ``[n]``) that stand at ``starts[:-1]`` of ``total`` tokens."""
    real = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=real[1:])
    memory = starts.astype(np.int32)
    memory[-1] = total if len(lengths) else 0
    if int(real[-1]) == total:
        segments = real
    else:
        segments = np.unique(np.concatenate((starts, starts[:-1] + lengths, [total]))).astype(np.int32)
    longest = int(lengths.max()) if len(lengths) else 0
    longest_segment = int(np.diff(segments).max())
    return {
        "cu_seqlens": torch.from_numpy(real),
        "cu_seqlens_padded": torch.from_numpy(memory),
        "max_seqlen": longest,
        "cu_seq_lens_q": torch.from_numpy(segments.copy()),
        "cu_seq_lens_k": torch.from_numpy(segments.copy()),
        "max_length_q": longest_segment,
        "max_length_k": longest_segment,
        "num_tokens": int(real[-1]),
    }


def _join(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    example: torch.Tensor,
    dim: int,
    total: int,
    pad: float,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    parts = [row[name].narrow(dim, 0, num_tokens(row)) for row in rows if num_tokens(row)]
    if not parts:
        parts = [example.narrow(dim, 0, 0)]
    if slots is None:
        return concatenate(parts, dim, total, pad).unsqueeze(dim)
    tokens = concatenate(parts, dim, len(slots), pad)
    shape = list(tokens.shape)
    shape[dim] = total
    return torch.full(shape, pad, dtype=tokens.dtype).index_copy_(dim, slots, tokens).unsqueeze(dim)
