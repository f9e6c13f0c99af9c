"""Documents that every test of the readers uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

_SHORT = (274, 28, 339, 430, 151, 222, 335, 348, 225, 143, 110, 81, 228, 221, 349, 479, 413, 486, 136, 242)


class Corpus:
    """Bytes as tokens: the parts of 20 files cut after every 512 of them, the short last parts first."""

    def __init__(self) -> None:
        self.lengths = [*_SHORT, *[512] * 76]
        random = np.random.default_rng(0)
        self.documents = [random.integers(1, 256, n, dtype=np.uint8).tobytes() for n in self.lengths]
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


def _two_epochs(loader: Any) -> tuple[list[Any], list[Any]]:
    batches, states = [], []
    with loader:
        states.append(loader.state_dict())
        for _epoch in range(2):
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
    return batches, states


@pytest.fixture
def two_epochs() -> Callable[[Any], tuple[list[Any], list[Any]]]:
    """``loader -> batches, states``: all batches, and the state before the first and after each."""
    return _two_epochs
