"""check_pack reads every convention by which a row tells its documents apart, and catches each that is not so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.packing import collate_rows, collate_varlen, pack_text
from evenstep.testing.packs import PackCheckFailed, check_pack
from evenstep.testing.strategies import samples

Row = dict[str, Any]
Pack = Callable[[list[Any], int], Row]


def marked(plain_pack: Pack, name: str, mark: Callable[[list[int], int], Any]) -> Pack:
    """A pack whose documents are told apart by ``mark(lengths, width)`` alone, under ``name``."""

    def pack(batch: list[Any], seq_len: int) -> Row:
        row = {name: v for name, v in plain_pack(batch, seq_len).items() if name != "position_ids"}
        return {**row, name: mark([len(s["input_ids"]) for s in batch], seq_len)}

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
def test_right_marks_pass_in_every_convention(plain_pack: Pack, name: str, mark: Any) -> None:
    def collate(rows: list[Row]) -> Row:
        batch = {k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in ("input_ids", "labels")}
        marks = [row[name] for row in rows]
        stacks = name in ("document_ids", "seq_idx", "attention_mask") and not isinstance(marks[0], str)
        return {**batch, name: torch.from_numpy(np.stack(marks)) if stacks else copy.deepcopy(marks)}

    check_pack(marked(plain_pack, name, mark), collate, samples=PLAIN, max_examples=60)


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
        ids_from(1, step=0, padding=0),
        "nothing in the row tells its documents apart (attention_mask is 1 in document 0 and in document 1), so they "
        "attend to each other",
    ),
    ("attention_mask", causal_alone, "attention_mask lets tokens of document 1 see those of document 0"),
    ("cu_seq_lens_q", whole_row, "cu_seq_lens_q is [0, 16], but the documents stand at 0 to 1, 1 to 2"),
    ("cu_seq_lens_k", nothing_at_all, "cu_seq_lens_k is [0, 0], but the documents stand at 0 to 1"),
    (
        "cu_seq_lens_q",
        constant(np.array([0, 9, 5], dtype=np.int32)),
        "cu_seq_lens_q is [0, 9, 5], but the documents stand at 0 to 1",
    ),
    ("max_length_q", constant(1), "max_length_q is 1, but the longest document has 2 tokens"),
]


@pytest.mark.parametrize(("name", "mark", "words"), WRONG_MARKS)
def test_marks_that_say_what_is_not_so_are_told(plain_pack: Pack, name: str, mark: Any, words: str) -> None:
    with pytest.raises(PackCheckFailed) as caught:
        check_pack(marked(plain_pack, name, mark), samples=PLAIN)
    assert str(caught.value).startswith(f"boundaries: {words}\n")


def test_a_mask_of_padding_stands_beside_the_marks_of_documents() -> None:
    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        return {**row, "attention_mask": (torch.arange(seq_len) < row["num_tokens"]).long()}

    check_pack(pack, collate_rows, max_examples=60)


def with_mask(mask: Callable[[int, int], Any]) -> Pack:
    """`pack_text`, whose ``cu_seqlens`` are right, with ``mask(tokens, width)`` as the attention mask."""

    def pack(batch: list[Any], seq_len: int) -> Row:
        row = pack_text(batch, seq_len)
        return {**row, "attention_mask": mask(row["num_tokens"], seq_len)}

    return pack


MASKS_OF_CONTENT: list[tuple[str, Callable[[int, int], Any]]] = [
    ("is 1 for tokens and for padding", lambda _, width: torch.ones(width, dtype=torch.int64)),
    ("is True for tokens and for padding", lambda _, width: torch.ones(width, dtype=torch.bool)),
    ("is False for tokens and for padding", lambda _, width: torch.zeros(width, dtype=torch.bool)),
    ("is 1 for tokens and for padding", lambda tokens, width: (torch.arange(width) <= tokens).long()),
]


@pytest.mark.parametrize(("words", "mask"), MASKS_OF_CONTENT)
@pytest.mark.parametrize("collate", [None, collate_rows])
def test_a_mask_that_takes_padding_for_content_is_told_where_the_boundaries_are_right(
    words: str, mask: Callable[[int, int], Any], collate: Any
) -> None:
    with pytest.raises(PackCheckFailed) as caught:
        check_pack(with_mask(mask), collate, samples=PLAIN)
    told = f"padding mask: attention_mask {words}, so that padding is content to the model\n"
    assert str(caught.value).startswith(told)
    assert caught.value.property == "padding mask"


def test_a_mask_made_in_collate_is_held_against_the_padding_of_the_batch() -> None:
    def collate(rows: list[Row]) -> Row:
        batch = collate_rows(rows)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    with pytest.raises(PackCheckFailed) as caught:
        check_pack(pack_text, collate, samples=PLAIN)
    assert str(caught.value).startswith(
        "padding mask: in the batch, attention_mask is 1 for tokens and for padding, so that padding is content to the model\n"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_that_see_padding_in_a_mask_of_pairs_are_told(plain_pack: Pack, causal: bool) -> None:
    def mask(lengths: list[int], width: int) -> Any:
        # What is after the first document is one more document, padding included.
        ids = np.minimum(ids_from(0, padding=len(lengths) - 1)(lengths, width), len(lengths) - 1)
        seen = ids[:, None] == ids[None]
        return seen & np.tri(width, dtype=bool) if causal else seen

    pack = marked(plain_pack, "attention_mask", mask)
    if causal:
        check_pack(pack, samples=PLAIN, max_examples=60)
        return
    with pytest.raises(PackCheckFailed) as caught:
        check_pack(pack, samples=PLAIN)
    assert str(caught.value).startswith(
        "padding mask: attention_mask lets tokens see padding, so that padding is content to the model\n"
    )


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_mask_of_ones_is_right_for_flattened_rows_without_padding(multiple: int) -> None:
    def collate(rows: list[Row]) -> Row:
        batch = collate_varlen(rows, pad_to_multiple_of=multiple)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    if multiple == 1:
        check_pack(pack_text, collate, samples=PLAIN, max_examples=60)
        return
    with pytest.raises(
        PackCheckFailed, match="padding mask: in the batch, attention_mask is 1 for tokens and"
    ):
        check_pack(pack_text, collate, samples=PLAIN)


def test_a_mask_of_the_samples_is_theirs_to_know() -> None:
    def masked(sample: Any) -> Row:
        return {**sample, "attention_mask": sample["input_ids"] % 2}

    def some(sample: Row) -> bool:
        return bool(sample["attention_mask"].any())

    check_pack(pack_text, collate_rows, samples=PLAIN.map(masked).filter(some), max_examples=60)
