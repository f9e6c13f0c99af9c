"""Says to attention which tokens belong together: document ids, masks and the arguments of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["block_diagonal_mask", "document_ids", "document_mask_mod", "thd_arguments"]


def document_ids(batch: Mapping[str, Any]) -> torch.Tensor:
    """The document of every token of a batch, for FlexAttention and masks.

    Args:
        batch: What ``collate_rows`` or ``collate_varlen`` returns, or one row of ``pack_text``.

    Returns:
        int32 of the shape of ``input_ids`` (``[rows, seq_len]``, ``[1, total]`` or ``[seq_len]``): documents count
        from 0 in every row, padding is -1.
    """
    shape = batch["input_ids"].shape
    width = shape[-1]
    per_row = batch["cu_seqlens"] if isinstance(batch["cu_seqlens"], list) else [batch["cu_seqlens"]]
    out = np.full((len(per_row), width), -1, dtype=np.int32)
    for target, cu_seqlens in zip(out, per_row, strict=True):
        boundaries = np.asarray(cu_seqlens, dtype=np.int64)
        lengths = np.diff(boundaries)
        starts = np.asarray(batch.get("cu_seqlens_padded", boundaries), dtype=np.int64)[:-1]
        slots = np.repeat(starts - boundaries[:-1], lengths) + np.arange(boundaries[-1])
        target[slots] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return torch.from_numpy(out).view(shape)


def block_diagonal_mask(ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Which tokens attend to which, as ``scaled_dot_product_attention`` takes it.

    Args:
        ids: ``document_ids``, ``[length]`` or ``[rows, length]``.
        causal: Whether a token sees only those up to itself.

    Returns:
        bool ``[length, length]`` or ``[rows, 1, length, length]``; True where the query (second last dimension) sees
        the key (last). Padding sees padding, so that no softmax is over nothing, which would be NaN.
    """
    mask = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    if causal:
        mask = mask.tril()
    return mask.unsqueeze(-3) if ids.dim() > 1 else mask


def document_mask_mod(ids: torch.Tensor, *, causal: bool = True) -> Callable[..., torch.Tensor]:
    """The mask of FlexAttention: give it to ``torch.nn.attention.flex_attention.create_block_mask``.

    Args:
        ids: ``document_ids`` of a batch, ``[rows, length]``, on the device of the attention.
        causal: Whether a token sees only those up to itself.
    """

    def same_document(
        row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        same = ids[row, query] == ids[row, key]
        return same & (query >= key) if causal else same

    return same_document


def thd_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Transformer Engine's ``DotProductAttention`` in the ``thd`` layout.

    Args:
        batch: What ``collate_varlen`` returns.

    Returns:
        ``cu_seqlens_q``, ``cu_seqlens_kv`` (real lengths), ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded`` (where the
        documents stand), int32 ``[documents + 1]``; ``max_seqlen_q``, ``max_seqlen_kv``: the longest place of a
        document, an int.
    """
    real, padded = batch["cu_seqlens"], batch["cu_seqlens_padded"]
    longest = int(padded.diff().max()) if len(padded) > 1 else 0
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
