"""Documents longer than a row become pieces: nothing lost, nothing twice, the same on every machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import LoaderConfig, StepSampler, TokenBudgetSampler, build_loader
from evenstep.datasets import SplitDocuments, TokenArray

Sample = dict[str, Any]


class Corpus:
    """Document k has ``lengths[k]`` tokens, numbered through, and fields beside them."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.epoch = -1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        first = int(self.lengths[:index].sum())
        ids = torch.arange(first, first + int(self.lengths[index]))
        return {"input_ids": ids, "labels": (-ids).tolist(), "name": f"document {index}"}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


LENGTHS = st.lists(st.integers(0, 40), max_size=12)


@given(LENGTHS, st.integers(1, 15))
def test_pieces_are_the_documents_in_order(lengths: list[int], most: int) -> None:
    pieces = SplitDocuments(Corpus(lengths), most)
    read = [pieces[k] for k in range(len(pieces))]
    assert [token for piece in read for token in piece["input_ids"].tolist()] == list(range(sum(lengths)))
    assert [-label for piece in read for label in piece["labels"]] == list(range(sum(lengths)))
    assert [len(piece["input_ids"]) for piece in read] == pieces.lengths.tolist()
    assert pieces.lengths.max(initial=0) <= most
    assert [piece["name"] for piece in read] == [f"document {k}" for k in pieces.documents]
    assert sorted(set(pieces.documents.tolist())) == list(range(len(lengths)))
    assert pieces.split == sum(length > most for length in lengths)
    # A piece that is not its document's last one is full: there are no more pieces than needed.
    assert len(pieces) == sum(max(1, -(-length // most)) for length in lengths)
    firsts = np.cumsum([0, *lengths])[pieces.documents]
    assert (firsts + pieces.starts == np.cumsum(pieces.lengths) - pieces.lengths).all()


@given(LENGTHS, st.integers(1, 15))
def test_a_dataset_that_reads_parts_gives_the_same(lengths: list[int], most: int) -> None:
    corpus = TokenArray(np.arange(sum(lengths)), np.cumsum([0, *lengths]))
    parts, whole = SplitDocuments(corpus, most), SplitDocuments(Corpus(lengths), most)
    for k in range(len(whole)):
        assert torch.equal(parts[k]["input_ids"], whole[k]["input_ids"])


def test_a_short_document_is_the_dataset_s_own_sample() -> None:
    sample = {"input_ids": [1, 2, 3], "pixel_values": object()}
    assert SplitDocuments([sample], 3, lengths=[3])[0] is sample


def test_both_graphs_train_on_every_token(tmp_path: Path) -> None:
    corpus = Corpus([100, 3, 0, 64, 17, 250])
    np.save(tmp_path / "lengths.npy", corpus.lengths)
    pieces = SplitDocuments(corpus, 32, lengths=tmp_path / "lengths.npy")
    config = LoaderConfig(seq_len=32, accumulation_steps="auto")
    sampler = StepSampler(len(pieces), global_batch_size=4, remainder="pad")
    with build_loader(pieces, None, config, sampler=sampler) as loader:
        found = [batch["input_ids"][batch["labels"] != -100] for batch in loader]
    firsts = np.cumsum(pieces.lengths) - pieces.lengths  # the first token of a piece is never predicted
    expected = sorted({*range(434)} - {*firsts.tolist()})
    assert sorted(torch.cat(found).tolist()) == expected
    budget = TokenBudgetSampler(pieces.lengths, rows_per_step=2, seq_len=32, remainder="pad")
    with build_loader(
        pieces, None, LoaderConfig(seq_len=32), sampler=budget, metadata=pieces.lengths
    ) as loader:
        assert sum(batch["info"].num_tokens for batch in loader) == 434


def test_the_epoch_is_passed_on() -> None:
    corpus = Corpus([3])
    SplitDocuments(corpus, 2).set_epoch(4)
    assert corpus.epoch == 4
    assert not hasattr(SplitDocuments([{"input_ids": [1]}], 2), "set_epoch")


def test_a_document_that_changed_is_noticed() -> None:
    message = (
        "document 0 has 5 tokens, its length says 4: its pieces would miss tokens; the lengths are of another version of the "
        "dataset, find them anew"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SplitDocuments(Corpus([5]), 3, lengths=[4])[1]
    array = TokenArray(np.arange(9), [0, 5, 9])
    for told, found in (([4, 4], "not 4 tokens"), ([6, 4], "not 6 tokens")):
        message = (
            f"document 0 has {found}, its length says {told[0]}: its pieces would miss tokens; the lengths are of another "
            "version of the dataset, find them anew"
        )
        pieces = SplitDocuments(array, 3, lengths=told)
        assert pieces[0]["input_ids"].tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            pieces[1]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_the_size_of_pieces_may_be_any_integer_of_numpy(kind: Any) -> None:
    pieces = SplitDocuments(Corpus([300, 5]), kind(120))
    assert pieces.lengths.tolist() == [120, 120, 60, 5]
    assert pieces.starts.tolist() == [0, 120, 240, 0]
    assert pieces.lengths.dtype == pieces.starts.dtype == np.int64


@pytest.mark.parametrize("most", [0, -1, True, 2.0])
def test_pieces_hold_tokens(most: Any) -> None:
    message = (
        f"max_tokens={most!r}: pieces of no tokens never end; give an int of at least 1, such as seq_len"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SplitDocuments(Corpus([1]), most)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2], "2 lengths for 1 documents: they are of another dataset; scan it again"),
        ([-2], "document 0 has -2 tokens, expected at least 0"),
        (
            [1.0],
            "lengths are float64 [1], expected one integer per document, [n]; pass lengths.astype(np.int64)",
        ),
        ([[1]], "lengths are int64 [1, 1], expected one integer per document, [n]"),
    ],
)
def test_lengths_that_do_not_fit(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SplitDocuments(Corpus([1]), 2, lengths=lengths)


def test_a_list_says_its_lengths_itself() -> None:
    assert SplitDocuments([{"input_ids": [1, 2, 3]}, {"input_ids": []}], 2).lengths.tolist() == [2, 1, 0]
    assert len(SplitDocuments((), 2)) == 0


class Unknown:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": [1]}


def test_unknown_lengths() -> None:
    message = (
        "Unknown has no lengths, so nobody knows how many pieces there are; pass lengths=[len(document['input_ids']) for "
        "document in dataset], or the file that `evenstep lengths MODULE:NAME -o lengths.npy` writes"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        SplitDocuments(Unknown(), 2)


def test_what_cannot_be_split() -> None:
    with pytest.raises(
        TypeError, match=r"^document 0 is a list without 'input_ids': there is nothing to split$"
    ):
        SplitDocuments([[1, 2, 3]], 2, lengths=[3])[0]
    message = (
        "document 0 has 3 tokens and image_grid_thw, pixel_values: every piece of 2 tokens would repeat them; raise "
        "max_tokens, or split it where you know which image belongs to which tokens"
    )
    image = {"input_ids": [1, 2, 3], "pixel_values": torch.zeros(4, 2), "image_grid_thw": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SplitDocuments([image], 2, lengths=[3])[0]


@pytest.mark.parametrize("index", [-1, 2])
def test_pieces_that_are_not_there(index: int) -> None:
    with pytest.raises(IndexError, match=rf"^piece {index} of 2$"):
        SplitDocuments(Corpus([3]), 2)[index]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_of_lengths_that_is_not_there(
    absolute: bool, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = str(tmp_path / "lengths.npy") if absolute else "lengths.npy"
    where = "" if absolute else f" in {Path.cwd()}"
    message = (
        f"lengths are {name!r}, and there is no such file{where}: nobody knows how many pieces there are; pass the path of an "
        f".npy file of lengths, `evenstep lengths MODULE:NAME -o {name}` writes one"
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
        SplitDocuments(Corpus([3]), 2, lengths=kind(name))
