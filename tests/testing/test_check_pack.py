"""check_pack passes what is right and catches the bugs that poison models."""

from __future__ import annotations

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


def stack(rows: list[Row]) -> Row:
    return {name: torch.from_numpy(np.stack([np.asarray(row[name]) for row in rows])) for name in plain_names}


plain_names = ("input_ids", "labels", "position_ids")


def test_a_users_pair_passes_on_the_users_samples(plain_pack: Callable[..., Row]) -> None:
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


def no_labels(row: Row, batch: list[Any]) -> Row:
    return {name: value for name, value in row.items() if name != "labels"}


def nested_boundaries(row: Row, batch: list[Any]) -> Row:
    row["cu_seqlens"] = row["cu_seqlens"][None]
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
    (
        no_labels,
        "lost field",
        "the row has no 'labels' (it has ['cu_seqlens', 'input_ids', 'loss_weights', 'max_seqlen', 'num_tokens', "
        "'position_ids'])",
    ),
    (
        nested_boundaries,
        "boundaries",
        "cu_seqlens is tensor([[0, 1]], dtype=torch.int32), but it must be one list of integers",
    ),
    (long_boundaries, "boundaries", "cu_seqlens is of type torch.int64; attention kernels take int32"),
]


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


def test_a_lost_field_of_the_users_is_told_without_a_hint_on_ours() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        del row["speaker"]
        return row

    texts = [{"input_ids": [1, 2], "speaker": [0, 0]}]
    message = (
        "lost field: the samples have 'speaker', the row has not (it has ['cu_seqlens', 'input_ids', 'labels', "
        "'max_seqlen', 'num_tokens', 'position_ids'])\n"
    )
    with pytest.raises(PackCheckFailed, match=f"^{re.escape(message)}"):
        check_quickly(pack, samples=texts)


def test_a_buffer_used_again_is_caught() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        row["input_ids"] = BUFFER.copy_(row["input_ids"])
        return row

    with pytest.raises(PackCheckFailed, match=r"^shared storage: packing the next row changed the row"):
        check_quickly(pack)


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
