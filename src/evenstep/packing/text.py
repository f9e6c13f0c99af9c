"""Packs documents into one row: where labels, positions and boundaries are decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenstep.packing.documents import Oversized, columns_of, labels_of, read_documents
from evenstep.packing.fields import Padding, concatenate
from evenstep.packing.layout import boundaries, mask_labels, positions, shift
from evenstep.packing.padding import padding_row

__all__ = ["LABEL_FIELDS", "pack_text"]

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
        pad_values: Padding of other per-token fields by name. A row without samples has these fields too, ``[seq_len]``
            of the type of the value: int64 for an int, float32 for a float, a NumPy scalar's own.
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
        return padding_row(
            seq_len=int(seq_len),
            pad_token_id=pad_token_id,
            ignore_index=ignore_index,
            pad_values=padding.values,
        )
    if oversized == "single":
        seq_len = max(seq_len, int(read.ends[-1]))
    labels = labels_of(read)
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
    dims = {**(token_dims or {}), **({documents: None} if documents else {})}
    for name, column in columns_of(read, dims).items():
        if isinstance(column, list):
            row[name] = column
            continue
        dim, parts = column
        row[name] = concatenate(parts, dim, seq_len, padding.of(name))
        if shifted and name in label_fields:
            shift(row[name], read.ends, dim, padding.of(name))
    if row["position_ids"] is None:
        row["position_ids"] = positions(read.ends, seq_len)
    row.update(boundaries(read.ends))
    return row
