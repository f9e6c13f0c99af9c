"""A collator of samples, written here as Hugging Face trainers have them, stands as pack and collate."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.packing import empty_row, from_collator, padding_row
from evenstep.testing.packs import check_pack
from evenstep.testing.strategies import samples


def flatten(features: list[dict[str, Any]]) -> dict[str, Any]:
    """As the flattening collators do: lists in, the first sample tells whether there are labels."""
    labelled = "labels" in features[0]
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for feature in features:
        ids += feature["input_ids"]
        labels += [-100, *(feature["labels"] if labelled else feature["input_ids"])[1:]]
        positions += range(len(feature["input_ids"]))
    return {
        name: torch.tensor([values])
        for name, values in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
    }


def test_it_is_a_right_pair() -> None:
    check_pack(*from_collator(flatten), samples=samples(extras=()))


def test_lists_arrays_and_tensors_become_lists() -> None:
    pack, collate = from_collator(flatten)
    row = pack(
        [
            {"input_ids": torch.tensor([1, 2]), "image": torch.ones(2, 2), "name": "a"},
            {"input_ids": np.array([3]), "labels": [4], "image": np.ones((2, 2)), "name": "b"},
            {"input_ids": []},
        ],
        4,
    )
    assert [sample["input_ids"] for sample in row] == [[1, 2], [3]]
    assert row[0]["name"] == "a"
    assert row[0]["image"].shape == row[1]["image"].shape == (2, 2)
    assert collate([row])["labels"].tolist() == [[-100, 2, -100]]


def test_a_micro_batch_without_samples_is_one_ignored_token() -> None:
    pack, collate = from_collator(flatten, pad_token_id=7, ignore_index=-100)
    batch = collate([empty_row(pack, 4)])
    assert batch["input_ids"].tolist() == [[7]]
    assert batch["labels"].tolist() == [[-100]]
    assert collate([padding_row(seq_len=4), pack([{"input_ids": [1]}], 4)])["input_ids"].tolist() == [[1]]


def test_more_samples_than_planned_are_told() -> None:
    pack, _ = from_collator(flatten)
    message = (
        "2 samples with 6 tokens in a row of 5; the micro-batch would take more memory than planned; plan the rows with "
        "the lengths that are packed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack([{"input_ids": [1, 2, 3]}] * 2, 5)
