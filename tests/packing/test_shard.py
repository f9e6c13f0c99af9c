"""Slices of context-parallel ranks: nothing lost, nothing twice, equal work, and boundaries that stay right."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Shard
from evenstep.packing import (
    Sharding,
    block_diagonal_mask,
    collate_rows,
    collate_varlen,
    document_ids,
    pack_text,
    padding_of,
    padding_row,
    shard_indices,
    shard_tensor,
    thd_arguments,
    unshard,
)
from evenstep.packing.fields import Padding
from evenstep.packing.sharding import FOLLOWERS
from evenstep.testing import assert_same, rows

MODES = ["contiguous", "zigzag"]
PADDING = Padding(pad_token_id=7, ignore_index=-1)
PACK = functools.partial(pack_text, pad_token_id=7, ignore_index=-1)


def slices(
    batch: Any, shards: Mapping[str, Shard | None], parts: int, **options: Any
) -> tuple[Any, list[Any]]:
    """The padded whole, and what each rank gets of it."""
    of = [
        Sharding.of(shards, lambda _, part=part: (part, parts), PADDING, **options)  # type: ignore[misc]
        for part in range(parts)
    ]
    whole = of[0].pad(batch)
    return whole, [sharding.slice(whole) for sharding in of]


def batches(collate: Callable[..., Any]) -> st.SearchStrategy[Any]:
    return st.lists(rows(pack=PACK), min_size=1, max_size=3).map(
        lambda packed: collate(packed, pad_token_id=7, ignore_index=-1)
    )


def boundaries(lengths: list[int], divisor: int) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *(-(-n // divisor) * divisor for n in lengths)]), dtype=torch.int32)


UNITS = st.lists(st.integers(1, 20), min_size=1, max_size=5)


@given(UNITS, st.integers(1, 5), st.sampled_from(MODES), st.booleans())
def test_the_slices_together_are_the_whole(
    lengths: list[int], parts: int, mode: str, by_document: bool
) -> None:
    places = boundaries(lengths, 2 * parts)
    total = int(places[-1])
    bounds = places if by_document else None
    index = [shard_indices(total, part, parts, mode, bounds) for part in range(parts)]
    assert torch.equal(torch.cat(index).sort().values, torch.arange(total))
    whole = torch.arange(3 * total).view(3, total)
    parted = [shard_tensor(whole, -1, part, parts, mode, bounds) for part in range(parts)]
    for part in range(parts):
        assert torch.equal(parted[part], whole[:, index[part]])
    assert torch.equal(unshard(parted, -1, mode, bounds), whole)


@given(UNITS, st.integers(1, 5), st.booleans())
def test_zigzag_gives_every_rank_the_same_causal_work(
    lengths: list[int], parts: int, by_document: bool
) -> None:
    places = boundaries(lengths, 2 * parts)
    total = int(places[-1])
    position = torch.arange(total)
    if by_document:  # a token attends to those before it in its document
        position = position - torch.repeat_interleave(places[:-1].long(), places.diff())
    bounds = places if by_document else None
    work = {int((position[shard_indices(total, r, parts, "zigzag", bounds)] + 1).sum()) for r in range(parts)}
    assert len(work) == 1


def test_contiguous_slices_leave_the_last_rank_with_nearly_twice_the_work() -> None:
    work = [int((shard_indices(64, r, 4, "contiguous") + 1).sum()) for r in range(4)]
    assert max(work) / np.mean(work) == pytest.approx(7 / 4, abs=0.02)


@given(UNITS, st.integers(1, 4))
def test_documents_are_divided_as_transformer_engine_divides_them(lengths: list[int], parts: int) -> None:
    """Each document's chunks r and 2n - 1 - r, document after document."""
    places = boundaries(lengths, 2 * parts).tolist()
    for part in range(parts):
        expected: list[int] = []
        for start, end in itertools.pairwise(places):
            size = (end - start) // (2 * parts)
            for chunk in (part, 2 * parts - 1 - part):
                expected += range(start + chunk * size, start + (chunk + 1) * size)
        got = shard_indices(places[-1], part, parts, "zigzag", torch.tensor(places, dtype=torch.int32))
        assert got.tolist() == expected


