"""The corpus as tokens on disk: every rank maps the same file into memory, none holds a copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from evenstep.demo.corpus import Corpus, read_documents

__all__ = ["Pieces", "TokenStore", "split_documents", "tokenize"]

T = TypeVar("T")
Progress = Callable[[Iterable[Path]], Iterable[Path]]

VOCABULARY = 3072
_TRAINING_CHARACTERS = 8_000_000  # seconds of BPE training
_BATCH = 64  # documents a call: enough for all cores, little enough for a smooth progress bar

# Source code spends most characters on line ends with their indentation, dotted names and runs of
# punctuation; as units of the merges they give about 4 bytes a token with a vocabulary this small.
_UNITS = r"[^\w\n]*\n\s*|[^\w\s]* ?[\w.]+|[^\w\n]+"


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Tokens of all documents, one after another.

    Attributes:
        tokens: uint16 ``[total]``, mapped from disk.
        offsets: int64 ``[documents + 1]``; document i is ``tokens[offsets[i]:offsets[i + 1]]``.
        vocabulary: Number of different tokens.
        bytes: UTF-8 bytes of all documents.
        undecodable: Places that were not UTF-8.
    """

    tokens: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]
    vocabulary: int
    bytes: int
    undecodable: int

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, int64 ``[documents]``."""
        return np.diff(self.offsets)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Map what `tokenize` wrote to ``folder``; takes no memory until tokens are read."""
        meta = json.loads((folder / "meta.json").read_text())
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        offsets = np.load(folder / "offsets.npy")
        return cls(tokens, offsets, meta["vocabulary"], meta["bytes"], meta["undecodable"])


@dataclass(frozen=True, slots=True)
class Pieces:
    """The documents as samples that fit a row: a map-style dataset.

    Attributes:
        store: The documents.
        starts: First token of each sample in ``store.tokens``, int64 ``[n]``.
        lengths: Tokens of each sample, int64 ``[n]``; 0 for an empty document.
        split: Documents that were longer than a row.
    """

    store: TokenStore
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    split: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``input_ids`` (int64 ``[length]``) and ``sample``, its index, which the ledger follows."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        tokens = self.store.tokens[start : start + length].astype(np.int64)
        return {"input_ids": torch.from_numpy(tokens), "sample": int(index)}


def split_documents(store: TokenStore, seq_len: int) -> Pieces:
    """Cut documents longer than ``seq_len`` into pieces of ``seq_len`` and a rest; the others stay whole."""
    lengths = store.lengths
    count = np.maximum(1, -(-lengths // seq_len))
    first = np.repeat(np.cumsum(count) - count, count)
    within = (np.arange(count.sum()) - first) * seq_len
    sizes = np.minimum(np.repeat(lengths, count) - within, seq_len)
    starts = np.repeat(store.offsets[:-1], count) + within
    return Pieces(store, starts, sizes, split=int((count > 1).sum()))


def tokenize(corpus: Corpus, folder: Path, *, progress: Progress = iter) -> TokenStore:
    """Train a byte-level BPE on a sample of ``corpus``, encode all of it, and keep the tokens in ``folder``.

    Tokens that are already there are used again if the corpus (names and sizes) is the same.

    Args:
        corpus: The documents.
        folder: Where ``tokens.npy``, ``offsets.npy`` and ``meta.json`` are written.
        progress: Wraps the files while they are encoded, for a progress bar.
    """
    digest = _digest(corpus)
    meta_file = folder / "meta.json"
    if meta_file.exists() and json.loads(meta_file.read_text())["digest"] == digest:
        return TokenStore.open(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train(corpus)
    ids: list[npt.NDArray[np.uint16]] = []
    num_bytes = undecodable = 0
    texts: list[str] = []

    def encode() -> None:
        ids.extend(np.asarray(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts))
        texts.clear()

    for text, replaced in read_documents(corpus, progress(corpus.files)):
        num_bytes += len(text.encode())
        undecodable += replaced
        texts.append(text)
        if len(texts) == _BATCH:
            encode()
    encode()
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(document) for document in ids], out=offsets[1:])
    np.save(folder / "tokens.npy", np.concatenate(ids))
    np.save(folder / "offsets.npy", offsets)
    meta = _Meta(digest, tokenizer.get_vocab_size(), num_bytes, undecodable)
    meta_file.write_text(json.dumps(asdict(meta)))  # last: it vouches for the other two
    return TokenStore.open(folder)


@dataclass(frozen=True, slots=True)
class _Meta:
    digest: str
    vocabulary: int
    bytes: int
    undecodable: int


def _digest(corpus: Corpus) -> str:
    recipe = (VOCABULARY, _TRAINING_CHARACTERS, _UNITS, str(corpus.root))
    files = [(file.as_posix(), (corpus.root / file).stat().st_size) for file in corpus.files]
    return hashlib.sha256(json.dumps([recipe, files]).encode()).hexdigest()


def _train(corpus: Corpus) -> Any:
    """A tokenizer trained on documents spread evenly over the corpus; the same one every time."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    sizes = sum((corpus.root / file).stat().st_size for file in corpus.files)
    keep_every = max(1, -(-sizes // _TRAINING_CHARACTERS))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_UNITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        max_token_length=24,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for text, _ in read_documents(corpus.thinned(keep_every)))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
