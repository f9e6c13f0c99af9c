"""Masks against attention computed document by document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from evenstep.packing import (
    block_diagonal_mask,
    collate_rows,
    collate_varlen,
    document_ids,
    document_mask_mod,
    pack_text,
    thd_arguments,
)

# Continuous integration is the derandomised profile.
thoroughly = settings(max_examples=500 if settings.default and settings.default.derandomize else 100)

ROWS = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=3)


def pack(lengths: list[list[int]], seq_len: int = 16) -> list[dict[str, Any]]:
    return [_row(docs, seq_len) for docs in lengths]


def _row(docs: list[int], seq_len: int) -> dict[str, Any]:
    return pack_text([{"input_ids": list(range(n))} for n in docs], seq_len)


@thoroughly
@given(ROWS)
def test_ids_count_documents_in_every_row(lengths: list[list[int]]) -> None:
    ids = document_ids(collate_rows(pack(lengths)))
    assert ids.dtype == torch.int32
    assert ids.tolist() == [
        [k for k, n in enumerate(docs) for _ in range(n)] + [-1] * (16 - sum(docs)) for docs in lengths
    ]
    assert document_ids(pack(lengths)[0]).tolist() == ids[0].tolist()


@thoroughly
@given(ROWS, st.sampled_from([1, 4]), st.sampled_from([1, 4]))
def test_ids_of_a_flat_sequence(
    lengths: list[list[int]], pad_to_multiple_of: int, pad_documents_to_multiple_of: int
) -> None:
    batch = collate_varlen(
        pack(lengths),
        pad_to_multiple_of=pad_to_multiple_of,
        pad_documents_to_multiple_of=pad_documents_to_multiple_of,
    )
    ids = document_ids(batch)
    assert ids.shape == batch["input_ids"].shape
    flat = [n for docs in lengths for n in docs]
    assert [int((ids == k).sum()) for k in range(len(flat))] == flat
    assert int((ids >= 0).sum()) == batch["num_tokens"]
    expected = torch.full_like(ids[0], -1)
    for k, (start, n) in enumerate(zip(batch["cu_seqlens_padded"][:-1].tolist(), flat, strict=True)):
        expected[start : start + n] = k
    assert ids[0].tolist() == expected.tolist()


@pytest.mark.parametrize("causal", [True, False])
@thoroughly
@given(ROWS)
def test_attention_stays_inside_documents(causal: bool, lengths: list[list[int]]) -> None:
    batch = collate_rows(pack(lengths))
    ids = document_ids(batch)
    mask = block_diagonal_mask(ids, causal=causal)
    assert mask.shape == (len(lengths), 1, 16, 16)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(len(lengths), 2, 16, 4, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    packed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert bool(packed.isfinite().all())
    for row, boundaries in enumerate(batch["cu_seqlens"]):
        for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
            part = (row, slice(None), slice(start, end))
            alone = scaled_dot_product_attention(q[part], k[part], v[part], is_causal=causal)
            torch.testing.assert_close(packed[row, :, start:end], alone)


@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_sees_the_same_mask(causal: bool) -> None:
    ids = document_ids(collate_rows(pack([[3, 2], [], [5]])))
    mask = create_mask(document_mask_mod(ids, causal=causal), 3, 1, 16, 16, device="cpu")
    assert torch.equal(mask, block_diagonal_mask(ids, causal=causal))


def test_one_row() -> None:
    assert block_diagonal_mask(document_ids(_row([1, 2], 4))).int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 0, 1],
    ]


def test_transformer_engine_gets_real_and_padded_boundaries() -> None:
    batch = collate_varlen(pack([[3, 2], [5]]), pad_documents_to_multiple_of=4, pad_to_multiple_of=16)
    arguments = thd_arguments(batch)
    assert arguments["qkv_format"] == "thd"
    assert arguments["cu_seqlens_q"].tolist() == arguments["cu_seqlens_kv"].tolist() == [0, 3, 5, 10]
    assert arguments["cu_seqlens_q_padded"].tolist() == [0, 4, 8, 16]
    assert arguments["cu_seqlens_kv_padded"].tolist() == [0, 4, 8, 16]
    assert arguments["max_seqlen_q"] == arguments["max_seqlen_kv"] == 8
    assert thd_arguments(collate_varlen(pack([[]])))["max_seqlen_q"] == 0
