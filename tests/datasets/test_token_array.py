"""Arrays of tokens with document offsets, in memory and mapped."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import LoaderConfig, StepSampler, build_loader
from evenstep.datasets import TokenArray


def sources(folder: Path, documents: Any) -> dict[str, TokenArray]:
    tokens = np.concatenate([np.concatenate(d) for d in documents]).astype(np.uint16)
    offsets = np.cumsum([0, *(sum(map(len, d)) for d in documents)])
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "offsets.npy", offsets.astype(np.uint32))
    tokens.tofile(folder / "tokens.bin")
    return {
        "arrays": TokenArray(tokens, offsets),
        "npy": TokenArray(folder / "tokens.npy", folder / "offsets.npy"),
        "raw": TokenArray(str(folder / "tokens.bin"), offsets.tolist(), dtype="uint16"),
    }


def test_documents_are_what_lies_between_offsets(documents: Any, tmp_path: Path) -> None:
    for name, dataset in sources(tmp_path, documents).items():
        assert len(dataset) == len(documents), name
        for k, document in enumerate(documents):
            tokens = dataset[k]["input_ids"]
            assert tokens.dtype == torch.int64
            assert np.array_equal(tokens.numpy(), np.concatenate(document))
            assert dataset.lengths[k] == len(tokens)


def test_a_document_is_a_copy(tmp_path: Path, documents: Any) -> None:
    dataset = sources(tmp_path, documents)["npy"]
    dataset[0]["input_ids"].zero_()
    assert dataset[0]["input_ids"].any()


def test_files_are_mapped_again_in_other_processes(documents: Any, tmp_path: Path) -> None:
    dataset = sources(tmp_path, documents)["npy"]
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data)[2]["input_ids"], dataset[2]["input_ids"])


def test_it_feeds_a_loader_that_knows_its_lengths(documents: Any, tmp_path: Path) -> None:
    dataset = sources(tmp_path, documents)["raw"]
    sampler = StepSampler(len(dataset), global_batch_size=2, remainder="pad")
    config = LoaderConfig(seq_len=2**18)
    with build_loader(dataset, None, config, sampler=sampler, metadata=dataset.lengths) as loader:
        assert sum(batch["info"].num_tokens for batch in loader) == dataset.lengths.sum()


@pytest.mark.parametrize(
    ("tokens", "offsets", "error", "message"),
    [
        ([1, 2, 3], [0, 2], ValueError, "offsets do not ascend from 0 to the 3 tokens"),
        ([1, 2, 3], [1, 3], ValueError, "offsets do not ascend from 0 to the 3 tokens"),
        ([1, 2, 3], [0, 2, 1, 3], ValueError, "offsets do not ascend from 0 to the 3 tokens"),
        ([[1, 2]], [0, 1], TypeError, "tokens has shape (1, 2) and dtype int64, expected integers [n]"),
        ([1.5], [0, 1], TypeError, "tokens has shape (1,) and dtype float64, expected integers [n]"),
    ],
)
def test_odd_arrays_are_refused(tokens: Any, offsets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        TokenArray(tokens, offsets)


def test_a_raw_file_needs_a_dtype_that_divides_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(7))
    with pytest.raises(
        ValueError, match=re.escape(f"{path} is no .npy file, so nothing says what its bytes are")
    ):
        TokenArray(path, [0, 7])
    with pytest.raises(ValueError, match=re.escape(f"{path} has 7 bytes, which uint16 does not divide")):
        TokenArray(path, [0, 3], dtype="uint16")


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"^document {index} of 2$"):
        TokenArray([1, 2, 3], [0, 1, 3])[index]
