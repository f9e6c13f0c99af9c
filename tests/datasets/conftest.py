"""Real documents, and a writer of indexed corpora from Megatron's own description of the format."""

from __future__ import annotations

import email
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
Documents = list[list[npt.NDArray[np.int64]]]
Write = Callable[..., Path]


@pytest.fixture
def documents() -> Documents:
    """Modules of the standard library as documents, their paragraphs as sequences of byte tokens."""
    paths = sorted(Path(email.__file__).parent.glob("*.py"))
    return [
        [np.frombuffer(part, dtype=np.uint8).astype(np.int64) for part in path.read_bytes().split(b"\n\n\n")]
        for path in paths
    ]


@pytest.fixture
def write_indexed(tmp_path: Path) -> Write:
    def write(documents: Documents, dtype: str = "uint16", *, name: str = "corpus") -> Path:
        prefix = tmp_path / name
        sequences = [sequence.astype(dtype) for document in documents for sequence in document]
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
        sizes = np.array([sequence.nbytes for sequence in sequences], dtype=np.int64)
        pointers = np.cumsum(sizes) - sizes
        boundaries = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
        prefix.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
        header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(sequences), len(boundaries))
        body = lengths.tobytes() + pointers.astype(np.int64).tobytes() + boundaries.tobytes()
        prefix.with_suffix(".idx").write_bytes(header + body)
        return prefix

    return write
