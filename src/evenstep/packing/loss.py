"""Counts the labels that will carry a loss, so that the denominator is known before anything is packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from evenstep.packing.documents import inner_documents
from evenstep.packing.fields import as_tensor

__all__ = ["count_loss_tokens"]


def count_loss_tokens(
    sample: Any, seq_len: int | None = None, ignore_index: int = -100, *, documents: str | None = None
) -> int | None:
    """How many labels of ``sample`` carry a loss once ``pack_text`` has packed it, shifted or not.

    Args:
        sample: What ``pack_text`` takes.
        seq_len: Row length that an oversized sample is cut to; None: it is not cut.
        ignore_index: As in ``pack_text``.
        documents: As in ``pack_text``.

    Returns:
        The labels that are not ``ignore_index``, without the first token of each document, which nothing
        predicts; None if the sample is not of this kind.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        return None
    length = len(sample["input_ids"])
    kept = length if seq_len is None else min(length, seq_len)
    if documents is None:
        labels = as_tensor(sample.get("labels"))
        if labels is None or not kept:
            return max(kept - 1, 0)
        loss = labels[:kept] != ignore_index
        return int(torch.count_nonzero(loss)) - int(loss[0])
    parts = inner_documents([sample], [length], documents)
    starts = np.concatenate(([0], np.cumsum(parts, dtype=np.int64)[:-1])) if length else np.empty(0, np.int64)
    starts = starts[starts < kept]
    labels = as_tensor(sample.get("labels"))
    if labels is None:
        return kept - len(starts)
    loss = labels[:kept] != ignore_index
    return int(loss.sum()) - int(loss[torch.from_numpy(starts)].sum())
