"""Lets a collator of samples, as Hugging Face trainers have, stand as pack and collate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["from_collator"]

Sample = Mapping[str, Any]


def from_collator(
    collator: Callable[[list[dict[str, Any]]], Any], *, pad_token_id: int = 0, ignore_index: int = -100
) -> tuple[Callable[[Sequence[Sample], int], Any], Callable[[Sequence[Any]], Any]]:
    """``(pack, collate)`` of a collator that takes samples and packs them itself.

    For example ``DataCollatorWithFlattening()`` of transformers and ``DataCollatorForLanguageModeling(...,
    padding_free=True)`` of TRL. Rows keep their samples, and the collator gets those of all rows of a micro-batch in row
    order; tensors and arrays of one dimension become lists, which these collators expect. If a sample has ``labels``, the
    others get their tokens, since collators look at the first sample only. What a collator does not know, it drops.

    Args:
        collator: Callable with one argument, a list of samples.
        pad_token_id: Token of the sample that stands for a micro-batch without samples.
        ignore_index: Its label.
    """
    return _keep, partial(_collate, collator, pad_token_id, ignore_index)


def _keep(samples: Sequence[Sample], seq_len: int) -> list[dict[str, Any]]:
    kept = [{name: _listed(value) for name, value in sample.items()} for sample in samples]
    kept = [sample for sample in kept if len(sample["input_ids"])]
    total = sum(len(sample["input_ids"]) for sample in kept)
    if total > seq_len:
        raise ValueError(
            f"{len(kept)} samples with {total} tokens in a row of {seq_len}; the micro-batch would take more memory "
            "than planned; plan the rows with the lengths that are packed"
        )
    return kept


def _collate(
    collator: Callable[[list[dict[str, Any]]], Any], pad_token_id: int, ignore_index: int, rows: Sequence[Any]
) -> Any:
    # evenstep's own padding rows are mappings and have no samples.
    samples = [sample for row in rows if not isinstance(row, Mapping) for sample in row]
    if not samples:
        return collator([{"input_ids": [pad_token_id], "labels": [ignore_index]}])
    if any("labels" in sample for sample in samples):
        samples = [
            sample if "labels" in sample else {**sample, "labels": sample["input_ids"]} for sample in samples
        ]
    return collator(samples)


def _listed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.dim() == 1 else value.clone()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else value.copy()
    return list(value) if isinstance(value, list) else value
