"""Stacks packed rows into a padded batch ``[rows, seq_len]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from evenstep.packing.fields import Padding, round_up, token_dim

__all__ = ["collate_rows"]

_BOUNDARY_FIELDS = ("cu_seqlens", "max_seqlen", "num_tokens")


def collate_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int = 0,
    ignore_index: int = -100,
    pad_values: Mapping[str, float] | None = None,
    pad_to_multiple_of: int = 1,
    token_dims: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Stacks rows of ``pack_text`` into one batch, padded to the longest row.

    The attention of the model must stay inside documents. transformers finds them in ``position_ids`` if it is called
    with ``use_cache=False`` and without ``attention_mask``; others take ``block_diagonal_mask(document_ids(batch))``.

    Args:
        rows: At least one row. A row without tokens (``padding_row``) may lack fields that others have.
        pad_token_id: As in ``pack_text``; used where rows differ in length (``oversized="single"``).
        ignore_index: As in ``pack_text``.
        pad_values: As in ``pack_text``.
        pad_to_multiple_of: The batch is padded to a multiple of this many tokens.
        token_dims: As in ``pack_text``.

    Returns:
        Per-token fields with the rows before their token dimension (``[L]`` to ``[rows, L]``, ``[3, L]`` to
        ``[3, rows, L]`` as Hugging Face's multimodal positions, ``[L, width]`` to ``[rows, L, width]``); other
        tensors concatenated in row order; per-sample lists as one list per row; ``cu_seqlens``: list of one
        int32 tensor per row; ``max_seqlen`` (the longest document) and ``num_tokens`` (of all rows): ints.

    Raises:
        ValueError: No rows, or rows with different fields.
    """
    padding = Padding(pad_token_id, ignore_index, pad_values or {})
    names = check_rows(rows)
    length = round_up(max(len(row["input_ids"]) for row in rows), "pad_to_multiple_of", pad_to_multiple_of)
    batch: dict[str, Any] = {}
    for name in names:
        example, dim = describe(name, rows, token_dims or {})
        if dim is not None:
            batch[name] = _stack(name, rows, example, dim, length, padding.of(name))
        elif isinstance(example, torch.Tensor) and example.dim():
            batch[name] = torch.cat([row[name] for row in rows if name in row])
        else:
            batch[name] = [row.get(name, [] if isinstance(example, list) else None) for row in rows]
    if all("cu_seqlens" in row for row in rows):
        batch["cu_seqlens"] = [row["cu_seqlens"].clone() for row in rows]
    if all("max_seqlen" in row for row in rows):
        batch["max_seqlen"] = max(int(row["max_seqlen"]) for row in rows)
    batch["num_tokens"] = sum(map(num_tokens, rows))
    return batch


def check_rows(rows: Sequence[Mapping[str, Any]], *, boundaries: bool = False) -> list[str]:
    """The fields of the batch but for the boundaries, in their order of appearance.

    Raises:
        ValueError: There are no rows.
        TypeError: A row is no mapping with ``input_ids``, or (``boundaries``) without ``cu_seqlens``.
    """
    if not rows:
        raise ValueError(
            "there are no rows to collate; a micro-batch has at least one, if only a padding row"
        )
    needed = ("input_ids", "cu_seqlens") if boundaries else ("input_ids",)
    for k, row in enumerate(rows):
        lacking = [name for name in needed if not isinstance(row, Mapping) or name not in row]
        if lacking:
            what = f"keys {sorted(map(str, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise TypeError(
                f"row {k} is {what}; without {' and '.join(lacking)} it cannot be collated; pack with pack_text, or give "
                "your own collate with your own pack"
            )
    # What only a padding row has was declared, not met: rows with tokens know the fields of their batch.
    telling = [row for row in rows if num_tokens(row)] or rows
    return [name for name in dict.fromkeys(n for row in telling for n in row) if name not in _BOUNDARY_FIELDS]


def num_tokens(row: Mapping[str, Any]) -> int:
    """Real tokens of a row; all of it where its maker does not say."""
    if "num_tokens" in row:
        return int(row["num_tokens"])
    return int(row["cu_seqlens"][-1]) if "cu_seqlens" in row else len(row["input_ids"])


def describe(
    name: str, rows: Sequence[Mapping[str, Any]], dims: Mapping[str, int | None]
) -> tuple[Any, int | None]:
    """An example value of field ``name``, which some row has, and the dimension of it that counts tokens, if any.

    Raises:
        ValueError: A row with tokens lacks a per-token field or a per-sample list.
    """
    # A padding row knows nothing of the fields of its batch: rows with tokens are asked first.
    row = next(row for row in sorted(rows, key=lambda row: num_tokens(row) == 0) if name in row)
    example = row[name]
    dim = token_dim(name, example if isinstance(example, torch.Tensor) else None, len(row["input_ids"]), dims)
    if dim is not None or isinstance(example, list):
        missing = [k for k, row in enumerate(rows) if name not in row and num_tokens(row)]
        if missing:
            raise ValueError(
                f"field {name!r} is missing in rows {missing[:8]} of the {len(rows)} of a batch; its values would stand "
                "beside the wrong tokens; give it to every sample or to none"
            )
    return example, dim


def _stack(
    name: str, rows: Sequence[Mapping[str, Any]], example: torch.Tensor, dim: int, length: int, pad: float
) -> torch.Tensor:
    shape = list(example.shape)
    shape[dim : dim + 1] = [len(rows), length]
    dtypes = (row[name].dtype for row in rows if name in row and num_tokens(row))
    out = torch.empty(shape, dtype=reduce(torch.promote_types, dtypes, example.dtype))
    for k, row in enumerate(rows):
        target = out.select(dim, k)
        tokens = 0
        if name in row and row[name].dim() == example.dim():
            tokens = row[name].shape[dim]
            target.narrow(dim, 0, tokens).copy_(row[name])
        target.narrow(dim, tokens, length - tokens).fill_(pad)
    return out
