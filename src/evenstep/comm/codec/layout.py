"""The byte layout of a segment, so that both sides derive its size and check it before they use it.

::

    preamble | structure number of each sample | structures (JSON) | integers | field column | field column ...
    '------------------------- control, covered by one CRC -----------------'

Field columns start at multiples of 64 bytes. Where the columns end the segment is padded with zeros up to
`segment_bytes`, the size that follows from the gathered columns alone.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from evenstep.errors import WireFormatError

__all__ = [
    "ALIGNMENT",
    "ENTRY",
    "HUGE",
    "INDEX",
    "LEAST",
    "MOST",
    "PREAMBLE",
    "SUM",
    "align",
    "entry_bytes",
    "segment_bytes",
    "structure_key",
]

ALIGNMENT = 64
PREAMBLE = struct.Struct("<8sQQQQQI12x")  # magic, size, samples, structures, byte and number of integers, CRC
ENTRY = struct.Struct("<QQ")  # samples and JSON bytes of one structure
INDEX = np.dtype("<u4")  # structure number of a sample
HUGE = float(1 << 62)
_BLOCK_BITS = 24
# What the methods of an array call in the end, by way of Python: half the time, for every segment and field.
LEAST, MOST, SUM = np.minimum.reduce, np.maximum.reduce, np.add.reduce
_FIXED_BLOCKS = 2  # the preamble, and the alignment of the first field column


def align(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def entry_bytes(json_bytes: int) -> int:
    """Bytes of one structure in the control part."""
    return align(ENTRY.size + json_bytes)


def structure_key(digest: int, json_bytes: int, columns: int) -> int:
    """A positive int63: 39 bits of digest, then 24 bits of blocks that the structure adds to a segment.

    Args:
        digest: At least 39 bits of a hash of the structure's JSON.
        json_bytes: Length of the JSON in bytes.
        columns: Field columns of the structure; each may need up to a block for its alignment.
    """
    blocks = entry_bytes(json_bytes) // ALIGNMENT + columns
    if blocks >= 1 << _BLOCK_BITS:
        raise ValueError(
            f"the structure of the sample takes {blocks} blocks of {ALIGNMENT} bytes, more than "
            f"{(1 << _BLOCK_BITS) - 1}; it cannot be sent; store long lists as tensors"
        )
    return (digest & ((1 << 39) - 1)) << _BLOCK_BITS | blocks


def segment_bytes(nbytes: npt.ArrayLike, structures: npt.ArrayLike) -> int:
    """Bytes of the segment that holds samples, from the columns alone; 0 for no samples.

    Args:
        nbytes: int64 ``[n]``, what `PayloadCodec.measure` returned first for each sample.
        structures: int64 ``[n]``, what it returned second.
    """
    sizes, keys = np.asarray(nbytes, dtype=np.int64), np.asarray(structures, dtype=np.int64)
    if not len(sizes):
        return 0
    low, high, total = int(LEAST(sizes)), int(MOST(sizes)), int(SUM(sizes))
    least, most = int(LEAST(keys)), int(MOST(keys))
    if low < 0 or least <= 0 or high * len(sizes) >= HUGE:
        raise WireFormatError(
            f"samples of {low} to {high} bytes and smallest structure key {least} "
            "cannot be: the gathered columns are corrupt"
        )
    distinct = [least] if least == most else np.unique(keys).tolist()
    blocks = sum(key & ((1 << _BLOCK_BITS) - 1) for key in distinct)
    fixed = (_FIXED_BLOCKS + blocks) * ALIGNMENT
    return fixed + align(INDEX.itemsize * len(sizes)) + align(total)
