"""The ``.idx`` file of a Megatron indexed dataset, without Megatron.

The format is public: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``. Little-endian:

    9 bytes     magic, MMIDIDX and two zero bytes
    uint64      version, 1
    uint8       code of the tokens' dtype
    uint64      number of sequences S
    uint64      number of document boundaries D
    int32 [S]   length of each sequence in tokens
    int64 [S]   where each begins in the .bin file, in bytes
    int64 [D]   first sequence of each document, and at the end S
    int8  [S]   mode of each sequence; only in multimodal files
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["MegatronIndex"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """What is where in the ``.bin`` file.

    Attributes:
        dtype: Of its tokens.
        lengths: Tokens of each sequence, int64 ``[S]``.
        pointers: Byte at which each begins, int64 ``[S]``.
        documents: First sequence of each document, and at the end S; int64 ``[D]``.
    """

    dtype: np.dtype[np.generic]
    lengths: npt.NDArray[np.int64]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @classmethod
    def read(cls, path: Path) -> MegatronIndex:
        """Read ``path``.

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
            _, version, code, sequences, boundaries = _HEADER.unpack(head)
            if version != 1:
                raise ValueError(f"{path} is a Megatron index of version {version}, only version 1 is known")
            if code not in _DTYPES:
                raise ValueError(
                    f"{path} says that its tokens have dtype code {code}, known are {sorted(_DTYPES)}"
                )
            expected = _HEADER.size + sequences * 12 + boundaries * 8
            if size < expected:
                raise ValueError(_cut_off(path, size, expected))
            lengths = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
            pointers = np.fromfile(file, dtype="<i8", count=sequences).astype(np.int64)
            documents = np.fromfile(file, dtype="<i8", count=boundaries).astype(np.int64)
        if (lengths < 0).any():
            raise ValueError(
                f"{path} says that sequence {int(np.argmax(lengths < 0))} has {int(lengths.min())} tokens"
            )
        if (
            boundaries == 0
            or documents[0] != 0
            or documents[-1] != sequences
            or (np.diff(documents) < 0).any()
        ):
            raise ValueError(
                f"{path} has document boundaries that do not run from 0 to its {sequences} sequences: "
                "the index is damaged; write it again"
            )
        return cls(np.dtype(_DTYPES[code]), lengths, pointers, documents)

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document: int64 ``[D - 1]``."""
        ends = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        return np.asarray(np.diff(ends[self.documents]), dtype=np.int64)


def _cut_off(path: Path, size: int, expected: int) -> str:
    return (
        f"{path} has {size} bytes of the {expected} that its header asks for: it was cut off; copy it again"
    )
