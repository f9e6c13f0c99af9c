"""check_pack passes what is right and catches the bugs that poison models."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.packing import collate_rows, collate_varlen, pack_text, pack_vision
from evenstep.testing.packs import PackCheckFailed, check_pack
from evenstep.testing.strategies import samples

Row = dict[str, Any]
check_quickly = functools.partial(check_pack, max_examples=60)


@pytest.mark.parametrize(
    "collate",
    [
        None,
        collate_rows,
        functools.partial(collate_rows, pad_to_multiple_of=64),
        collate_varlen,
        functools.partial(collate_varlen, pad_to_multiple_of=8, pad_documents_to_multiple_of=4),
    ],
)
@pytest.mark.parametrize("shifted", [False, True])
def test_the_built_in_pairs_pass(collate: Any, shifted: bool) -> None:
    pack = functools.partial(pack_text, shifted=shifted)
    every = samples(extras=("loss_weights", "token_type_ids", "mrope", "index"))
    check_quickly(pack, collate, samples=every, shifted=shifted)


def plain_pack(batch: list[Any], seq_len: int) -> Row:
    """What a user may write by hand: only the fields of a Hugging Face model, with arrays."""
    ids = np.concatenate([s["input_ids"] for s in batch])
    labels = np.concatenate([s["input_ids"] for s in batch])
    starts = np.cumsum([0, *(len(s["input_ids"]) for s in batch)])[:-1]
    labels[starts] = -100
    positions = np.concatenate([np.arange(len(s["input_ids"])) for s in batch])
    width = (0, seq_len - len(ids))
    return {
        "input_ids": np.pad(ids, width),
        "labels": np.pad(labels, width, constant_values=-100),
        "position_ids": np.pad(positions, width),
    }


def stack(rows: list[Row]) -> Row:
    return {name: torch.from_numpy(np.stack([np.asarray(row[name]) for row in rows])) for name in plain_names}


plain_names = ("input_ids", "labels", "position_ids")


def test_a_users_pair_passes_on_the_users_samples() -> None:
    texts = [{"input_ids": np.arange(1, n + 1)} for n in (1, 3, 7, 16, 40)]
    check_quickly(plain_pack, stack, samples=texts)


def test_vision_passes() -> None:
    image = {
        "input_ids": torch.tensor([5, 9, 5]),
        "pixel_values": torch.rand(4, 6),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    check_quickly(pack_vision, collate_rows, samples=[image])


def label_leak(row: Row, batch: list[Any]) -> Row:
    ends = row["cu_seqlens"][1:-1].long()
    row["labels"][ends] = row["input_ids"][ends]
    return row


def running_positions(row: Row, batch: list[Any]) -> Row:
    row["position_ids"] = torch.arange(len(row["input_ids"]))
    return row


def dropped_tail_token(row: Row, batch: list[Any]) -> Row:
    if row["num_tokens"] == len(row["input_ids"]):
        row["input_ids"][-1] = 0
    return row


def off_by_one_boundary(row: Row, batch: list[Any]) -> Row:
    if len(row["cu_seqlens"]) > 2 and row["cu_seqlens"][1] > 1:
        row["cu_seqlens"][1] -= 1
    return row


def zero_length_segment(row: Row, batch: list[Any]) -> Row:
    row["cu_seqlens"] = torch.cat([row["cu_seqlens"], row["cu_seqlens"][-1:]])
    return row


def padding_as_a_document(row: Row, batch: list[Any]) -> Row:
    if row["num_tokens"] < 16:
        row["cu_seqlens"] = torch.cat([row["cu_seqlens"], torch.tensor([16], dtype=torch.int32)])
    return row


def wrong_padding_label(row: Row, batch: list[Any]) -> Row:
    row["labels"][row["num_tokens"] :] = 0
    return row


def shared_storage(row: Row, batch: list[Any]) -> Row:
    if len(batch) == 1 and row["num_tokens"] == len(row["input_ids"]):
        row["input_ids"] = batch[0]["input_ids"]
    return row


def lost_field(row: Row, batch: list[Any]) -> Row:
    del row["loss_weights"]
    return row


def swapped_field(row: Row, batch: list[Any]) -> Row:
    row["loss_weights"] = row["loss_weights"].flip(0)
    return row


def changed_samples(row: Row, batch: list[Any]) -> Row:
    batch[0]["input_ids"] += 1
    return row


def nothing_apart(row: Row, batch: list[Any]) -> Row:
    return {name: row[name] for name in ("input_ids", "labels", "loss_weights")}


def longer_than_asked(row: Row, batch: list[Any]) -> Row:
    row["input_ids"] = torch.cat([row["input_ids"], row["input_ids"][:1]])
    return row


def half_a_field(row: Row, batch: list[Any]) -> Row:
    row["loss_weights"] = row["loss_weights"][: row["num_tokens"]][:1]
    return row


def wrong_maximum(row: Row, batch: list[Any]) -> Row:
    row["max_seqlen"] = row["num_tokens"]
    return row


def long_boundaries(row: Row, batch: list[Any]) -> Row:
    row["cu_seqlens"] = row["cu_seqlens"].long()
    return row


PLANTED: list[tuple[Callable[[Row, list[Any]], Row], str, str]] = [
    (
        label_leak,
        "label leak",
        "labels at position 1 is 1, but it must be -100: it is the first token of document 1, which nothing in its "
        "document predicts",
    ),
    (
        running_positions,
        "running positions",
        "position_ids at position 1 is 1, but it must be 0: positions start again in every document",
    ),
    (dropped_tail_token, "lost tokens", "input_ids at position 15 is 0, but it must be 1"),
    (off_by_one_boundary, "boundaries", "cu_seqlens is [0, 1, 3], but the documents stand at [0, 2, 3]"),
    (
        zero_length_segment,
        "zero-length document",
        "cu_seqlens is [0, 1, 1]: a document without tokens, which attention kernels divide by; it must be [0, 1]",
    ),
    (
        padding_as_a_document,
        "boundaries",
        "cu_seqlens is [0, 1, 16], but the documents stand at [0, 1] (padding is no document)",
    ),
    (
        wrong_padding_label,
        "padding label",
        "position 1 is padding, but its label is 0; it must be -100, or the model is trained on padding",
    ),
    (
        shared_storage,
        "shared storage",
        "writing into the row changes the samples: they share storage with it",
    ),
    (
        lost_field,
        "lost field",
        "the samples have 'loss_weights', the row has not (it has ['cu_seqlens', 'input_ids', 'labels', 'max_seqlen', "
        "'num_tokens', 'position_ids']); if your data has none, pass samples=samples(labels=False, extras=())",
    ),
    (swapped_field, "field values", "loss_weights at position 0 is 0.0, but it must be 0.25"),
    (
        changed_samples,
        "changed samples",
        "pack changed its samples, which the dataset may hand out again: [{input_ids: [2], loss_weights: [0.0]}]",
    ),
    (
        nothing_apart,
        "boundaries",
        "nothing in the row tells its documents apart (none of cu_seqlens, position_ids, document_ids, seq_idx, "
        "cu_seq_lens_q, attention_mask), so they attend to each other",
    ),
    (
        longer_than_asked,
        "row length",
        "the row has 17 tokens; it must hold the 1 of its samples and no more than seq_len=16",
    ),
    (
        half_a_field,
        "field length",
        "'loss_weights' has shape [1] in a row of 16 tokens; they no longer belong together",
    ),
    (wrong_maximum, "boundaries", "max_seqlen is 2, but it is 1 for these documents"),
    (long_boundaries, "boundaries", "cu_seqlens is of type torch.int64; attention kernels take int32"),
]


def marked(name: str, mark: Callable[[list[int], int], Any], **others: Any) -> Callable[..., Row]:
    """A pack whose documents are told apart by ``mark(lengths, width)`` alone, under ``name``."""

    def pack(batch: list[Any], seq_len: int) -> Row:
        row = {name: v for name, v in plain_pack(batch, seq_len).items() if name != "position_ids"}
        return {**row, name: mark([len(s["input_ids"]) for s in batch], seq_len), **others}

    return pack


def constant(value: Any) -> Callable[..., Any]:
    return lambda *_: copy.deepcopy(value)


def ids_from(first: int, step: int = 1, padding: int = -1) -> Callable[[list[int], int], Any]:
    def ids(lengths: list[int], width: int) -> Any:
        of_documents = np.repeat(np.arange(len(lengths)) * step + first, lengths)
        return np.pad(of_documents, (0, width - len(of_documents)), constant_values=padding)

    return ids


def alternating(lengths: list[int], width: int) -> Any:
    return ids_from(0)(lengths, width) % 2


def block_mask(see: Any, hide: Any, dims: int = 2, causal: bool = True) -> Callable[[list[int], int], Any]:
    def mask(lengths: list[int], width: int) -> Any:
        ids = ids_from(0)(lengths, width)
        seen = (ids[:, None] == ids[None]) & (np.tri(width, dtype=bool) | (not causal))
        return np.where(seen, see, hide).reshape((1,) * (dims - 2) + (width, width))

    return mask


def causal_alone(lengths: list[int], width: int) -> Any:
    return np.tri(width, dtype=bool)


def boundaries(*, padding: str = "segment") -> Callable[[list[int], int], Any]:
    def cumulative(lengths: list[int], width: int) -> Any:
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        if padding == "with the last":
            ends[-1] = width
        return {"segment": np.append(ends, width), "repeated": np.append(ends, [ends[-1]] * 3)}.get(
            padding, ends
        )

    return cumulative


def whole_row(lengths: list[int], width: int) -> Any:
    return np.array([0, width], dtype=np.int32)


def nothing_at_all(lengths: list[int], width: int) -> Any:
    return np.zeros(len(lengths) + 1, dtype=np.int32)


PLAIN = samples(extras=(), labels=False)
RIGHT_MARKS = [
    ("document_ids", ids_from(0)),
    ("document_ids", ids_from(7, step=-1, padding=0)),
    ("seq_idx", ids_from(0, padding=0)),
    ("seq_idx", alternating),
    ("attention_mask", ids_from(1, padding=0)),
    ("attention_mask", block_mask(True, False)),
    ("attention_mask", block_mask(False, True, causal=False)),
    ("attention_mask", block_mask(0.0, -np.inf, dims=4)),
    ("attention_mask", block_mask(1, 0, dims=3)),
    ("cu_seq_lens_q", boundaries()),
    ("cu_seq_lens_q", boundaries(padding="none")),
    ("cu_seq_lens_q", boundaries(padding="repeated")),
    ("cu_seq_lens_q", boundaries(padding="with the last")),
    ("attention_mask", constant("a mask of some other kind")),
]


@pytest.mark.parametrize(("name", "mark"), RIGHT_MARKS)
def test_right_marks_pass_in_every_convention(name: str, mark: Any) -> None:
    def collate(rows: list[Row]) -> Row:
        batch = {k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in ("input_ids", "labels")}
        marks = [row[name] for row in rows]
        stacks = name in ("document_ids", "seq_idx", "attention_mask") and not isinstance(marks[0], str)
        return {**batch, name: torch.from_numpy(np.stack(marks)) if stacks else copy.deepcopy(marks)}

    check_quickly(marked(name, mark), collate, samples=PLAIN)


WRONG_MARKS = [
    ("document_ids", ids_from(0, step=0), "document_ids is 0 in document 0 and in document 1"),
    ("document_ids", alternating, "document_ids is 0 in document 0 and in document 2"),
    ("seq_idx", ids_from(3, step=0), "seq_idx is 3 in document 0 and in document 1"),
    (
        "seq_idx",
        constant(np.arange(16)),
        "seq_idx is [0, 1] inside of document 0, but a document has one id",
    ),
    (
        "attention_mask",
        constant(np.ones(16)),
        "nothing in the row tells its documents apart (attention_mask is 1.0 in document 0 and in document 1), so they "
        "attend to each other",
    ),
    ("attention_mask", causal_alone, "attention_mask lets tokens of document 1 see those of document 0"),
    ("cu_seq_lens_q", whole_row, "cu_seq_lens_q is [0, 16], but the documents stand at 0 to 1, 1 to 2"),
    ("cu_seq_lens_k", nothing_at_all, "cu_seq_lens_k is [0, 0], but the documents stand at 0 to 1"),
    ("max_length_q", constant(1), "max_length_q is 1, but the longest document has 2 tokens"),
]


@pytest.mark.parametrize(("name", "mark", "words"), WRONG_MARKS)
def test_marks_that_say_what_is_not_so_are_told(name: str, mark: Any, words: str) -> None:
    with pytest.raises(PackCheckFailed) as caught:
        check_pack(marked(name, mark), samples=PLAIN)
    assert str(caught.value).startswith(f"boundaries: {words}\n")


def test_a_mask_of_padding_stands_beside_the_marks_of_documents() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        return {**row, "attention_mask": (torch.arange(seq_len) < row["num_tokens"]).long()}

    check_quickly(pack, collate_rows)


def test_a_pack_that_draws_at_random_is_told_plainly() -> None:
    turns = iter(range(10**6))

    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        row["input_ids"] += next(turns) % 7 == 0
        return row

    with pytest.raises(PackCheckFailed) as caught:
        check_pack(pack)
    assert caught.value.property == "lost tokens"
    assert (
        "(once, and not again with the same samples: they are not packed the same way each time, so fix what is drawn at "
        "random, for example a seed, and check again)\nThe smallest samples found" in str(caught.value)
    )
    assert caught.value.samples


@pytest.mark.parametrize(("bug", "name", "detail"), PLANTED, ids=[bug.__name__ for bug, _, _ in PLANTED])
def test_planted_bugs_are_caught_and_told(bug: Callable[..., Row], name: str, detail: str) -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        return bug(pack_text(batch, seq_len), batch)

    with pytest.raises(PackCheckFailed) as caught:
        check_pack(pack)
    assert caught.value.property == name
    words, _, example = str(caught.value).partition(
        "\nThe smallest samples found, for seq_len=16:\n  row 0:\n"
    )
    assert words == f"{name}: {detail}"
    assert example.startswith("    {input_ids: [")


def test_the_counter_example_is_the_smallest() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        return label_leak(pack_text(batch, seq_len), batch)

    with pytest.raises(PackCheckFailed) as caught:
        check_pack(pack, samples=samples(extras=()))
    assert str(caught.value).endswith("  row 0:\n    {input_ids: [1]}\n    {input_ids: [1]}")
    assert [[len(s["input_ids"]) for s in row] for row in caught.value.samples] == [[1, 1]]


BUFFER = torch.zeros(16, dtype=torch.int64)


def test_a_buffer_used_again_is_caught() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        row["input_ids"] = BUFFER.copy_(row["input_ids"])
        return row

    with pytest.raises(PackCheckFailed, match=r"^shared storage: packing the next row changed the row"):
        check_quickly(pack)


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
        with_field("max_seqlen", constant(1)),
        "boundaries: in the batch, max_seqlen is 1, but the longest document has 2 tokens",
    ),
    (
        with_field("max_length_k", constant(torch.tensor(1))),
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


def test_rows_are_mappings_unless_their_collate_knows_better() -> None:
    def keep(batch: list[Any], seq_len: int) -> list[Any]:
        return batch

    def collate(rows: list[Any]) -> Row:
        return collate_varlen([pack_text(row, 16) if isinstance(row, list) else row for row in rows])

    def unpositioned(rows: list[Any]) -> Row:
        return {name: value for name, value in collate(rows).items() if name != "position_ids"}

    check_quickly(keep, collate)
    check_quickly(keep, unpositioned)
    with pytest.raises(
        PackCheckFailed, match=r"^row: pack returned a list; a row must be a mapping of fields"
    ):
        check_quickly(keep)


def test_an_error_of_the_users_is_told_with_its_samples() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        if len(batch) > 1:
            raise RuntimeError("no room")
        return pack_text(batch, seq_len)

    with pytest.raises(PackCheckFailed, match=r"^pack raises: pack raised RuntimeError: no room") as caught:
        check_quickly(pack)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [len(s["input_ids"]) for s in caught.value.samples[0]] == [1, 1]


def test_samples_that_cannot_be_packed_are_told() -> None:
    message = (
        "none of the 1 samples has between 1 and seq_len=4 tokens, so there is nothing to pack; give shorter samples "
        "or a greater seq_len"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_pack(pack_text, samples=[{"input_ids": [1] * 5}], seq_len=4)
