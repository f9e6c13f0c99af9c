from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.demo.corpus import Corpus, find_corpus
from evenstep.demo.tokens import TokenStore, split_documents, tokenize

pytest.importorskip("tokenizers")

TEXTS = ["", "def f(x):\n    return x\n" * 40, "import os\n", "x" * 3000, "", "grün = 1\n"]


def write_corpus(root: Path) -> Corpus:
    root.mkdir()
    for number, text in enumerate(TEXTS):
        (root / f"{number}.py").write_text(text, encoding="utf-8", newline="")
    (root / "9.py").write_bytes(b"a = '\xff'\n")
    return find_corpus(root)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_corpus(tmp_path / "text")


def test_every_document_keeps_its_place(corpus: Corpus, tmp_path: Path) -> None:
    store = tokenize(corpus, tmp_path / "tokens")
    lengths = store.lengths
    assert len(lengths) == len(TEXTS) + 1
    assert (lengths[[0, 4]] == 0).all()
    assert (lengths[[1, 2, 3, 5, 6]] > 0).all()
    assert store.undecodable == 1
    assert store.bytes == sum(len(text.encode()) for text in TEXTS) + len("a = '�'\n".encode())
    assert int(store.tokens.max()) < store.vocabulary
    assert isinstance(store.tokens, np.memmap)


def test_the_same_corpus_gives_the_same_tokens(corpus: Corpus, tmp_path: Path) -> None:
    first, second = tokenize(corpus, tmp_path / "a"), tokenize(corpus, tmp_path / "b")
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.offsets, second.offsets)


def test_tokens_are_kept_until_the_corpus_changes(corpus: Corpus, tmp_path: Path) -> None:
    seen: list[Path] = []

    def watch(files: Iterable[Path]) -> Iterator[Path]:
        for file in files:
            seen.append(file)
            yield file

    tokenize(corpus, tmp_path / "tokens", progress=watch)
    assert seen == list(corpus.files)
    kept = tokenize(corpus, tmp_path / "tokens", progress=watch)
    assert len(seen) == len(corpus.files)
    assert len(kept.lengths) == len(corpus.files)
    (corpus.root / "0.py").write_text("pass\n")
    assert tokenize(corpus, tmp_path / "tokens", progress=watch).lengths[0] > 0
    assert len(seen) == 2 * len(corpus.files)


def store_of(lengths: list[int]) -> TokenStore:
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    return TokenStore(tokens, offsets.astype(np.int64), 1 << 16, 0, 0)


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20), seq_len=st.integers(1, 20))
def test_pieces_are_the_documents_cut_at_the_row(lengths: list[int], seq_len: int) -> None:
    store = store_of(lengths)
    pieces = split_documents(store, seq_len)
    samples = [pieces[i] for i in range(len(pieces))]
    assert [sample["sample"] for sample in samples] == list(range(len(pieces)))
    sizes = [len(sample["input_ids"]) for sample in samples]
    assert sizes == pieces.lengths.tolist()
    assert max(sizes) <= seq_len
    assert sum(size == 0 for size in sizes) == sum(length == 0 for length in lengths)
    assert [token for sample in samples for token in sample["input_ids"].tolist()] == store.tokens.tolist()
    assert pieces.split == sum(length > seq_len for length in lengths)
    assert len(pieces) == sum(max(1, -(-length // seq_len)) for length in lengths)