FIELDS = ("input_ids", "labels", "position_ids")


def others(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in ("input_ids", *FOLLOWERS)}


@given(batches(collate_rows), st.integers(1, 4), st.sampled_from(MODES))
def test_rows_are_padded_and_divided_and_their_boundaries_stay(batch: Any, parts: int, mode: Any) -> None:
    whole, parted = slices(batch, {"input_ids": Shard("cp", dim=-1, mode=mode)}, parts)
    length = batch["input_ids"].shape[-1]
    divisor = parts * (2 if mode == "zigzag" else 1)
    padded = -(-length // divisor) * divisor
    for name in FIELDS:
        assert torch.equal(whole[name][..., :length], batch[name])
        fill = {"input_ids": 7, "labels": -1, "position_ids": 0}[name]
        assert whole[name].shape[-1] == padded
        assert (whole[name][..., length:] == fill).all()
        assert torch.equal(unshard([part[name] for part in parted], -1, mode), whole[name])
    for part in parted:
        assert_same(others(part), others(batch))


@given(batches(collate_varlen), st.integers(1, 4), st.sampled_from(MODES))
def test_the_boundaries_of_a_flat_sequence_cover_its_padding(batch: Any, parts: int, mode: Any) -> None:
    whole, parted = slices(batch, {"input_ids": Shard("cp", dim=-1, mode=mode)}, parts)
    total = whole["input_ids"].shape[-1]
    assert_same(document_ids(whole)[..., : batch["input_ids"].shape[-1]], document_ids(batch))
    for part in parted:
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            ends = part[name].tolist()
            assert (ends[0], ends[-1]) == (0, total)
            assert sorted(set(ends)) == ends
            assert set(part["cu_seqlens"].tolist()) <= set(ends)
        assert part["max_length_q"] == int(part["cu_seq_lens_q"].diff().max())
        assert torch.equal(part["cu_seqlens"], batch["cu_seqlens"])
        if part["cu_seqlens"].numel() > 1:
            assert int(part["cu_seqlens_padded"][-1]) == total


@given(batches(collate_varlen), st.integers(1, 4), st.sampled_from(MODES))
def test_every_document_is_padded_and_divided_by_itself(batch: Any, parts: int, mode: Any) -> None:
    shard = Shard("cp", dim=-1, mode=mode, unit="document")
    whole, parted = slices(batch, {"input_ids": shard}, parts)
    divisor = shard.divisor(parts)
    places = whole["cu_seqlens_padded"]
    total = whole["input_ids"].shape[-1]
    assert (places % divisor == 0).all()
    assert total % divisor == 0
    if len(places) > 1:
        assert int(places[-1]) == total
    assert torch.equal(whole["cu_seqlens"], batch["cu_seqlens"])
    bounds = places if len(places) > 1 else None
    for name in FIELDS:
        real = document_ids(whole) >= 0
        assert torch.equal(whole[name][real], batch[name][document_ids(batch) >= 0])
        fill = {"input_ids": 7, "labels": -1, "position_ids": 0}[name]
        assert (whole[name][~real] == fill).all()
        assert torch.equal(unshard([part[name] for part in parted], -1, mode, bounds), whole[name])
    # Each rank's share of every document is its place divided by the ranks.
    for part in parted:
        assert part["input_ids"].shape[-1] == total // parts
        if len(places) > 1:
            assert thd_arguments(part)["cu_seqlens_q_padded"] is part["cu_seqlens_padded"]
            assert int(part["cu_seqlens_padded"][-1]) // parts == part["input_ids"].shape[-1]


@given(
    batches(collate_varlen), st.integers(1, 4), st.sampled_from(MODES), st.sampled_from(["row", "document"])
)
def test_every_real_token_is_in_exactly_one_slice(batch: Any, parts: int, mode: Any, unit: Any) -> None:
    tokens = batch["input_ids"]
    batch["number"] = torch.arange(1, tokens.numel() + 1).view_as(tokens)
    shard = Shard("cp", mode=mode, unit=unit)
    _, parted = slices(batch, {"input_ids": shard, "number": shard}, parts)
    found = torch.cat([part["number"].flatten() for part in parted])
    real = batch["number"][document_ids(batch) >= 0]
    got = found[found > 0].sort().values
    assert set(real.tolist()) <= set(got.tolist())
    assert len(got) == len(set(got.tolist()))


@given(
    batches(collate_varlen), st.integers(1, 3), st.sampled_from(MODES), st.sampled_from(["row", "document"])
)
def test_gathered_attention_over_slices_is_attention_over_the_whole(
    batch: Any, parts: int, mode: Any, unit: Any
) -> None:
    """The boundaries are those of the padded whole: queries of a slice attend to the keys of all."""
    shard = Shard("cp", mode=mode, unit=unit)
    whole, parted = slices(batch, {"input_ids": shard}, parts)
    bounds = whole["cu_seqlens_padded"] if unit == "document" and len(whole["cu_seqlens"]) > 1 else None
    total = whole["input_ids"].shape[-1]
    mask = block_diagonal_mask(document_ids(whole)).view(total, total).double()
    expected = mask @ whole["input_ids"].view(total, 1).double()
    keys = unshard([part["input_ids"].view(-1, 1) for part in parted], 0, mode, bounds).double()
    got = [mask[shard_indices(total, r, parts, mode, bounds)] @ keys for r in range(parts)]
    assert torch.equal(unshard(got, 0, mode, bounds), expected)


@given(
    batches(collate_varlen), st.integers(1, 4), st.sampled_from(MODES), st.sampled_from(["row", "document"])
)
def test_targets_are_made_before_the_cuts(batch: Any, parts: int, mode: Any, unit: Any) -> None:
    """Each real token's target is the next label of its document, whichever rank has that."""
    whole, parted = slices(batch, {"input_ids": Shard("cp", mode=mode, unit=unit)}, parts, targets=True)
    labels, real = batch["labels"][0], int(batch["num_tokens"])
    following = torch.cat([labels[1:], labels.new_tensor([-1])])
    ids = document_ids(whole)[0] >= 0
    assert torch.equal(whole["shift_labels"][0][ids], following[:real])
    assert (whole["shift_labels"][0][~ids] == -1).all()
    for part in parted:
        assert part["shift_labels"].shape == part["input_ids"].shape


def test_zigzag_of_eight_tokens_over_two_ranks() -> None:
    assert [shard_indices(8, r, 2, "zigzag").tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    bounds = torch.tensor([0, 4, 8])
    assert [shard_indices(8, r, 2, "zigzag", bounds).tolist() for r in range(2)] == [
        [0, 3, 4, 7],
        [1, 2, 5, 6],
    ]


def test_a_static_length_is_kept_where_the_padded_documents_fit() -> None:
    row = pack_text([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}], 8)
    batch = collate_varlen([row], pad_to=16)
    whole, _ = slices(batch, {"input_ids": Shard("cp", mode="zigzag", unit="document")}, 2)
    assert whole["input_ids"].tolist() == [[1, 2, 3, 7, 4, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]]
    assert whole["cu_seqlens"].tolist() == [0, 3, 4]
    assert whole["cu_seqlens_padded"].tolist() == [0, 4, 16]
    assert whole["cu_seq_lens_q"].tolist() == [0, 3, 4, 5, 8, 16]


def test_documents_that_collate_has_padded_are_left_where_they_are() -> None:
    row = pack_text([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}], 8)
    batch = collate_varlen([row], pad_documents_to_multiple_of=4)
    whole, (first, second) = slices(batch, {"input_ids": Shard("cp", mode="zigzag", unit="document")}, 2)
    assert whole["input_ids"] is batch["input_ids"]
    assert (first["input_ids"].tolist(), second["input_ids"].tolist()) == ([[1, 0, 4, 0]], [[2, 3, 0, 0]])


