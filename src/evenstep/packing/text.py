"""Packs documents into one row: where labels, positions and boundaries are decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from evenstep.packing.fields import (
    INT32_MAX,
    Array,
    Padding,
    as_tensor,
    common_dim,
    concatenate,
    length_error,
    own,
    token_dim,
)

__all__ = ["LABEL_FIELDS", "Oversized", "count_loss_tokens", "pack_text", "padding_row"]

Oversized = Literal["error", "single", "truncate"]

# Fields that weigh or mask the loss of a token belong to its label and move with it.
LABEL_FIELDS = ("loss_weights", "loss_mask")


def pack_text(
    samples: Sequence[Mapping[str, Any]],
    seq_len: int,
    *,
    pad_token_id: int = 0,
    ignore_index: int = -100,
    shifted: bool = False,
    oversized: Oversized = "error",
    pad_values: Mapping[str, float] | None = None,
    label_fields: Sequence[str] = LABEL_FIELDS,
    token_dims: Mapping[str, int | None] | None = None,
    documents: str | None = None,
) -> dict[str, Any]:
    """Lays documents one after another into a row of ``seq_len`` tokens.

    A sample is a mapping with 1-d integer ``input_ids`` (tensor, array or list) and optionally ``labels`` of the
    same length, given for the token at the same position, as in Hugging Face models; without them the labels are
    the tokens. Samples without tokens take nothing.

    Every other field must be in all samples. One with a dimension as long as ``input_ids`` (the last one, else
    the first: ``[L]``, ``[3, L]``, ``[L, width]``) goes along token by token and is padded with its value in
    ``pad_values``, else 0; ``position_ids`` of the samples replace those made here. Any other field (an index, a
    string, an image) becomes a list with one value per sample. ``cu_seqlens``, ``max_seqlen`` and ``num_tokens``
    of samples give way to those of the row.

    Args:
        samples: The documents of the row, in order.
        seq_len: Tokens of the row.
        pad_token_id: ``input_ids`` of padding.
        ignore_index: Label of tokens without a loss: padding, and those that no token of their document precedes.
        shifted: False: ``labels[t]`` is the target at token ``t``, and the model shifts (Hugging Face).
            True: ``labels[t]`` is the target of the prediction made at ``t``, token ``t + 1`` of the same document.
        oversized: What becomes of a sample longer than ``seq_len``, which must be alone: ``"error"``, ``"single"``
            (the row is as long as it), ``"truncate"`` (its first ``seq_len`` tokens stay).
        pad_values: Padding of other per-token fields by name.
        label_fields: Per-token fields that move with the labels when ``shifted``.
        token_dims: Which dimension of a field counts tokens, None for a field that is not per token; for fields
            whose shape does not tell.
        documents: Name of a sample field with the lengths of the documents inside the sample, if samples have
            several that do not attend to each other.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` (int64 ``[seq_len]``, positions restart at 0 in every document
        and are 0 on padding), the other fields, ``cu_seqlens`` (int32 ``[documents + 1]``, from 0 to
        ``num_tokens``, strictly increasing), ``max_seqlen`` and ``num_tokens`` (ints). Nothing shares storage with the samples.

    Raises:
        ValueError: The samples do not fit, or fields disagree in length or presence.
        TypeError: A sample is no mapping or its tokens are no integers.
    """
    padding = Padding(pad_token_id, ignore_index, pad_values or {})
    read = read_documents(samples, seq_len, oversized, documents)
    if not read.samples:
        return padding_row(seq_len=int(seq_len), pad_token_id=pad_token_id, ignore_index=ignore_index)
    if oversized == "single":
        seq_len = max(seq_len, int(read.ends[-1]))
    labels = _labels(read)
    input_ids = concatenate(read.input_ids, 0, seq_len, pad_token_id, torch.int64)
    if labels is None:
        target = input_ids.clone()
        target[int(read.ends[-1]) :] = ignore_index
    else:
        target = concatenate(labels, 0, seq_len, ignore_index, torch.int64)
    mask_labels(target, read.ends, shifted, ignore_index)
    row: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": target,
        "position_ids": None,
    }
    for name, column in _columns(read, token_dims or {}).items():
        if isinstance(column, list):
            row[name] = column
            continue
        dim, parts = column
        row[name] = concatenate(parts, dim, seq_len, padding.of(name))
        if shifted and name in label_fields:
            _shift(row[name], read.ends, dim, padding.of(name))
    if row["position_ids"] is None:
        row["position_ids"] = positions(read.ends, seq_len)
    row.update(boundaries(read.ends))
    return row


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
    parts = lengths if documents is None else _inner_documents(kept, lengths, documents)
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


def _inner_documents(samples: list[Mapping[str, Any]], lengths: list[int], name: str) -> list[int]:
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


def _labels(read: Documents) -> list[torch.Tensor] | None:
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


def _columns(
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


def mask_labels(labels: torch.Tensor, ends: Array, shifted: bool, ignore_index: int) -> None:
    """Takes the loss from every token that would be predicted from another document; in place."""
    if shifted:
        _shift(labels, ends, 0, ignore_index)
    else:
        starts = np.concatenate(([0], ends[:-1]))
        labels[torch.from_numpy(starts)] = ignore_index


def _shift(column: torch.Tensor, ends: Array, dim: int, fill: float) -> None:
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
        like: A row whose fields, types and shapes it repeats; None: the fields that ``pack_text`` always makes.
            Collating gives it the other fields of its batch.
        seq_len: Its tokens; None: as many as ``like``.
        pad_token_id: As in ``pack_text``.
        ignore_index: As in ``pack_text``.
        pad_values: As in ``pack_text``.

    Raises:
        ValueError: Neither ``like`` nor ``seq_len`` is given.
    """
    if seq_len is None:
        if like is None:
            raise ValueError("a padding row needs its length; give seq_len, or a row to be like")
        seq_len = len(like["input_ids"])
    padding = Padding(pad_token_id, ignore_index, pad_values or {})
    row: dict[str, Any] = {
        name: torch.full((seq_len,), int(padding.of(name)), dtype=torch.int64)
        for name in ("input_ids", "labels", "position_ids")
    }
    for name, value in ({} if like is None else like).items():
        if isinstance(value, torch.Tensor):
            dim = token_dim(name, value, len(like["input_ids"]), {}) if like is not None else None
            shape = list(value.shape)
            if dim is not None:
                shape[dim] = seq_len
            elif value.dim():
                shape[0] = 0
            row[name] = torch.full(shape, padding.of(name), dtype=value.dtype)
        elif isinstance(value, list):
            row[name] = []
    row.update(boundaries(np.empty(0, dtype=np.int64)))
    return row


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
    parts = [length] if documents is None else _inner_documents([sample], [length], documents)
    starts = np.concatenate(([0], np.cumsum(parts, dtype=np.int64)[:-1])) if length else np.empty(0, np.int64)
    starts = starts[starts < kept]
    labels = as_tensor(sample.get("labels"))
    if labels is None:
        return kept - len(starts)
    loss = labels[:kept] != ignore_index
    return int(loss.sum()) - int(loss[torch.from_numpy(starts)].sum())
