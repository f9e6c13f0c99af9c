"""Columns of a Hugging Face dataset, through the loader."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import LoaderConfig, StepSampler, build_loader
from evenstep.datasets import HuggingFaceDataset
from evenstep.testing import assert_same

datasets: Any = pytest.importorskip("datasets")


@pytest.fixture
def table(documents: Any) -> Any:
    sequences = [s.tolist() for document in documents for s in document][:64]
    return datasets.Dataset.from_dict(
        {"input_ids": sequences, "labels": sequences, "name": [str(k) for k in range(64)]}
    )


def test_lengths_come_from_the_offsets_of_the_column(table: Any) -> None:
    expected = [len(row) for row in table["input_ids"]]
    assert HuggingFaceDataset(table).lengths.tolist() == expected
    shuffled = table.shuffle(seed=1)
    assert HuggingFaceDataset(shuffled).lengths.tolist() == [len(row) for row in shuffled["input_ids"]]


def test_a_column_of_lengths_is_taken_at_its_word(table: Any) -> None:
    counted = table.add_column("length", list(range(64)))
    dataset = HuggingFaceDataset(counted, ["input_ids"], length_column="length")
    assert dataset.lengths.tolist() == list(range(64))


def test_rows_are_tensors_one_by_one_and_many_at_once(table: Any) -> None:
    dataset = HuggingFaceDataset(table)
    one = dataset[3]
    assert one["input_ids"].dtype == torch.int64
    assert one["input_ids"].tolist() == table[3]["input_ids"]
    assert one["name"] == "3"
    assert_same(dataset.__getitems__([3, 0, 3]), [dataset[3], dataset[0], dataset[3]])


@pytest.mark.parametrize("workers", [0, 2])
def test_it_feeds_a_loader_that_knows_its_lengths(table: Any, workers: int) -> None:
    dataset = HuggingFaceDataset(table, ["input_ids", "labels"])
    config = LoaderConfig(seq_len=2**15, num_workers=workers)
    sampler = StepSampler(64, global_batch_size=8)
    with build_loader(dataset, None, config, sampler=sampler, metadata=dataset.lengths) as loader:
        assert sum(batch["info"].num_tokens for batch in loader) == np.sum(dataset.lengths)


def test_odd_datasets_are_refused(table: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape("the dataset has no column 'tokens', it has 'input_ids', 'labels'")
    ):
        HuggingFaceDataset(table, ["tokens"])
    with pytest.raises(
        TypeError, match=re.escape("IterableDataset is no map-style datasets.Dataset; wrap a streaming")
    ):
        HuggingFaceDataset(table.to_iterable_dataset())
