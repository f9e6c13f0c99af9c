"""The keyed permutation is a bijection everywhere, and one that statistics cannot tell from random."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.sampling import KeyedPermutation
from evenstep.sampling.hashing import mix64, mix64_array
from evenstep.sampling.permutation import TABLE_SIZE

# A fair statistic is above this once in 10,000 runs (99.99 % quantile of the normal approximation); the
# seeds are fixed, so a run cannot fail by chance.
Z_LIMIT = 3.72


def chi_square_z(counts: npt.NDArray[np.int64], expected: npt.ArrayLike) -> float:
    """Chi-square statistic as a normal deviate (Wilson and Hilferty, 1931)."""
    target = np.broadcast_to(np.asarray(expected, dtype=np.float64), counts.shape)
    degrees = counts.size - 1
    ratio = float(((counts - target) ** 2 / target).sum()) / degrees
    spread = 2 / (9 * degrees)
    return float((ratio ** (1 / 3) - (1 - spread)) / spread**0.5)


def assert_bijection(n: int, *key: int) -> None:
    values = KeyedPermutation(n, key)(np.arange(n, dtype=np.int64))
    assert values.dtype == np.int64
    assert np.array_equal(np.bincount(values, minlength=n), np.ones(n, dtype=np.int64))


def test_bijection_for_every_small_size() -> None:
    for n in range(1, 3001):
        assert_bijection(n, 9, n)


@pytest.mark.parametrize(
    "n", [TABLE_SIZE - 1, TABLE_SIZE, TABLE_SIZE + 1, 257**2, 300 * 301, 10**6 + 3, 2**21]
)
def test_bijection_at_large_sizes(n: int) -> None:
    for epoch in range(2):
        assert_bijection(n, 4, epoch)


@given(n=st.integers(TABLE_SIZE + 1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_distinct_and_in_range_at_any_size(n: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, n - 1))
    positions = np.arange(first, min(n, first + 500), dtype=np.int64)
    values = KeyedPermutation(n, (key,))(positions)
    assert len(np.unique(values)) == len(positions)
    assert 0 <= values.min() <= values.max() < n


@given(n=st.integers(TABLE_SIZE + 1, 10**12), data=st.data())
def test_random_access_equals_sequential_access(n: int, data: st.DataObject) -> None:
    permutation = KeyedPermutation(n, (3,))
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    one_by_one = [int(permutation(positions[i : i + 1])[0]) for i in range(len(positions))]
    assert permutation(positions).tolist() == one_by_one


def test_chunks_do_not_show() -> None:
    permutation = KeyedPermutation(10**12, (0,))
    positions = np.arange(10**11, 10**11 + 50_000, dtype=np.int64)
    assert np.array_equal(permutation(positions)[40_000:], permutation(positions[40_000:]))


def test_positions_are_left_alone() -> None:
    positions = np.arange(100, dtype=np.int64)
    KeyedPermutation(10**9, (0,))(positions)
    assert np.array_equal(positions, np.arange(100))


@pytest.mark.parametrize("n", [5, 16, 24, 70_000, 10**6, 10**12])
def test_every_position_is_uniform_over_epochs(n: int) -> None:
    """Counts of (position, value bin) over many keys against their expectation."""
    keys, bins = 3000, min(n, 16)
    positions = np.unique(np.linspace(0, n - 1, 12).astype(np.int64))
    values = np.stack([KeyedPermutation(n, (1, epoch))(positions) for epoch in range(keys)])
    binned = values if n <= 16 else (values.astype(np.float64) * bins / n).astype(np.int64)
    widths = (
        np.bincount((np.arange(n) * bins // n), minlength=bins) / n if n <= 24 else np.full(bins, 1 / bins)
    )
    for column in binned.T:
        assert abs(chi_square_z(np.bincount(column, minlength=bins), keys * widths)) < Z_LIMIT


@pytest.mark.parametrize("n", [5, 16, 24])
def test_adjacent_differences_are_uniform_over_epochs(n: int) -> None:
    """``(p[i + 1] - p[i]) mod n`` takes each non-zero value equally often."""
    values = np.stack([KeyedPermutation(n, (2, e))(np.arange(n, dtype=np.int64)) for e in range(4000)])
    for i in range(n - 1):
        counts = np.bincount((values[:, i + 1] - values[:, i]) % n, minlength=n)
        assert counts[0] == 0
        assert abs(chi_square_z(counts[1:], 4000 / (n - 1))) < Z_LIMIT


@pytest.mark.parametrize("n", [70_000, 10**6, 10**9, 10**12, 2**62])
@pytest.mark.parametrize("lag", [1, 2, 256, 4096])
def test_differences_inside_one_epoch_are_uniform(n: int, lag: int) -> None:
    permutation = KeyedPermutation(n, (5, lag))
    positions = np.arange(min(n - lag, 200_000), dtype=np.int64)
    difference = (permutation(positions + lag) - permutation(positions)) % n
    binned = (difference.astype(np.float64) * 128 / n).astype(np.int64)
    assert abs(chi_square_z(np.bincount(binned, minlength=128), len(positions) / 128)) < Z_LIMIT


@pytest.mark.parametrize("n", [5, 16, 24])
def test_pairs_of_seeds_are_independent(n: int) -> None:
    """The joint distribution of one position under neighbouring seeds and epochs is uniform."""
    positions = np.array([0, n - 1], dtype=np.int64)
    first = np.stack([KeyedPermutation(n, (seed, 0))(positions) for seed in range(6000)])
    for other in ((1, 0), (0, 1)):
        second = np.stack(
            [KeyedPermutation(n, (seed + other[0], other[1]))(positions) for seed in range(6000)]
        )
        for p in range(2):
            joint = np.bincount(first[:, p] * n + second[:, p], minlength=n * n)
            assert abs(chi_square_z(joint, 6000 / n**2)) < Z_LIMIT


@pytest.mark.parametrize("n", [70_000, 10**12])
def test_large_permutations_of_neighbouring_seeds_are_independent(n: int) -> None:
    count = min(65_000, n // 20)  # of a large share of all positions the statistic would be too small
    positions = np.arange(count, dtype=np.int64)
    binned = [
        (KeyedPermutation(n, (seed, 0))(positions).astype(np.float64) * 16 / n).astype(np.int64)
        for seed in range(8)
    ]
    for a, b in pairwise(binned):
        assert abs(chi_square_z(np.bincount(a * 16 + b, minlength=256), count / 256)) < Z_LIMIT


def test_all_orders_of_a_small_size_are_equally_likely() -> None:
    counts = np.zeros(5**5, dtype=np.int64)
    for seed in range(24_000):
        order = KeyedPermutation(5, (seed, 7))(np.arange(5, dtype=np.int64))
        counts[int((order * 5 ** np.arange(5)).sum())] += 1
    counts = counts[counts > 0]
    assert len(counts) == 120
    assert abs(chi_square_z(counts, 200)) < Z_LIMIT


@given(key=st.integers(0, 2**64 - 1), words=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
def test_the_vectorised_hash_is_the_scalar_one(key: int, words: list[int]) -> None:
    hashed = mix64_array(mix64(key), np.array(words, dtype=np.uint64))
    assert hashed.tolist() == [mix64(key, word) for word in words]


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_sizes_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match=r"^size is -?\d+: a permutation needs 1 to 2\*\*62 elements$"):
        KeyedPermutation(n, (0,))
