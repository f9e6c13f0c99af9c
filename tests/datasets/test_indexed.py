"""Indexed corpora as Megatron writes them, through the loader."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import DataPlane, LoaderConfig, StepSampler, TokenBudgetSampler, build_loader
from evenstep.datasets import IndexedDataset
from evenstep.testing import SimulatedWorld


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
@pytest.mark.parametrize("sequences", [False, True])
def test_it_reads_what_was_written(documents: Any, write_indexed: Any, dtype: str, sequences: bool) -> None:
    documents = [[s % 128 for s in document] for document in documents]
    dataset = IndexedDataset(write_indexed(documents, dtype), sequences=sequences)
    items = [s for d in documents for s in d] if sequences else [np.concatenate(d) for d in documents]
    assert len(dataset) == len(items)
    assert dataset.lengths.tolist() == [len(item) for item in items]
    assert dataset.lengths.dtype == np.int64
    for k, item in enumerate(items):
        tokens = dataset[k]["input_ids"]
        assert tokens.dtype == torch.int64
        assert np.array_equal(tokens.numpy(), item)


def test_either_ending_will_do_and_a_missing_half_is_named(documents: Any, write_indexed: Any) -> None:
    prefix = write_indexed(documents)
    for path in (prefix, str(prefix), prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        assert len(IndexedDataset(path)) == len(documents)
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"{prefix}.bin does not exist: an indexed corpus is a pair")
    ):
        IndexedDataset(prefix)


def test_halves_that_do_not_belong_together_are_refused(documents: Any, write_indexed: Any) -> None:
    prefix = write_indexed(documents)
    data = prefix.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-2])
    size = data.stat().st_size
    message = (
        f"{data} has {size} bytes, its index points to {size + 2}: the two do not belong together, or the file was cut "
        "off"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        IndexedDataset(prefix)


def test_tokens_that_are_no_integers_are_refused(documents: Any, write_indexed: Any) -> None:
    prefix = write_indexed(documents, "float32")
    with pytest.raises(ValueError, match=re.escape(f"{prefix}.idx is of float32, tokens are integers")):
        IndexedDataset(prefix)


def test_an_unknown_dtype_is_refused(documents: Any, write_indexed: Any) -> None:
    prefix = write_indexed(documents)
    index = prefix.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    data[17] = 99
    index.write_bytes(bytes(data))
    message = f"{index} says that its tokens have dtype code 99, known are [1, 2, 3, 4, 5, 6, 7, 8]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        IndexedDataset(prefix)


def test_other_processes_map_the_files_again(documents: Any, write_indexed: Any) -> None:
    dataset = IndexedDataset(write_indexed(documents))
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert torch.equal(again[3]["input_ids"], dataset[3]["input_ids"])


@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_index_out_of_range_is_an_index_error(documents: Any, write_indexed: Any, index: int) -> None:
    dataset = IndexedDataset(write_indexed(documents))
    with pytest.raises(IndexError, match=re.escape(f"item {index} of {len(documents)}")):
        dataset[index]


def test_the_index_alone_is_enough_to_plan(documents: Any, write_indexed: Any) -> None:
    """METADATA graph for free: every paragraph of the standard library, once, in full rows."""
    prefix = write_indexed(documents)

    def rank(plane: DataPlane) -> list[int]:
        dataset = IndexedDataset(prefix, sequences=True)
        config = LoaderConfig(seq_len=2**16, micro_batch_size=2)
        sampler = TokenBudgetSampler(dataset.lengths, rows_per_step=8, seq_len=2**16, remainder="pad")
        loader = build_loader(dataset, plane, config, sampler=sampler, metadata=dataset.lengths)
        with loader:
            return [batch["info"].num_tokens for batch in loader]

    results = SimulatedWorld(2).run(rank)
    assert sum(map(sum, results)) == sum(len(s) for document in documents for s in document)


def test_worker_processes_read_it(documents: Any, write_indexed: Any) -> None:
    dataset = IndexedDataset(write_indexed(documents))
    tokens = []
    for workers in (0, 1):
        config = LoaderConfig(seq_len=2**18, num_workers=workers, worker="process")
        sampler = StepSampler(len(dataset), global_batch_size=2, seed=1)
        with build_loader(dataset, None, config, sampler=sampler, metadata=dataset.lengths) as loader:
            tokens.append([int(batch["input_ids"].sum()) for batch in loader])
    assert tokens[0] == tokens[1]