def test_how_built_in_functions_pad_is_known() -> None:
    pack = functools.partial(pack_text, pad_token_id=3, pad_values={"loss_weights": 0.5})
    assert padding_of(pack, collate_rows) == (Padding(3, -100, {"loss_weights": 0.5}), True)
    shifted = functools.partial(pack_text, shifted=True)
    assert padding_of(shifted, functools.partial(collate_varlen, ignore_index=-7)) == (Padding(0, -7), False)
    assert padding_of(padding_row, collate_rows) == (Padding(), False)


BATCH = {"input_ids": torch.ones(2, 6, dtype=torch.int64), "note": "x"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Shard(3), TypeError, "Shard mesh_dim=3, expected the name of a mesh dimension"),  # type: ignore[arg-type]
        (lambda: Shard("cp", dim=True), TypeError, "Shard dim=True (bool), expected an integer"),
        (
            lambda: Shard("cp", mode="ring"),  # type: ignore[arg-type]
            ValueError,
            "Shard mode='ring', expected one of ['contiguous', 'zigzag']",
        ),
        (
            lambda: Shard("cp", unit="token"),  # type: ignore[arg-type]
            ValueError,
            "Shard unit='token', expected one of ['row', 'document']",
        ),
        (lambda: Shard("cp", pad="x"), TypeError, "Shard pad='x' (str), expected a number or None"),  # type: ignore[arg-type]
        (
            lambda: slices(BATCH, ["input_ids"], 2),  # type: ignore[arg-type]
            TypeError,
            "shard is ['input_ids'], expected a mapping of field names to Shard",
        ),
        (
            lambda: slices(BATCH, {"input_ids": "cp"}, 2),  # type: ignore[dict-item]
            TypeError,
            "shard['input_ids'] is 'cp', expected a Shard, or None for a field that stays whole",
        ),
        (
            lambda: slices(BATCH, {"tokens": Shard("cp")}, 2),
            ValueError,
            "shard names the field 'tokens', which is not among the fields ['input_ids', 'note']: it cannot be divided "
            "along dimension -1. Name a tensor that collate makes.",
        ),
        (
            lambda: slices(BATCH, {"note": Shard("cp")}, 2),
            ValueError,
            "shard names the field 'note', which is str in the batch: it cannot be divided along dimension -1. Name a "
            "tensor that collate makes.",
        ),
        (
            lambda: slices(BATCH, {"input_ids": Shard("cp", unit="document")}, 2),
            ValueError,
            "unit='document' divides the documents of one flat sequence, but this batch has input_ids of shape (2, 6) and "
            "as cu_seqlens a NoneType: nobody could tell where they end. Use collate=collate_varlen, or unit='row'.",
        ),
        (
            lambda: slices(
                BATCH,
                {
                    "input_ids": Shard("cp", unit="document"),
                    "labels": Shard("cp", mode="zigzag", unit="document"),
                },
                2,
            ),
            ValueError,
            "shard divides documents in 2 ways [('cp', 'contiguous'), ('cp', 'zigzag')]: the fields would no longer stand "
            "beside each other. Give all fields with unit='document' the same mesh_dim and mode.",
        ),
        (
            lambda: shard_tensor(torch.ones(6), 0, 0, 2, "zigzag"),
            ValueError,
            "a dimension of 6 tokens cannot be divided over 2 ranks in mode 'zigzag': some would get fewer than others. Pad "
            "it to a multiple of 4.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        make()
