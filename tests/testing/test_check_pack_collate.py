"""check_pack catches what a collate does to rows that were right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenstep.packing import collate_rows, collate_varlen, pack_text
from evenstep.testing.packs import PackCheckFailed, check_pack

Row = dict[str, Any]


def batch_without(name: str) -> Callable[[list[Row]], Row]:
    def collate(rows: list[Row]) -> Row:
        return {k: v for k, v in collate_rows(rows).items() if k != name}

    return collate


def only_full_rows(rows: list[Row]) -> Row:
    if not rows[-1]["num_tokens"]:
        raise KeyError("tokens")
    return collate_rows(rows)


def zero_labels(rows: list[Row]) -> Row:
    batch = collate_varlen(rows, pad_to_multiple_of=8)
    batch["labels"][batch["labels"] == -100] = 0
    return batch


def view_of_the_row(rows: list[Row]) -> Row:
    batch = collate_rows(rows)
    if len(rows) == 1:
        batch["input_ids"] = rows[0]["input_ids"][None]
    return batch


def local_boundaries(rows: list[Row]) -> Row:
    batch = collate_varlen(rows)
    batch["cu_seqlens"] = torch.cat([row["cu_seqlens"] for row in rows])
    return batch


def rows_flattened_as_documents(rows: list[Row]) -> Row:
    """A flattening collator that takes each packed row for one document."""
    batch = collate_varlen(rows)
    lengths = [int(row["num_tokens"]) for row in rows]
    batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(0)]).long()[None]
    return batch


def labels_of_another_shape(rows: list[Row]) -> Row:
    batch = collate_rows(rows)
    return {**batch, "labels": batch["labels"][:, 1:]}


def one_token_short(rows: list[Row]) -> Row:
    batch = collate_varlen(rows)
    return {**batch, "input_ids": batch["input_ids"][:, :-1], "labels": batch["labels"][:, :-1]}


def fields_of_the_model_alone(rows: list[Row]) -> Row:
    return {
        name: v for name, v in collate_rows(rows).items() if name in ("input_ids", "labels", "loss_weights")
    }


def zero_padding(rows: list[Row]) -> Row:
    return collate_rows(rows, pad_to_multiple_of=32, ignore_index=0)


def with_field(
    name: str, value: Callable[[Row], Any], base: Any = collate_varlen
) -> Callable[[list[Row]], Row]:
    def collate(rows: list[Row]) -> Row:
        batch = base(rows)
        return {**batch, name: value(batch)}

    return collate


BROKEN_COLLATES: list[tuple[Callable[[list[Row]], Any], str]] = [
    (batch_without("loss_weights"), "lost field: the rows have 'loss_weights', the batch has not"),
    (batch_without("labels"), "lost field: the rows have 'labels', the batch has not"),
    (
        only_full_rows,
        "collate raises: with a row without samples in the batch, collate raised KeyError: 'tokens'",
    ),
    (zero_labels, "label leak: in row 0 of the batch, labels at position 0 is 0, but it must be -100"),
    (view_of_the_row, "shared storage: writing into the rows changes the batch: they share storage with it"),
    (
        local_boundaries,
        "boundaries: with a row without samples in the batch, cu_seqlens of the batch is [0, 1, 0]",
    ),
    (
        rows_flattened_as_documents,
        "running positions: in row 0 of the batch, position_ids at position 1 is 1, but it must be 0",
    ),
    (
        labels_of_another_shape,
        "field length: input_ids and labels of the batch are not two tensors of one shape",
    ),
    (one_token_short, "lost tokens: the batch ends before the 1 tokens of row 0"),
    (zero_padding, "padding label: padding of the batch has the label 0; it must be -100"),
    (
        with_field("cu_seq_lens_q", lambda batch: batch["cu_seq_lens_q"] * 0),
        "boundaries: in the batch, cu_seq_lens_q is [0, 0], but the documents stand at 0 to 1",
    ),
    (
        with_field("cu_seq_lens_k", lambda batch: batch["cu_seq_lens_k"][[0, -1]]),
        "boundaries: in the batch, cu_seq_lens_k is [0, 2], but the documents stand at 0 to 1, 1 to 2",
    ),
    (
        with_field("max_seqlen", lambda _: 1),
        "boundaries: in the batch, max_seqlen is 1, but the longest document has 2 tokens",
    ),
    (
        with_field("max_length_k", lambda _: torch.tensor(1)),
        "boundaries: in the batch, max_length_k is 1, but the longest document has 2 tokens",
    ),
    (
        with_field("num_tokens", lambda batch: batch["input_ids"].numel(), collate_rows),
        "boundaries: num_tokens of the batch is 16, but it is 1 for these documents",
    ),
    (
        with_field("cu_seqlens", lambda batch: [cu * 0 for cu in batch["cu_seqlens"]], collate_rows),
        "boundaries: in the batch, cu_seqlens is [0, 0], but the documents stand at 0 to 1",
    ),
    (
        with_field("document_ids", lambda batch: torch.zeros_like(batch["input_ids"])),
        "boundaries: in the batch, document_ids is 0 in document 0 and in document 1",
    ),
    (list, "batch: collate returned a list; a batch must be a mapping of fields"),
]


@pytest.mark.parametrize(("collate", "words"), BROKEN_COLLATES)
def test_broken_collates_are_caught_and_told(collate: Any, words: str) -> None:
    with pytest.raises(PackCheckFailed, match=f"^{re.escape(words)}"):
        check_pack(pack_text, collate)


def test_a_pack_that_tells_documents_apart_for_nothing() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        return {name: v for name, v in pack_text(batch, seq_len).items() if name != "position_ids"}

    words = (
        "boundaries: nothing in the batch tells its documents apart (none of cu_seqlens, position_ids, document_ids, "
        "seq_idx, cu_seq_lens_q, attention_mask), so they attend to each other"
    )
    with pytest.raises(PackCheckFailed, match=f"^{re.escape(words)}"):
        check_pack(pack, fields_of_the_model_alone)
