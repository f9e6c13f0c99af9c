"""How others lay out the documents of an optimizer step: plain rules on lengths, for the same room in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from evenstep.packing import collate_varlen, pack_text
from evenstep.samples import BatchInfo

__all__ = [
    "Lengths",
    "by_length",
    "deal",
    "micro_batches",
    "packed_batch",
    "packed_rows",
    "padded_batch",
]

T = TypeVar("T")
Lengths = npt.NDArray[np.int64]
_NO_LOSS = -100


def deal(documents: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The documents of one rank: every ``ranks``-th, as `torch.utils.data.DistributedSampler` deals them."""
    return list(documents[rank::ranks])


def by_length(lengths: Lengths, documents: Sequence[int]) -> list[int]:
    """``documents`` from the longest to the shortest: a megabatch of transformers' ``group_by_length``."""
    return sorted(documents, key=lambda document: -int(lengths[document]))


def micro_batches(units: Sequence[T], size: int) -> list[list[T]]:
    """``size`` consecutive documents or rows each; the last may have fewer."""
    return [list(units[at : at + size]) for at in range(0, len(units), size)]


def packed_rows(
    lengths: Lengths, documents: Sequence[int], seq_len: int, generator: np.random.Generator
) -> list[list[int]]:
    """Rows of ``seq_len`` tokens by best-fit decreasing, in random order, as a trainer shuffles a packed data set."""
    rows: list[list[int]] = []
    free: list[int] = []
    for document in by_length(lengths, documents):
        length = int(lengths[document])
        fitting = [row for row, room in enumerate(free) if room >= length]
        if fitting:
            best = min(fitting, key=free.__getitem__)
            rows[best].append(document)
            free[best] -= length
        else:
            rows.append([document])
            free.append(seq_len - length)
    return [rows[row] for row in generator.permutation(len(rows))]


def padded_batch(samples: Sequence[dict[str, Any]], info: BatchInfo) -> dict[str, Any]:
    """Documents side by side, each padded to the longest; the model computes the padding as it does in a rectangle."""
    longest = max((len(sample["input_ids"]) for sample in samples), default=0)
    input_ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, _NO_LOSS)
    for line, sample in enumerate(samples):
        tokens = sample["input_ids"]
        input_ids[line, : len(tokens)] = tokens
        labels[line, 1 : len(tokens)] = tokens[1:]
    return {
        "input_ids": input_ids.view(1, -1),
        "labels": labels.view(1, -1),
        "position_ids": torch.arange(longest).repeat(1, len(samples)),
        "cu_seqlens": torch.arange(len(samples) + 1, dtype=torch.int32) * longest,
        "sample": [sample["sample"] for sample in samples],
        "info": info,
    }


def packed_batch(rows: Sequence[Sequence[dict[str, Any]]], info: BatchInfo, seq_len: int) -> dict[str, Any]:
    """Documents one after another with attention inside each; nothing is padded."""
    if not rows:
        return padded_batch([], info)
    return {**collate_varlen([pack_text(row, seq_len) for row in rows]), "info": info}
