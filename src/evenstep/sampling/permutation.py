"""A keyed permutation of any size with random access, so that a shuffled order needs no memory."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from evenstep.sampling.hashing import mix64, mix64_array

__all__ = ["KeyedPermutation"]

# Up to here the permutation is a table: a Feistel network has too few distinct round functions to be
# uniform on small domains.
TABLE_SIZE = 1 << 16
# The statistical tests fail at 2 and pass from 4 on at these sizes; the rest is margin, and cheap.
ROUNDS = 8
# Elements per pass: the working arrays stay in the second-level cache.
_CHUNK = 1 << 14
_MAX_SIZE = 1 << 62
_MUL_1 = np.uint64(0x9E3779B97F4A7C15)
_MUL_2 = np.uint64(0xD6E8FEB86659FD93)
_32 = np.uint64(32)

_U64 = npt.NDArray[np.uint64]


class KeyedPermutation:
    """A pseudo-random bijection of ``[0, size)``, chosen by ``key``; the same on every machine.

    Sizes up to 65,536 use a table sorted by a keyed hash. Larger ones use 8 rounds of a Feistel network
    over the mixed radix ``a x b >= size`` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002) with cycle walking; ``a * b - size < a``, so practically nothing walks.

    Args:
        size: Number of elements, 1 to 2**62.
        key: Integers that choose the permutation, for example ``(seed, epoch)``.

    Example:
        >>> import numpy as np
        >>> from evenstep.sampling import KeyedPermutation
        >>> permutation = KeyedPermutation(10**12, key=(0, 3))
        >>> len(np.unique(permutation(np.arange(10**11, 10**11 + 1000))))
        1000
    """

    __slots__ = ("_b", "_key", "_rounds", "size")

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 1 <= size <= _MAX_SIZE:
            raise ValueError(f"size is {size}: a permutation needs 1 to 2**62 elements")
        self.size: int = size
        self._key = mix64(*key)
        self._b = 0
        if size > TABLE_SIZE:
            a = isqrt(size - 1) + 1
            self._b = -(-size // a)
            sizes = (np.uint64(a), np.uint64(self._b))
            self._rounds = [(np.uint64(mix64(self._key, r)), sizes[r % 2]) for r in range(ROUNDS)]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements at ``positions`` (int64 ``[n]``, each in ``[0, size)``), int64 ``[n]``."""
        if not self._b:
            return _table(self.size, self._key)[positions].astype(np.int64)
        x = positions.astype(np.uint64)
        for start in range(0, len(x), _CHUNK):
            self._encrypt(x[start : start + _CHUNK])
        outside = np.flatnonzero(x >= np.uint64(self.size))
        while len(outside):  # cycle walking: the orbit of a position comes back inside
            walked = x[outside]
            self._encrypt(walked)
            x[outside] = walked
            outside = outside[walked >= np.uint64(self.size)]
        return x.view(np.int64)

    def _encrypt(self, x: _U64) -> None:
        """One pass of the network over ``x`` (values in ``[0, a * b)``), in place."""
        b = np.uint64(self._b)
        left = x // b
        right = x - left * b
        t, u = np.empty_like(x), np.empty_like(x)
        for key, size in self._rounds:
            np.add(right, key, out=t)
            np.multiply(t, _MUL_1, out=t)
            np.right_shift(t, _32, out=u)
            np.bitwise_xor(t, u, out=t)
            np.multiply(t, _MUL_2, out=t)
            np.right_shift(t, _32, out=t)
            np.multiply(t, size, out=t)  # 32 random bits times size < 2**32: the product's upper half is
            np.right_shift(t, _32, out=t)  # uniform in [0, size) without a division
            np.add(left, t, out=left)
            np.subtract(left, size, out=u)
            np.minimum(left, u, out=left)  # u wraps to a huge number where left < size: a modulo
            left, right = right, left
        np.multiply(left, b, out=left)  # an even number of rounds: left and right are home again
        np.add(left, right, out=x)


@lru_cache(maxsize=64)
def _table(size: int, key: int) -> npt.NDArray[np.uint16]:
    """The permutation as uint16 ``[size]``; a bijective hash has no ties, so any sort gives this order."""
    return np.argsort(mix64_array(key, np.arange(size, dtype=np.uint64)), kind="stable").astype(np.uint16)
