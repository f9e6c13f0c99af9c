"""Seeds and digests: the same in every process, for ever, and never alike by accident."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.sampling import sample_seed
from evenstep.sampling.hashing import stream_digest

SEEDS = [2558736989570252433, 7702586659592502839, 12437574980241416726]
DIGEST = 17083806176156220918

word = st.integers(0, 2**64 - 1)


def test_golden_values() -> None:
    """Whoever changes them breaks every saved position and every resumed augmentation."""
    assert [sample_seed(0, 0, 0), sample_seed(1, 2, 3), sample_seed(2**64 - 1, 7, 10**12)] == SEEDS
    assert stream_digest("a", 1, np.arange(3), (None, 0.5, Fraction(1, 3), b"x", True)) == DIGEST


@given(seed=word, epoch=word, index=word)
def test_seeds_are_64_bit(seed: int, epoch: int, index: int) -> None:
    assert 0 <= sample_seed(seed, epoch, index) < 2**64


@pytest.mark.parametrize(
    "seed_of",
    [lambda i: sample_seed(0, 0, i), lambda i: sample_seed(0, i, 0), lambda i: sample_seed(i, 0, 0)],
    ids=["index", "epoch", "seed"],
)
def test_one_changed_bit_changes_half_of_the_bits(seed_of: Callable[[int], int]) -> None:
    flips = np.zeros((64, 64))
    for trial in range(200):
        for bit in range(64):
            changed = seed_of(trial) ^ seed_of(trial ^ (1 << bit))
            flips[bit] += [changed >> i & 1 for i in range(64)]
    assert np.abs(flips / 200 - 0.5).max() < 0.2  # 5.6 standard deviations of a fair coin


def test_neighbours_never_collide() -> None:
    seeds = {sample_seed(s, e, i) for s in range(8) for e in range(8) for i in range(1000)}
    assert len(seeds) == 64_000


def test_digest_tells_apart() -> None:
    parts: list[tuple[object, ...]] = [
        (),
        ("",),
        ("ab",),
        ("a", "b"),
        (("a", "b"),),
        (b"ab",),
        (1,),
        (1.0,),
        (True,),
        ("1",),
        (None,),
        (np.array([1]),),
        (np.array([1, 2]),),
        (np.array([1]), np.array([2])),
        ([1, 2],),
    ]
    assert len({stream_digest(*p) for p in parts}) == len(parts)


@given(values=st.lists(st.integers(0, 100), max_size=20))
def test_arrays_count_by_value(values: list[int]) -> None:
    digests = {stream_digest(np.array(values, dtype=d)) for d in (np.int8, np.uint16, np.int32, ">i8")}
    digests.add(stream_digest(np.repeat(np.array(values, dtype=np.int64), 2)[::2]))
    assert len(digests) == 1


@pytest.mark.parametrize("part", [object(), {"a": 1}, np.array([0.5]), np.zeros((2, 2), np.int64)])
def test_what_has_no_lasting_text_is_refused(part: object) -> None:
    message = (
        f"the identity of a stream holds a {type(part).__name__}: expected plain values, integer arrays or tuples "
        "of these, which are the same in every process"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        stream_digest("order", (part,))
