"""Documents that every test of the readers uses."""

from __future__ import annotations

import email
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch


class Corpus:
    """The bytes of files of the standard library as tokens, cut into documents of at most ``longest`` tokens."""

    def __init__(self, longest: int = 512, limit: int = 96) -> None:
        folder = Path(email.__file__).parent
        texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
        parts = [t[k : k + longest] for t in texts for k in range(0, len(t), longest)]
        # The last part of a file is short, so lengths differ.
        self.documents = sorted(parts, key=lambda part: (len(part) == longest, part))[:limit]
        self.lengths = [len(document) for document in self.documents]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"input_ids": torch.frombuffer(bytearray(self.documents[index]), dtype=torch.uint8).long()}


@pytest.fixture
def corpus() -> Corpus:
    return Corpus()


def _documents_in(batches: list[Any]) -> Counter[tuple[int, ...]]:
    """Which documents were trained on."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        for row, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
            starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(row)]
            found.update(tuple(row[a:b].tolist()) for a, b in pairwise(starts))
    return found


@pytest.fixture
def documents_in() -> Callable[[list[Any]], Counter[tuple[int, ...]]]:
    """``batches -> how often each document is in them``."""
    return _documents_in


@pytest.fixture
def steps_of(corpus: Corpus) -> Callable[[int, int], list[list[list[Any]]]]:
    """``(dp rank, dp size) -> local steps``: this rank's share of the documents, four rows a step, one in each."""

    def steps(rank: int, size: int) -> list[list[list[Any]]]:
        rows = [[corpus[k]] for k in range(rank, len(corpus), size)]
        return [rows[k : k + 4] for k in range(0, len(rows) - 3, 4)]

    return steps
