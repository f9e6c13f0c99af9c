"""pack_text against a reference that is written token by token."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.packing import count_loss_tokens, pack_text, padding_row

# Continuous integration is the derandomised profile.
thoroughly = settings(max_examples=500 if settings.default and settings.default.derandomize else 100)

IGNORE = -100


@st.composite
def documents(draw: st.DrawFn, max_samples: int = 5, max_len: int = 6) -> list[dict[str, Any]]:
    lengths = draw(st.lists(st.integers(0, max_len), max_size=max_samples))
    extras = draw(st.booleans())
    made = []
    for n in lengths:
        ids = draw(st.lists(st.integers(1, 99), min_size=n, max_size=n))
        kinds: list[Callable[[list[int]], Any]] = [torch.tensor, np.array, list]
        sample: dict[str, Any] = {"input_ids": draw(st.sampled_from(kinds))(ids)}
        if n == 0:
            sample["input_ids"] = torch.empty(0, dtype=torch.int64)
        if draw(st.booleans()):
            mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
            sample["labels"] = torch.tensor(
                [t if m else IGNORE for t, m in zip(ids, mask, strict=True)], dtype=torch.int64
            )
        if extras:
            sample["loss_weights"] = torch.arange(n, dtype=torch.float32) + 0.5
            sample["token_type_ids"] = np.arange(n, dtype=np.int32) % 2
            sample["mrope"] = torch.arange(3 * n).view(3, n)
            sample["embedding"] = torch.ones(n, 7) * 2
            sample["index"] = 7
        made.append(sample)
    return made


def ints(value: Any) -> list[int]:
    return [int(x) for x in value]


def reference(samples: list[dict[str, Any]], seq_len: int, shifted: bool) -> dict[str, list[int]]:
    """Token by token, as one would explain it."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    boundaries = [0]
    for sample in samples:
        tokens = ints(sample["input_ids"])
        own = ints(sample.get("labels", tokens))
        for position, token in enumerate(tokens):
            ids.append(token)
            positions.append(position)
            if shifted:
                labels.append(own[position + 1] if position + 1 < len(tokens) else IGNORE)
            else:
                labels.append(own[position] if position else IGNORE)
        if tokens:
            boundaries.append(len(ids))
    padding = seq_len - len(ids)
    return {
        "input_ids": ids + [9] * padding,
        "labels": labels + [IGNORE] * padding,
        "position_ids": positions + [0] * padding,
        "cu_seqlens": boundaries,
    }


@thoroughly
@given(documents(), st.integers(1, 9), st.booleans())
def test_a_row_is_what_the_reference_says(samples: list[dict[str, Any]], spare: int, shifted: bool) -> None:
    total = sum(len(s["input_ids"]) for s in samples)
    row = pack_text(samples, total + spare, pad_token_id=9, shifted=shifted)
    expected = reference(samples, total + spare, shifted)
    assert {name: row[name].tolist() for name in expected} == expected
    assert row["num_tokens"] == total
    assert row["max_seqlen"] == max((len(s["input_ids"]) for s in samples), default=0)
    assert [row[name].dtype for name in ("input_ids", "labels", "position_ids")] == [torch.int64] * 3
    assert row["cu_seqlens"].dtype == torch.int32
    assert type(row["num_tokens"]) is int
    assert type(row["max_seqlen"]) is int


@thoroughly
@given(documents(), st.integers(1, 9), st.booleans())
def test_other_fields_go_along(samples: list[dict[str, Any]], spare: int, shifted: bool) -> None:
    kept = [s for s in samples if len(s["input_ids"])]
    if not kept or "mrope" not in kept[0]:
        return
    total = sum(len(s["input_ids"]) for s in kept)
    row = pack_text(samples, total + spare, shifted=shifted, pad_values={"token_type_ids": 5})
    types = [t for s in kept for t in s["token_type_ids"].tolist()]
    assert row["token_type_ids"].tolist() == types + [5] * spare
    assert row["token_type_ids"].dtype == torch.int32
    assert row["mrope"].tolist() == [
        [x for s in kept for x in s["mrope"][axis].tolist()] + [0] * spare for axis in range(3)
    ]
    assert row["embedding"].tolist() == [[2.0] * 7] * total + [[0.0] * 7] * spare
    weights: list[float] = []
    for s in kept:
        own = s["loss_weights"].tolist()
        weights += [*own[1:], 0.0] if shifted else own
    assert row["loss_weights"].tolist() == weights + [0.0] * spare
    assert row["index"] == [7] * len(kept)


