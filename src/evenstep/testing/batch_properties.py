"""What is true of every rightly collated batch, padded or flat: each row keeps its documents and their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evenstep.packing.fields import as_tensor
from evenstep.testing.document_marks import Places, numbers, wrong_length
from evenstep.testing.pack_properties import (
    Broken,
    Conventions,
    Expected,
    broken,
    check_boundaries,
    check_marks,
    check_values,
)

__all__ = ["check_batch"]

BOUNDARY_FIELDS = frozenset({"cu_seqlens", "max_seqlen", "num_tokens"})
FLAT_MARKS = frozenset({"cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens_padded"})


def check_batch(batch: Any, rows: Sequence[Any], expected: Sequence[Expected], c: Conventions) -> None:
    """Every property of a collated batch: the documents of all rows, in either layout.

    Raises:
        Broken: One does not hold.
    """
    if not isinstance(batch, Mapping):
        broken("batch", f"collate returned a {type(batch).__name__}; a batch must be a mapping of fields")
    _check_fields(batch, rows, expected)
    ids, labels = as_tensor(batch["input_ids"]), as_tensor(batch["labels"])
    if ids is None or labels is None or ids.shape != labels.shape or ids.dim() not in (1, 2):
        broken(
            "field length",
            "input_ids and labels of the batch are not two tensors of one shape [rows, tokens]",
        )
    flat = _is_flat(batch, ids, expected)
    places = _places(batch, ids, expected, flat)
    _check_counts(batch, expected)
    real = torch.zeros(ids.numel(), dtype=torch.bool)
    for k, one in enumerate(expected):
        for at, start, end in places[k]:
            if at + end - start > len(real):
                broken("lost tokens", f"the batch ends before the {one.tokens} tokens of row {k}")
            real[at : at + end - start] = True
        for name, (_, right) in one.columns.items():
            tensor = as_tensor(batch[name]) if name in batch else None
            if tensor is None or tensor.shape != ids.shape:
                continue  # Several values to a token: where they stand is the collate's convention.
            values = tensor.reshape(-1)
            found = torch.cat([values[at : at + end - start] for at, start, end in places[k]] or [values[:0]])
            try:
                check_values(name, found, right, 0, one, c)
            except Broken as error:
                broken(error.property, f"in row {k} of the batch, {error.detail}")
    in_memory = [[(at, at + end - start) for at, start, end in row] for row in places]
    width = ids.numel() if flat else ids.shape[1]
    if flat:
        spans = [[span for row in in_memory for span in row]]
    else:
        spans = [[(a - k * width, b - k * width) for a, b in row] for k, row in enumerate(in_memory)]
    _check_marks(batch, Places(width, spans), expected)
    padding = labels.reshape(-1)[~real]
    if bool((padding != c.ignore_index).any()):
        wrong = padding[padding != c.ignore_index][0].item()
        broken("padding label", f"padding of the batch has the label {wrong}; it must be {c.ignore_index}")


def _check_fields(batch: Mapping[str, Any], rows: Sequence[Any], expected: Sequence[Expected]) -> None:
    # A row without samples is evenstep's, with fields that another kind of rows need not have.
    filled = [
        row for row, one in zip(rows, expected, strict=True) if one.samples and isinstance(row, Mapping)
    ]
    in_rows = [name for row in filled for name in row]
    in_samples = [name for one in expected for sample in one.samples for name in sample]
    for holder, names in (("rows", in_rows), ("samples", in_samples)):
        for name in dict.fromkeys(("input_ids", "labels", *names)):
            if name not in batch and name not in BOUNDARY_FIELDS:
                broken(
                    "lost field",
                    f"the {holder} have {name!r}, the batch has not (it has {sorted(map(str, batch))})",
                )


def _check_counts(batch: Mapping[str, Any], expected: Sequence[Expected]) -> None:
    """Real tokens, of the batch or of each row."""
    found, right = numbers(batch.get("num_tokens")), [one.tokens for one in expected]
    if len(found) == 1:
        right = [sum(right)]
    if len(found) == len(right) and found != right:
        told = ", ".join(f"{count:g}" for count in found)
        must = ", ".join(map(str, right))
        broken("boundaries", f"num_tokens of the batch is {told}, but it is {must} for these documents")


def _check_marks(batch: Mapping[str, Any], places: Places, expected: Sequence[Expected]) -> None:
    problem = wrong_length(batch, places, ("max_seqlen",))
    if problem is not None:
        broken("boundaries", f"in the batch, {problem}")
    try:
        check_marks("batch", batch, places, expected)
    except Broken as error:
        if error.detail.startswith("nothing in the batch"):
            raise
        broken(error.property, f"in the batch, {error.detail}")


def _is_flat(batch: Mapping[str, Any], ids: torch.Tensor, expected: Sequence[Expected]) -> bool:
    if ids.dim() == 1 or len(ids) != len(expected):
        return True
    return len(ids) == 1 and not FLAT_MARKS.isdisjoint(batch)


def _places(
    batch: Mapping[str, Any], ids: torch.Tensor, expected: Sequence[Expected], flat: bool
) -> list[list[tuple[int, int, int]]]:
    """Per row, for each document: its place in the flattened batch, its start and its end in the row."""
    if not flat:
        width = ids.shape[1]
        return [
            [(k * width + start, start, end) for start, end in zip(one.starts, one.ends, strict=True)]
            for k, one in enumerate(expected)
        ]
    lengths = [end - start for one in expected for start, end in zip(one.starts, one.ends, strict=True)]
    right = [0, *np.cumsum(lengths, dtype=int).tolist()]
    memory = as_tensor(batch.get("cu_seqlens_padded", right))
    if "cu_seqlens" in batch:
        check_boundaries("cu_seqlens of the batch", batch["cu_seqlens"], right)
    at = iter([] if memory is None else memory.tolist())
    return [
        [(int(next(at)), start, end) for start, end in zip(one.starts, one.ends, strict=True)]
        for one in expected
    ]
