"""Documents that every test of the readers uses."""

from __future__ import annotations

import email
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
