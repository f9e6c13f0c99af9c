"""Integer hashing of our own, so that orders and seeds never depend on a NumPy version."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = ["mix64", "mix64_array", "sample_seed", "stream_digest"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_CHUNK = 1 << 20


def mix64(*words: int) -> int:
    """Hash integers, each taken modulo 2**64, to 64 well-mixed bits.

    The step per word is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, with Stafford's
    variant 13 constants), a bijection of the last word for fixed earlier ones.
    """
    h = 0
    for word in words:
        h = (h + _GOLDEN + word) & _MASK
        h = ((h ^ (h >> 30)) * _MUL_1) & _MASK
        h = ((h ^ (h >> 27)) * _MUL_2) & _MASK
        h ^= h >> 31
    return h


def mix64_array(key: int, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix64`` of one more word after ``key`` (itself a `mix64`), elementwise: uint64 in, uint64 out."""
    h = words + np.uint64((key + _GOLDEN) & _MASK)
    h ^= h >> np.uint64(30)
    h *= np.uint64(_MUL_1)
    h ^= h >> np.uint64(27)
    h *= np.uint64(_MUL_2)
    h ^= h >> np.uint64(31)
    return h


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The random seed of one sample's transforms in one epoch, an integer in [0, 2**64).

    It depends on nothing else, so that augmentation resumes exactly and is the same on any number of
    ranks. Two indices of one epoch never share a seed.

    Args:
        seed: Seed of the stream.
        epoch: Pass over the dataset, from 0.
        index: Dataset index of the sample.
    """
    return mix64(seed, epoch, index)


def stream_digest(*parts: object) -> int:
    """8-byte BLAKE2b digest of ``parts``, as an integer; never 0, which means "nothing to digest".

    Args:
        parts: Plain values (str, bytes, int, float, Fraction, bool, None), integer arrays, which count by
            their values alone, and tuples or lists of these.

    Raises:
        TypeError: A part is of another type: its text might not be the same in the next process.
    """
    digest = hashlib.blake2b(digest_size=8)
    _update(digest, parts)
    return int.from_bytes(digest.digest(), "little") or 1


def _update(digest: hashlib.blake2b, part: object) -> None:
    if isinstance(part, (tuple, list)):
        digest.update(f"sequence {len(part)};".encode())
        for inner in part:
            _update(digest, inner)
    elif isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.ndim == 1:
        digest.update(f"integers {len(part)};".encode())
        for start in range(0, len(part), _CHUNK):  # a chunk at a time: the array may be a memory map
            digest.update(np.ascontiguousarray(part[start : start + _CHUNK], dtype="<i8").data)
    elif part is None or isinstance(part, (str, bytes, bool, int, float, Fraction)):
        text = repr(part).encode()
        digest.update(f"{type(part).__name__} {len(text)};".encode() + text)
    else:
        raise TypeError(
            f"the identity of a stream holds a {type(part).__name__}: expected plain values, integer arrays or "
            "tuples of these, which are the same in every process"
        )