@thoroughly
@given(documents(max_samples=1, max_len=12), st.integers(1, 8), st.booleans())
def test_counted_loss_tokens_are_those_packed(
    samples: list[dict[str, Any]], seq_len: int, shifted: bool
) -> None:
    row = pack_text(samples, seq_len, shifted=shifted, oversized="truncate")
    counted = sum(count_loss_tokens(s, seq_len) or 0 for s in samples)
    assert int((row["labels"] != IGNORE).sum()) == counted


def test_loss_tokens_of_other_samples_are_unknown() -> None:
    assert count_loss_tokens("text") is None
    assert count_loss_tokens({"text": "text"}) is None
    assert count_loss_tokens({"input_ids": []}) == 0
    assert count_loss_tokens({"input_ids": [1, 2, 3], "labels": [-1, -1, 3]}, ignore_index=-1) == 1
    assert count_loss_tokens({"input_ids": [1, 2, 3, 4], "docs": [2, 2]}, documents="docs") == 2


def test_a_sample_as_long_as_the_row_fits() -> None:
    row = pack_text([{"input_ids": [1, 2, 3]}], 3)
    assert row["input_ids"].tolist() == [1, 2, 3]
    assert row["cu_seqlens"].tolist() == [0, 3]


def test_oversized_policies() -> None:
    sample = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4], "type": [0, 0, 1, 1]}
    row = pack_text([sample], 3, oversized="truncate", shifted=True)
    assert row["input_ids"].tolist() == [1, 2, 3]
    assert row["labels"].tolist() == [2, 3, IGNORE]
    assert row["type"].tolist() == [0, 0, 1]
    assert row["cu_seqlens"].tolist() == [0, 3]
    row = pack_text([sample], 3, oversized="single")
    assert row["input_ids"].tolist() == [1, 2, 3, 4]
    assert row["num_tokens"] == 4
    message = (
        "a sample of 4 tokens in a row of 3; 1 tokens would be lost; choose "
        'oversized="truncate" or "single", or raise seq_len (lengths [4])'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack_text([sample], 3)


def test_documents_inside_a_sample() -> None:
    sample = {"input_ids": [1, 2, 3, 4, 5], "docs": [2, 0, 3]}
    row = pack_text([sample], 6, documents="docs")
    assert row["cu_seqlens"].tolist() == [0, 2, 5]
    assert row["labels"].tolist() == [IGNORE, 2, IGNORE, 4, 5, IGNORE]
    assert row["position_ids"].tolist() == [0, 1, 0, 1, 2, 0]
    cut = pack_text([sample], 4, documents="docs", oversized="truncate")
    assert cut["cu_seqlens"].tolist() == [0, 2, 4]
    assert count_loss_tokens(sample, 4, documents="docs") == 2
    between = pack_text([sample], 2, documents="docs", oversized="truncate")
    assert between["cu_seqlens"].tolist() == [0, 2]


def test_positions_of_the_samples_are_kept() -> None:
    row = pack_text([{"input_ids": [1, 2], "position_ids": torch.tensor([[4, 5], [6, 7], [8, 9]])}], 3)
    assert row["position_ids"].tolist() == [[4, 5, 0], [6, 7, 0], [8, 9, 0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32])
def test_token_types_of_files(dtype: Any) -> None:
    ids = np.array([1, 2, 250], dtype=dtype)
    ids.flags.writeable = False
    assert pack_text([{"input_ids": ids}, {"input_ids": ids[::-1]}], 6)["input_ids"].tolist() == [
        1,
        2,
        250,
        250,
        2,
        1,
    ]


def test_a_padding_row_is_an_empty_pack() -> None:
    row = padding_row(seq_len=4, pad_token_id=3, ignore_index=-1)
    same = pack_text([], 4, pad_token_id=3, ignore_index=-1)
    assert row["cu_seqlens"].tolist() == [0] == same["cu_seqlens"].tolist()
    assert row["num_tokens"] == row["max_seqlen"] == 0
    for name, value in {"input_ids": 3, "labels": -1, "position_ids": 0}.items():
        assert row[name].tolist() == [value] * 4 == same[name].tolist()


def test_a_padding_row_like_another() -> None:
    sample = {"input_ids": [1, 2], "mrope": torch.ones(3, 2, dtype=torch.int32), "index": 4}
    row = padding_row(pack_text([sample], 4))
    assert row["mrope"].dtype == torch.int32
    assert row["mrope"].tolist() == [[0] * 4] * 3
    assert row["index"] == []
    with pytest.raises(
        ValueError, match=r"^a padding row needs its length; give seq_len, or a row to be like$"
    ):
        padding_row()


def test_a_padding_row_like_a_users() -> None:
    arrays = padding_row({"input_ids": np.ones(3, np.int32), "labels": np.ones(3), "images": np.ones((2, 4))})
    assert {name: (value.tolist(), value.dtype) for name, value in arrays.items()} == {
        "input_ids": ([0, 0, 0], np.int32),
        "labels": ([-100.0] * 3, np.float64),
        "images": ([], np.float64),
    }
    assert arrays["images"].shape == (0, 4)
    scalar = padding_row({"input_ids": torch.ones(3), "scale": torch.tensor(2.5)})["scale"]
    assert (scalar.tolist(), scalar.dtype) == (0.0, torch.float32)
    assert padding_row(
        {"input_ids": [1, 2], "labels": [1, 2], "documents": 2, "source": "web"}, seq_len=3
    ) == {
        "input_ids": [0, 0, 0],
        "labels": [-100] * 3,
        "documents": 0,
        "source": "web",
    }


ONE = {"input_ids": [1, 2, 3]}
BAD: list[tuple[list[Any], type[Exception], str]] = [
    (
        [ONE, ONE],
        ValueError,
        "2 samples with 6 tokens in a row of 5; 1 tokens would be lost; plan the rows with the lengths that are "
        "packed (lengths [3, 3])",
    ),
    (
        [{**ONE, "w": [1, 2, 3]}, {"input_ids": [4]}],
        ValueError,
        "field 'w' is missing in samples [1] of the 2 of a row; its values would stand beside the wrong tokens; "
        "give it to every sample or to none",
    ),
    (
        [{**ONE, "w": [1, 2, 3]}, {"input_ids": [4, 5], "w": [1]}],
        ValueError,
        "field 'w' has shape [1] in sample 1 of a row, which has 2 tokens; its values would stand beside the "
        "wrong tokens; give one value per token, or say token_dims={'w': None} if it is not per token",
    ),
    (
        [{**ONE, "labels": [1, 2]}],
        ValueError,
        "field 'labels' has shape [2] in sample 0 of a row, which has 3 tokens; its values would stand beside the "
        "wrong tokens; give one value per token",
    ),
    (
        ["text"],
        TypeError,
        'sample 0 of the row is a str; packing needs a mapping with 1-d integer "input_ids"; map your dataset to '
        "such samples or give your own pack",
    ),
    (
        [{"input_ids": [0.5]}],
        TypeError,
        "input_ids of sample 0 of the row is a list of shape [1] and type torch.float32; packing needs a 1-d "
        "sequence of integers",
    ),
]


@pytest.mark.parametrize(("samples", "error", "message"), BAD)
def test_bad_samples_are_told(samples: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        pack_text(samples, 5)


@pytest.mark.parametrize(
    ("seq_len", "error", "message"),
    [
        (True, TypeError, "seq_len is True, a bool; it must be an int"),
        (
            0,
            ValueError,
            "seq_len is 0; a row has between 1 and 2147483647 tokens, because its boundaries are int32",
        ),
        (
            2**31,
            ValueError,
            "seq_len is 2147483648; a row has between 1 and 2147483647 tokens, because its boundaries are int32",
        ),
    ],
)
def test_bad_row_lengths_are_told(seq_len: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        pack_text([ONE], seq_len)


def test_a_row_shares_nothing_with_its_samples() -> None:
    sample: dict[str, Any] = {
        "input_ids": torch.tensor([1, 2]),
        "labels": torch.tensor([1, 2]),
        "w": torch.ones(2),
        "image": torch.ones(5, 5),
        "meta": {"a": [1]},
    }
    row = pack_text([sample], 2)
    for value in sample.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    sample["meta"]["a"].append(2)
    assert row["input_ids"].tolist() == [1, 2]
    assert row["labels"].tolist() == [IGNORE, 2]
    assert row["w"].tolist() == [1, 1]
    assert float(row["image"][0].sum()) == 25
    assert row["meta"] == [{"a": [1]}]
