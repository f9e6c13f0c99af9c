"""Both collates: every real token keeps its place in its document, whatever the layout."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.packing import collate_rows, collate_varlen, pack_text, padding_row

# Continuous integration is the derandomised profile.
thoroughly = settings(max_examples=500 if settings.default and settings.default.derandomize else 100)

Row = dict[str, Any]


def make_row(lengths: list[int], seq_len: int, extras: bool = True) -> Row:
    samples = []
    for k, n in enumerate(lengths):
        sample: Row = {"input_ids": torch.arange(1, n + 1) + 100 * k}
        if extras:
            sample["mrope"] = torch.arange(3 * n).view(3, n)
            sample["width"] = torch.ones(n, 9)
            sample["index"] = k
        samples.append(sample)
    return pack_text(samples, seq_len)


ROWS = st.lists(st.lists(st.integers(1, 7), max_size=4), min_size=1, max_size=4)


@thoroughly
@given(ROWS, st.sampled_from([1, 8]))
def test_padded_rows_are_the_rows(lengths: list[list[int]], pad_to_multiple_of: int) -> None:
    rows = [make_row(docs, 29) for docs in lengths]
    batch = collate_rows(rows, pad_to_multiple_of=pad_to_multiple_of, pad_token_id=5)
    width = 29 if pad_to_multiple_of == 1 else 32
    assert batch["input_ids"].shape == (len(rows), width)
    for k, row in enumerate(rows):
        for name, pad in (("input_ids", 5), ("labels", -100), ("position_ids", 0)):
            assert batch[name][k].tolist() == row[name].tolist() + [pad] * (width - 29)
        assert batch["cu_seqlens"][k].tolist() == row["cu_seqlens"].tolist()
        if row["num_tokens"]:
            assert batch["mrope"].shape == (3, len(rows), width)
            assert torch.equal(batch["mrope"][:, k, :29], row["mrope"])
            assert torch.equal(batch["width"][k, :29], row["width"])
            assert batch["index"][k] == row["index"]
    assert batch["num_tokens"] == sum(map(sum, lengths))
    assert batch["max_seqlen"] == max((n for docs in lengths for n in docs), default=0)


@thoroughly
@given(ROWS, st.sampled_from([1, 8, 64]), st.sampled_from([1, 2, 4, 8]))
def test_a_flat_sequence_has_every_document_in_its_place(
    lengths: list[list[int]], pad_to_multiple_of: int, pad_documents_to_multiple_of: int
) -> None:
    rows = [make_row(docs, 29) for docs in lengths]
    batch = collate_varlen(
        rows, pad_to_multiple_of=pad_to_multiple_of, pad_documents_to_multiple_of=pad_documents_to_multiple_of
    )
    flat = [(row, start, end) for row in rows for start, end in _pairs(row["cu_seqlens"].tolist())]
    total = batch["input_ids"].shape[1]
    assert total % pad_to_multiple_of == 0
    assert total >= 1
    real = batch["cu_seqlens"].tolist()
    memory = batch["cu_seqlens_padded"].tolist()
    assert len(real) == len(memory) == len(flat) + 1
    assert [b - a for a, b in _pairs(real)] == [end - start for _, start, end in flat]
    covered = torch.zeros(total, dtype=torch.bool)
    for (row, start, end), at in zip(flat, memory[:-1], strict=True):
        assert at % pad_documents_to_multiple_of == 0
        here = slice(at, at + end - start)
        covered[here] = True
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(batch[name][0, here], row[name][start:end])
        assert torch.equal(batch["mrope"][:, 0, here], row["mrope"][:, start:end])
        assert torch.equal(batch["width"][0, here], row["width"][start:end])
    assert int(covered.sum()) == batch["num_tokens"] == sum(map(sum, lengths))
    assert (batch["labels"][0, ~covered] == -100).all()
    segments = batch["cu_seq_lens_q"].tolist()
    assert segments == batch["cu_seq_lens_k"].tolist()
    assert segments[0] == 0
    assert segments[-1] == total
    assert all(b > a for a, b in _pairs(segments))
    # Every document is exactly one attention segment.
    assert {(at, at + end - start) for (_, start, end), at in zip(flat, memory[:-1], strict=True)} <= set(
        _pairs(segments)
    )
    assert batch["max_length_q"] == batch["max_length_k"] == max(b - a for a, b in _pairs(segments))
    assert type(batch["max_length_q"]) is int
    assert {batch[n].dtype for n in ("cu_seqlens", "cu_seqlens_padded", "cu_seq_lens_q")} == {torch.int32}


def _pairs(boundaries: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(boundaries))


def test_without_padding_all_boundaries_agree() -> None:
    batch = collate_varlen([make_row([3, 2], 8), make_row([4], 8)])
    for name in ("cu_seqlens", "cu_seqlens_padded", "cu_seq_lens_q", "cu_seq_lens_k"):
        assert batch[name].tolist() == [0, 3, 5, 9]
    assert batch["max_seqlen"] == batch["max_length_q"] == 4
    assert batch["index"] == [0, 1, 0]


def test_a_flat_sequence_of_fixed_length() -> None:
    assert collate_varlen([make_row([3], 8)], pad_to=6)["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0]]
    message = (
        "pad_to is 2, but the documents take 3 tokens in multiples of 1; they would be cut; give the largest "
        "micro-batch, rounded up to pad_to_multiple_of"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collate_varlen([make_row([3], 8)], pad_to=2)


def test_more_tokens_than_int32_counts_are_refused() -> None:
    token = torch.ones(1, dtype=torch.int64)
    half = 2**30
    row = {
        "input_ids": token.expand(half),
        "cu_seqlens": torch.tensor([0, half], dtype=torch.int32),
        "num_tokens": half,
        "max_seqlen": half,
    }
    message = (
        "the rows have 2147483648 tokens together; the boundaries of attention kernels are int32 and would "
        "overflow above 2147483647; use fewer or shorter rows per micro-batch"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collate_varlen([row, row])


def test_padding_rows_take_on_the_fields_of_their_batch() -> None:
    rows = [padding_row(seq_len=8), make_row([3], 8)]
    batch = collate_rows(rows, pad_values={"width": 4})
    assert batch["mrope"].shape == (3, 2, 8)
    assert (batch["width"][0] == 4).all()
    assert batch["index"] == [[], [0]]
    assert collate_varlen(rows)["mrope"].shape == (3, 1, 3)


def test_what_belongs_to_a_whole_row_is_listed_by_row() -> None:
    rows = [{**make_row([3], 8), "shard": "a"}, {**make_row([2], 8), "shard": "b"}, make_row([1], 8)]
    assert collate_rows(rows)["shard"] == collate_varlen(rows)["shard"] == ["a", "b", None]


def test_a_batch_of_padding_rows() -> None:
    rows = [padding_row(seq_len=4), padding_row(seq_len=4)]
    batch = collate_rows(rows)
    assert batch["num_tokens"] == 0
    assert (batch["labels"] == -100).all()
    flat = collate_varlen(rows, pad_to_multiple_of=2)
    assert flat["input_ids"].tolist() == [[0, 0]]
    assert flat["cu_seqlens"].tolist() == flat["cu_seqlens_padded"].tolist() == [0]
    assert flat["cu_seq_lens_q"].tolist() == [0, 2]


def test_rows_of_different_length() -> None:
    rows = [pack_text([{"input_ids": [1, 2, 3]}], 2, oversized="single"), make_row([1], 2, extras=False)]
    batch = collate_rows(rows, pad_token_id=8, ignore_index=-1)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 0, 8]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, -1]]


@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_bad_rows_are_told(collate: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"^there are no rows to collate; a micro-batch has at least one, if only a padding row$",
    ):
        collate([])
    message = (
        "field 'mrope' is missing in rows [1] of the 2 of a batch; its values would stand beside the wrong "
        "tokens; give it to every sample or to none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collate([make_row([2], 4), make_row([2], 4, extras=False)])
    lacking = "input_ids" if collate is collate_rows else "input_ids and cu_seqlens"
    message = (
        f"row 0 is keys ['tokens']; without {lacking} it cannot be collated; pack with pack_text, or give your own "
        "collate with your own pack"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        collate([{"tokens": torch.ones(2)}])


def test_padded_rows_need_no_boundaries() -> None:
    batch = collate_rows([{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4])}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert batch["num_tokens"] == 4
    assert "cu_seqlens" not in batch


@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_a_batch_shares_nothing_with_its_rows(collate: Any) -> None:
    rows = [make_row([4], 4)]
    batch = collate(rows)
    before = {k: v.clone() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    for value in rows[0].values():
        if isinstance(value, torch.Tensor):
            value.fill_(77)
    assert all(torch.equal(batch[k], v) for k, v in before.items())


@pytest.mark.parametrize("multiple", [0, -8, 2.0, True])
def test_a_multiple_is_a_positive_int(multiple: Any) -> None:
    words = f" is {multiple!r}; it must be an int of at least 1, and 1 means no padding"
    rows = [make_row([2], 4)]
    for collate in (collate_rows, collate_varlen):
        with pytest.raises(ValueError, match=f"^pad_to_multiple_of{re.escape(words)}$"):
            collate(rows, pad_to_multiple_of=multiple)
    with pytest.raises(ValueError, match=f"^pad_documents_to_multiple_of{re.escape(words)}$"):
        collate_varlen(rows, pad_documents_to_multiple_of=multiple)


@pytest.mark.parametrize("boundaries", [[0, 2, 4], [0, 2, 2, 3], [1, 3], [0, 3, 2, 3]])
def test_boundaries_that_disagree_with_tokens_are_told(boundaries: list[int]) -> None:
    row = {**make_row([2, 1], 4), "cu_seqlens": torch.tensor(boundaries, dtype=torch.int32)}
    message = (
        f"cu_seqlens of row 1 is {boundaries}, but the row has 3 tokens; documents would be read from wrong places; give "
        "strictly increasing boundaries of the real documents, from 0 to num_tokens"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collate_varlen([make_row([2], 4), row])
