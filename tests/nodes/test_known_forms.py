"""Lengths known ahead, in any form that people have them, and each that cannot be is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import LoaderConfig, MetadataTable, RemoteRankError, SampleMetadata, StepSampler, build_loader
from evenstep.nodes.known import known_metadata


def forms(lengths: list[int], folder: Path) -> dict[str, Any]:
    path = folder / "lengths.npy"
    np.save(path, np.array(lengths, dtype=np.int32))
    records = [SampleMetadata(n) for n in lengths]
    return {
        "list": lengths,
        "int32": np.array(lengths, dtype=np.int32),
        "uint16": np.array(lengths, dtype=np.uint16),
        "tensor": torch.tensor(lengths),
        "path": path,
        "text path": str(path),
        "memory map": np.load(path, mmap_mode="r"),
        "columns": {"tokens": lengths, "patches": [1.5] * len(lengths)},
        "documents": {
            "tokens": lengths,
            "documents": lengths,
            "document_offsets": np.arange(len(lengths) + 1),
        },
        "records": records,
        "table": MetadataTable.from_samples(records),
        "known": known_metadata(lengths, len(lengths)),
    }


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    lengths = [3, 0, 7, 5, 9]
    index = np.array([4, 1, 1, 2])
    for name, form in forms(lengths, tmp_path).items():
        taken = known_metadata(form, 5).take(index)
        assert taken.tokens.tolist() == [9, 0, 0, 7], name
        assert taken.tokens.dtype == np.int64
        assert taken.documents.tolist() == [9, 0, 0, 7], name
        assert taken.loss_tokens.tolist() == [-1] * 4, name
        assert taken.features.keys() <= {"patches"}


def test_columns_take_documents_and_losses_along() -> None:
    known = known_metadata(
        {
            "tokens": [5, 4],
            "loss_tokens": [3, 2],
            "documents": [2, 3, 4],
            "document_offsets": [0, 2, 3],
            "patches": [1, 2],
        },
        0,
    )
    taken = known.take(np.array([1, 0]))
    assert taken.documents.tolist() == [4, 2, 3]
    assert taken.document_offsets.tolist() == [0, 1, 3]
    assert taken.loss_tokens.tolist() == [2, 3]
    assert taken.features["patches"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            [[1, 2]],
            "metadata column 'tokens' has shape (1, 2) and dtype int64, expected one integer per sample",
        ),
        (
            [1.5],
            "metadata column 'tokens' has shape (1,) and dtype float64, expected one integer per sample: pass "
            ".astype(np.int64)",
        ),
        (
            {"tokens": [1], "patches": ["a"]},
            "metadata column 'patches' has shape (1,) and dtype <U1, expected one number per sample",
        ),
        ({"length": [1]}, "metadata has the columns ['length'], expected one named 'tokens'"),
        (
            {"tokens": [1], "documents": [1]},
            "metadata needs both 'documents' and 'document_offsets', or neither",
        ),
        ({"tokens": [1], "patches": [1, 2]}, "metadata column 'patches' has 2 entries, expected 1"),
        (
            [1, 2, 3],
            "metadata has 3 samples, the sampler was made for 1: rows would be planned with the lengths of other "
            "samples. Compute the metadata from the dataset as it is now.",
        ),
    ],
)
def test_odd_metadata_is_refused(metadata: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        known_metadata(metadata, 1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, where in (("nix.npy", f" in {Path.cwd()}"), (tmp_path / "nix.npy", "")):
        message = (
            f"metadata is {str(path)!r}, and there is no such file{where}: pass the path of an .npy file of lengths on "
            f"every rank; `evenstep lengths MODULE:NAME -o {path}` writes one"
        )
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
            known_metadata(path, 1)


def test_a_budget_needs_its_column() -> None:
    message = (
        "metadata has no column 'patches', which has a budget: rows would be planned as if it were 0 in every sample. "
        "Pass it as a column, metadata={'tokens': ..., 'patches': ...}."
    )
    for metadata in ([1, 2], {"tokens": [1, 2]}, MetadataTable.from_tokens([1, 2])):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            known_metadata(metadata, 2, ["patches"])
    records = [SampleMetadata(1), SampleMetadata(2, {"patches": 3.0})]
    good: list[Any] = [records, {"tokens": [1, 2], "patches": [0, 3]}, MetadataTable.from_samples(records)]
    for metadata in good:
        assert known_metadata(metadata, 2, ["patches"]).take(np.array([1])).features["patches"].tolist() == [
            3.0
        ]


def test_a_budget_that_binds_nothing_is_said_once(corpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = LoaderConfig(seq_len=512, budgets={"pathces": 4.0})
    with build_loader(corpus, None, config, sampler=StepSampler(96, global_batch_size=8)) as loader:
        for _ in range(20):
            next(loader)
    assert [record.getMessage() for record in caplog.records if "budget" in record.getMessage()] == [
        "no sample of a window has the feature 'pathces', which has a budget: it binds nothing there. Return it from "
        "metadata_fn, in SampleMetadata(tokens, features={'pathces': ...})."
    ]


def test_a_negative_length_is_named_when_its_step_is_planned() -> None:
    known = known_metadata([3, 4, -2], 3)
    assert len(known.take(np.array([0, 1]))) == 2
    with pytest.raises(ValueError, match=re.escape("metadata gives sample 2 a length of -2 tokens")):
        known.take(np.array([1, 2]))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (MetadataTable.from_tokens([3, 4, -2]), "metadata gives sample 2 a length of -2 tokens"),
        (
            {"tokens": [3, 4, 2], "documents": [3, 2, 1, 2], "document_offsets": [0, 1, 3, 4]},
            "metadata gives sample 1 documents of 3 tokens together, but a length of 4 tokens",
        ),
        (
            [SampleMetadata(3), SampleMetadata(4, documents=[4, 1]), SampleMetadata(2)],
            "metadata gives sample 1 documents of 5 tokens together, but a length of 4 tokens",
        ),
        (
            {"tokens": [3, 4, 2], "documents": [3, 4, 2], "document_offsets": [0, 2, 1, 3]},
            "metadata has document_offsets that fall at sample 1: its documents have no place",
        ),
        (
            {"tokens": [3, 4, 2], "loss_tokens": [2, 9, -1]},
            "metadata gives sample 1 9 loss tokens, but a length of 4 tokens",
        ),
    ],
)
def test_what_cannot_be_is_named_when_its_step_is_planned(metadata: Any, message: str) -> None:
    dataset = [{"input_ids": torch.arange(n)} for n in (3, 4, 2)]
    sampler = StepSampler(3, global_batch_size=3, order="sequential")
    with (
        build_loader(dataset, None, LoaderConfig(seq_len=8), sampler=sampler, metadata=metadata) as loader,
        pytest.raises((ValueError, RemoteRankError), match=re.escape(message)),
    ):
        next(loader)


def test_only_the_rows_of_a_step_are_looked_at() -> None:
    class Column(np.ndarray[Any, np.dtype[np.int64]]):
        taken = 0

        def __getitem__(self, key: Any) -> Any:
            Column.taken += np.size(key)
            return super().__getitem__(key)

        def __array_finalize__(self, obj: Any) -> None:
            pass

    lengths = np.full(10**6, 300).view(Column)
    sampler = StepSampler(10**6, global_batch_size=8)

    class Dataset:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": torch.full((300,), index)}

    loader = build_loader(
        Dataset(), None, LoaderConfig(seq_len=512, host_prefetch=0), sampler=sampler, metadata=lengths
    )
    for _ in range(8):
        next(loader)
    assert Column.taken == 8
