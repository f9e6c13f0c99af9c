"""Lengths from the ``.idx`` file of a Megatron indexed dataset, without Megatron.

The format is public: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``. Little-endian:

    9 bytes     magic, MMIDIDX and two zero bytes
    uint64      version, 1
    uint8       code of the tokens' dtype
    uint64      number of sequences S
    uint64      number of document boundaries D
    int32 [S]   length of each sequence in tokens
    int64 [S]   where each begins in the .bin file
    int64 [D]   first sequence of each document, and at the end S
    int8  [S]   mode of each sequence; only in multimodal files
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["read_megatron_index"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")


def read_megatron_index(path: Path) -> npt.NDArray[np.int64]:
    """Tokens of each document: int64 ``[documents]``.

    Raises:
        ValueError: The file is no such index, of another version, cut off, or contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if not head.startswith(_MAGIC):
            raise ValueError(
                f"{path} does not begin with {_MAGIC!r}: it is no Megatron index; "
                "pass the .idx file that lies beside the .bin file"
            )
        if len(head) < _HEADER.size:
            raise ValueError(_cut_off(path, size, _HEADER.size))
        _, version, _, sequences, boundaries = _HEADER.unpack(head)
        if version != 1:
            raise ValueError(f"{path} is a Megatron index of version {version}, only version 1 is known")
        expected = _HEADER.size + sequences * 12 + boundaries * 8
        if size < expected:
            raise ValueError(_cut_off(path, size, expected))
        lengths = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
        file.seek(sequences * 8, 1)
        documents = np.fromfile(file, dtype="<i8", count=boundaries)
    if (lengths < 0).any():
        raise ValueError(
            f"{path} says that sequence {int(np.argmax(lengths < 0))} has {int(lengths.min())} tokens"
        )
    if boundaries == 0 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise ValueError(
            f"{path} has document boundaries that do not run from 0 to its {sequences} sequences: "
            "the index is damaged; write it again"
        )
    ends = np.zeros(sequences + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return np.asarray(np.diff(ends[documents]), dtype=np.int64)


def _cut_off(path: Path, size: int, expected: int) -> str:
    return (
        f"{path} has {size} bytes of the {expected} that its header asks for: it was cut off; copy it again"
    )
