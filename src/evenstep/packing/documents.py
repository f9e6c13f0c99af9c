"""Reads the samples of a row and checks that their fields belong together, before any token is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from evenstep.packing.fields import INT32_MAX, Array, as_tensor, common_dim, length_error, own

__all__ = [
    "Documents",
    "Oversized",
    "columns_of",
    "inner_documents",
    "labels_of",
    "read_documents",
    "read_input_ids",
]

Oversized = Literal["error", "single", "truncate"]


@dataclass(frozen=True, slots=True)
class Documents:
    """The samples of a row that have tokens.

    Attributes:
        samples: As given, without the empty ones.
        input_ids: One 1-d integer tensor per sample, cut to the row.
        lengths: Tokens of each sample before it was cut.
        ends: int64 ``[documents]``, where each document ends in the row.
    """

    samples: list[Mapping[str, Any]]
    input_ids: list[torch.Tensor]
    lengths: list[int]
    ends: Array


def read_documents(
    samples: Sequence[Mapping[str, Any]], seq_len: int, oversized: Oversized, documents: str | None
) -> Documents:
    """Checks the samples of a row and finds where their documents end."""
    if oversized not in ("error", "single", "truncate"):
        raise ValueError(f'oversized is {oversized!r}; use "error", "single" or "truncate"')
    if isinstance(seq_len, bool) or not isinstance(seq_len, int | np.integer):
        raise TypeError(f"seq_len is {seq_len!r}, a {type(seq_len).__name__}; it must be an int")
    if not 0 < seq_len <= INT32_MAX:
        raise ValueError(
            f"seq_len is {seq_len}; a row has between 1 and {INT32_MAX} tokens, because its boundaries are int32"
        )
    kept: list[Mapping[str, Any]] = []
    ids: list[torch.Tensor] = []
    for position, sample in enumerate(samples):
        tokens = read_input_ids(sample, position)
        if len(tokens):
            kept.append(sample)
            ids.append(tokens)
    lengths = [len(tokens) for tokens in ids]
    total = sum(lengths)
    if total > INT32_MAX:
        raise ValueError(
            f"the samples have {total} tokens; the boundaries of a row are int32: at most {INT32_MAX}"
        )
    if total > seq_len and (len(ids) > 1 or oversized == "error"):
        what = f"{len(ids)} samples with {total} tokens" if len(ids) > 1 else f"a sample of {total} tokens"
        remedy = (
            "plan the rows with the lengths that are packed"
            if len(ids) > 1
            else 'choose oversized="truncate" or "single", or raise seq_len'
        )
        raise ValueError(
            f"{what} in a row of {seq_len}; {total - seq_len} tokens would be lost; {remedy} "
            f"(lengths {lengths[:8]}{'...' if len(lengths) > 8 else ''})"
        )
    parts = lengths if documents is None else inner_documents(kept, lengths, documents)
    ends = np.cumsum(parts, dtype=np.int64)
    if total > seq_len and oversized == "truncate":
        ids = [ids[0][:seq_len]]
        ends = np.append(ends[ends < seq_len], seq_len)
    return Documents(kept, ids, lengths, ends)


def read_input_ids(sample: Mapping[str, Any], position: int) -> torch.Tensor:
    """The tokens of ``sample`` as a 1-d integer tensor."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        what = (
            f"keys {sorted(map(str, sample))}"
            if isinstance(sample, Mapping)
            else f"a {type(sample).__name__}"
        )
        raise TypeError(
            f'sample {position} of the row is {what}; packing needs a mapping with 1-d integer "input_ids"; '
            "map your dataset to such samples or give your own pack"
        )
    tokens = as_tensor(sample["input_ids"])
    if tokens is None or tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
        shape = "" if tokens is None else f" of shape {list(tokens.shape)} and type {tokens.dtype}"
        raise TypeError(
            f"input_ids of sample {position} of the row is a {type(sample['input_ids']).__name__}{shape}; packing "
            "needs a 1-d sequence of integers"
        )
    return tokens


def inner_documents(samples: list[Mapping[str, Any]], lengths: list[int], name: str) -> list[int]:
    """Lengths of the documents inside all samples, empty ones left out."""
    parts: list[int] = []
    for position, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        inner = [int(n) for n in sample.get(name, (length,))]
        if sum(inner) != length or min(inner) < 0:
            raise ValueError(
                f"field {name!r} of sample {position} of the row says that its documents have {inner} tokens, "
                f"but it has {length}; labels would cross documents; correct the lengths"
            )
        parts += [n for n in inner if n]
    return parts


def labels_of(read: Documents) -> list[torch.Tensor] | None:
    """The labels of every sample, cut to the row; None if no sample has any."""
    if not any("labels" in sample for sample in read.samples):
        return None
    parts: list[torch.Tensor] = []
    for k, (sample, tokens) in enumerate(zip(read.samples, read.input_ids, strict=True)):
        labels = as_tensor(sample.get("labels", tokens))
        length = read.lengths[k] if "labels" in sample else len(tokens)
        if labels is None or labels.shape != (length,) or labels.is_floating_point():
            raise length_error("labels", labels, k, length)
        parts.append(labels[: len(tokens)])
    return parts


def columns_of(
    read: Documents, dims: Mapping[str, int | None]
) -> dict[str, tuple[int, list[torch.Tensor]] | list[Any]]:
    """Per other field: the dimension that counts tokens and its parts, cut to the row, or one value per sample."""
    columns: dict[str, tuple[int, list[torch.Tensor]] | list[Any]] = {}
    for name in dict.fromkeys(name for sample in read.samples for name in sample):
        if name in ("input_ids", "labels"):
            continue
        missing = [k for k, sample in enumerate(read.samples) if name not in sample]
        if missing:
            raise ValueError(
                f"field {name!r} is missing in samples {missing[:8]} of the {len(read.samples)} of a row; its values "
                "would stand beside the wrong tokens; give it to every sample or to none"
            )
        values = [sample[name] for sample in read.samples]
        tensors = [as_tensor(value) for value in values]
        dim = common_dim(name, tensors, read.lengths, dims)
        if dim is None:
            columns[name] = [own(value) for value in values]
        else:
            columns[name] = (
                dim,
                [
                    tensor.narrow(dim, 0, len(tokens))
                    for tensor, tokens in zip(tensors, read.input_ids, strict=True)
                    if tensor is not None
                ],
            )
    return columns
