"""Which indices a corpus has: 0 to its length, the same in all of them, and none that counts from the end."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.datasets import IndexedDataset, SplitDocuments, TextFolder, TokenArray

KINDS = ["text", "tokenized text", "array", "pieces", "pieces of text", "indexed"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("texts")
    for k in range(3):
        (folder / f"{k}.txt").write_text("ab" * k)
    text, array = TextFolder(folder), TokenArray(np.arange(6), [0, 0, 2, 6])
    return {
        "text": text,
        "tokenized text": TextFolder(folder, lambda text: [ord(c) for c in text]),
        "array": array,
        "pieces": SplitDocuments(array, 3),
        "pieces of text": SplitDocuments(text, 3),
    }


@pytest.fixture
def corpus(kind: str, corpora: dict[str, Any], write_indexed: Any, documents: Any) -> Any:
    return corpora[kind] if kind != "indexed" else IndexedDataset(write_indexed(documents[:2]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_indices_sees_every_sample_once(corpus: Any) -> None:
    assert [len(sample["input_ids"]) for sample in corpus] == [
        len(corpus[k]["input_ids"]) for k in range(len(corpus))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [-1, -3, 10**6, np.int64(-1), np.int32(10**6)])
def test_an_index_before_the_first_or_after_the_last_is_none(kind: str, index: Any, corpus: Any) -> None:
    word = {"indexed": "item", "pieces": "piece", "pieces of text": "piece"}.get(kind, "document")
    message = f"{word} {index} of {len(corpus)}"
    with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
        corpus[index]
    if hasattr(corpus, "read"):
        with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
            corpus.read(index, 0, 1)


@given(st.integers(-5, 10), st.integers(0, 5))
def test_a_list_of_documents_has_the_indices_of_its_pieces(index: int, documents: int) -> None:
    pieces = SplitDocuments([{"input_ids": [1]}] * documents, 3)
    if 0 <= index < documents:
        assert pieces[index] == {"input_ids": [1]}
    else:
        with pytest.raises(IndexError, match=f"^piece {index} of {documents}$"):
            pieces[index]
