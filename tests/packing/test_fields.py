"""Which values are per token, along which dimension, and in which type they come out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.packing import pack_text


def packed(name: str, values: list[Any], lengths: list[int], **options: Any) -> Any:
    samples = [
        {"input_ids": torch.ones(n, dtype=torch.int64), name: v} for n, v in zip(lengths, values, strict=True)
    ]
    return pack_text(samples, sum(lengths) + 1, **options)[name]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int16, torch.uint16, torch.complex64]
)
def test_types_are_kept(dtype: torch.dtype) -> None:
    field = packed("x", [torch.ones(2).to(dtype), torch.ones(3).to(dtype)], [2, 3])
    assert field.dtype == dtype
    assert field.to(torch.complex64).tolist() == [1, 1, 1, 1, 1, 0]


def test_mixed_types_are_promoted() -> None:
    field = packed("x", [[1, 2], [0.5]], [2, 1])
    assert field.dtype == torch.float32
    assert field.tolist() == [1, 2, 0.5, 0]


def test_gradients_stay_behind() -> None:
    field = packed("x", [torch.ones(2, requires_grad=True)], [2])
    assert not field.requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3)[::-1],
        np.arange(3, dtype=">i4")[::-1],
        np.broadcast_to(np.int64(2), (3,)),
        np.arange(6)[::2],
    ],
)
def test_odd_arrays_are_read(array: np.ndarray[Any, Any]) -> None:
    assert packed("x", [array], [3]).tolist() == [*array.tolist(), 0]


def test_the_dimension_that_fits_every_sample_is_meant() -> None:
    # The first sample has as many tokens as its features are wide.
    field = packed("x", [torch.ones(4, 4), torch.ones(2, 4)], [4, 2])
    assert field.shape == (7, 4)
    field = packed("x", [torch.ones(3, 3), torch.ones(3, 2)], [3, 2])
    assert field.shape == (3, 6)


def test_a_lone_ambiguous_field_is_told_by_its_option() -> None:
    square = torch.arange(9).view(3, 3)
    assert packed("x", [square], [3]).shape == (3, 4)
    assert packed("x", [square], [3], token_dims={"x": 0}).shape == (4, 3)
    assert packed("x", [square], [3], token_dims={"x": -1}).shape == (3, 4)
    assert torch.equal(packed("x", [square], [3], token_dims={"x": None})[0], square)


@pytest.mark.parametrize(
    "value",
    [
        "abc",
        [b"a", b"b", b"c"],
        ["a", "b", "c"],
        [[1], [2, 3], []],
        np.array(["a", "b", "c"]),
        {1, 2, 3},
        3,
        None,
    ],
)
def test_values_without_numbers_per_token_stay_with_their_sample(value: Any) -> None:
    field = packed("x", [value], [3])
    assert isinstance(field, list)
    assert len(field) == 1
    assert type(field[0]) is type(value)


def test_a_dimension_that_counts_no_tokens_is_told() -> None:
    message = (
        "field 'x' has shape [2, 4], but token_dims says that its dimension 0 counts the 3 tokens of the sample; it "
        "could not be cut with them; correct the field or token_dims"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        packed("x", [torch.ones(2, 4)], [3], token_dims={"x": 0})


def test_a_field_that_fits_each_sample_along_another_dimension_is_told() -> None:
    message = (
        "field 'x' has shape [2, 5] in sample 1 of a row, which has 2 tokens; its values would stand beside the wrong "
        "tokens; give one value per token, or say token_dims={'x': None} if it is not per token"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        packed("x", [torch.ones(4, 3), torch.ones(2, 5)], [3, 2])


def test_documents_that_do_not_add_up_are_told() -> None:
    message = (
        "field 'docs' of sample 0 of the row says that its documents have [2, 2] tokens, but it has 3; labels would "
        "cross documents; correct the lengths"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack_text([{"input_ids": [1, 2, 3], "docs": [2, 2]}], 4, documents="docs")


def test_as_many_documents_as_tokens_are_no_token_field() -> None:
    samples = [{"input_ids": [1], "docs": [1]}, {"input_ids": [2, 3, 4], "docs": [1, 2]}]
    row = pack_text(samples, 4, documents="docs")
    assert row["cu_seqlens"].tolist() == [0, 1, 2, 4]
    assert row["docs"] == [[1], [1, 2]]


def test_more_tokens_than_boundaries_can_count_are_told() -> None:
    tokens = torch.ones(1, dtype=torch.int64).expand(2**31)
    message = "the samples have 2147483648 tokens; the boundaries of a row are int32: at most 2147483647"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack_text([{"input_ids": tokens}], 8, oversized="single")
