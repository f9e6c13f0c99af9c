"""An index file that is damaged, cut off or another thing is told for what it is."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.datasets.megatron_index import MegatronIndex

DOCUMENTS = [[np.arange(3), np.arange(5)], [np.arange(2)], []]
HEADER = 34  # bytes: magic 9, version 8, dtype code 1, sequences 8, boundaries 8
SIZE = HEADER + 3 * (4 + 8) + 4 * 8


@pytest.fixture
def index(write_indexed: Callable[..., Path]) -> Path:
    return write_indexed(DOCUMENTS).with_suffix(".idx")


def test_it_says_where_everything_is(index: Path) -> None:
    read = MegatronIndex.read(index)
    assert index.stat().st_size == SIZE
    assert read.dtype == np.uint16
    assert read.lengths.tolist() == [3, 5, 2]
    assert read.pointers.tolist() == [0, 6, 16]
    assert read.documents.tolist() == [0, 2, 3, 3]
    assert read.document_lengths().tolist() == [8, 2, 0]


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (
            0,
            b"MMIDIDY",
            "does not begin with b'MMIDIDX\\x00\\x00': it is no Megatron index; pass the .idx file that lies beside the "
            ".bin file",
        ),
        (9, struct.pack("<Q", 2), "is a Megatron index of version 2, only version 1 is known"),
        (HEADER + 4, struct.pack("<i", -5), "says that sequence 1 has -5 tokens"),
    ]
    + [
        (
            SIZE - 32 + 8 * k,
            struct.pack("<q", boundary),
            "has document boundaries that do not run from 0 to its 3 sequences: the index is damaged; write it again",
        )
        for k, boundary in ((0, 1), (1, 4), (2, 1), (3, 2))
    ],
)
def test_what_is_wrong_in_it_is_told(index: Path, at: int, data: bytes, message: str) -> None:
    whole = bytearray(index.read_bytes())
    whole[at : at + len(data)] = data
    index.write_bytes(bytes(whole))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{index} {message}')}$"):
        MegatronIndex.read(index)


def test_an_index_without_boundaries_is_damaged(index: Path) -> None:
    index.write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 0, 0))
    message = f"{index} has document boundaries that do not run from 0 to its 0 sequences: the index is damaged; write it again"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MegatronIndex.read(index)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(9, SIZE - 1))
def test_an_index_that_was_cut_off_anywhere_is_told(tmp_path: Path, index: Path, kept: int) -> None:
    cut = tmp_path / "cut.idx"
    cut.write_bytes(index.read_bytes()[:kept])
    asked = HEADER if kept < HEADER else SIZE
    message = f"{cut} has {kept} bytes of the {asked} that its header asks for: it was cut off; copy it again"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MegatronIndex.read(cut)
