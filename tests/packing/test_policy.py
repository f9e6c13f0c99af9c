"""Oversized samples reach any pack as the policy says."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.packing import (
    collate_rows,
    collate_varlen,
    empty_row,
    pack_text,
    pack_vision,
    padded_alike,
    slice_sample,
    truncate_sample,
    with_oversized,
)

SAMPLE: dict[str, Any] = {
    "input_ids": torch.tensor([1, 2, 3, 4]),
    "labels": [1, 2, 3, 4],
    "mrope": np.arange(12).reshape(3, 4),
    "index": 5,
    "name": "abcd",
}


def own_pack(samples: Any, seq_len: int) -> tuple[list[list[int]], int]:
    return [list(map(int, s["input_ids"])) for s in samples], seq_len


def test_every_field_is_cut_alike() -> None:
    cut = truncate_sample(SAMPLE, 3)
    assert cut["input_ids"].tolist() == [1, 2, 3]
    assert cut["labels"] == [1, 2, 3]
    assert cut["mrope"].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert (cut["index"], cut["name"]) == (5, "abcd")
    middle = slice_sample(SAMPLE, 1, 3)
    assert middle["input_ids"].tolist() == middle["labels"] == [2, 3]
    assert middle["mrope"].tolist() == [[1, 2], [5, 6], [9, 10]]
    assert (middle["index"], middle["name"]) == (5, "abcd")
    assert truncate_sample({"input_ids": [1, 2], "grid": [7, 8]}, 1, token_dims={"grid": None}) == {
        "input_ids": [1],
        "grid": [7, 8],
    }


@pytest.mark.parametrize("pack", [pack_text, pack_vision, functools.partial(pack_text, pad_token_id=1)])
def test_built_in_packs_get_the_option(pack: Any) -> None:
    assert with_oversized(pack, "truncate")([SAMPLE], 3)["input_ids"].tolist() == [1, 2, 3]
    assert with_oversized(pack, "single")([SAMPLE], 3)["input_ids"].tolist() == [1, 2, 3, 4]
    given = functools.partial(pack, oversized="single")
    assert with_oversized(given, "truncate") is given


def test_a_users_pack_gets_what_fits() -> None:
    assert with_oversized(own_pack, "truncate")([SAMPLE], 3) == ([[1, 2, 3]], 3)
    assert with_oversized(own_pack, "single")([SAMPLE], 3) == ([[1, 2, 3, 4]], 4)
    assert with_oversized(own_pack, "single")([SAMPLE], 4) == ([[1, 2, 3, 4]], 4)
    assert with_oversized(own_pack, "truncate")([SAMPLE, SAMPLE], 8)[1] == 8
    assert with_oversized(own_pack, "error") is own_pack


def test_a_policy_that_is_none_is_told() -> None:
    message = 'oversized is \'cut\'; use "error", "single" or "truncate"'
    unknown: Any = "cut"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        with_oversized(own_pack, unknown)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack_text([SAMPLE], 4, oversized=unknown)


def test_empty_rows_are_padded_as_their_pack_pads() -> None:
    for base in (pack_text, pack_vision):
        row = empty_row(functools.partial(base, pad_token_id=7, ignore_index=-1), 3)
        assert row["input_ids"].tolist() == [7, 7, 7]
        assert row["labels"].tolist() == [-1, -1, -1]
    assert set(empty_row(own_pack, 3, {"input_ids": torch.ones(3)})) == {"input_ids"}
    assert empty_row(own_pack, 3, ([[1]], 3))["input_ids"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("base", [pack_text, pack_vision])
@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_an_empty_row_has_the_fields_that_were_declared(base: Any, collate: Any) -> None:
    values = {"doc": -1, "weights": np.float32(0.5), "kind": np.int8(3), "labels": 7}
    pack = functools.partial(base, pad_values=values)
    batch = padded_alike(pack, collate)([empty_row(pack, 4), empty_row(pack, 4)])
    full = {name: batch[name].unique().tolist() for name in values}
    assert full == {"doc": [-1], "weights": [0.5], "kind": [3], "labels": [-100]}
    assert [batch[name].dtype for name in values] == [torch.int64, torch.float32, torch.int8, torch.int64]
    assert all(batch[name].shape == batch["input_ids"].shape for name in values)


@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_beside_samples_an_empty_row_declares_nothing(collate: Any) -> None:
    pack = functools.partial(pack_text, pad_values={"doc": -1, "absent": 1})
    sample = {"input_ids": torch.tensor([5, 6]), "doc": torch.tensor([2, 3], dtype=torch.int32)}
    batch = padded_alike(pack, collate)([empty_row(pack, 2), pack([sample], 2)])
    assert "absent" not in batch
    assert batch["doc"].dtype == torch.int32
    assert batch["doc"].flatten().tolist() == ([-1, -1, 2, 3] if collate is collate_rows else [2, 3])
