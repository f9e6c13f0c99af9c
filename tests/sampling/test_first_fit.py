"""First-fit-decreasing against a plain one, and the longest run that it packs against a search of all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep.sampling.first_fit import RowLimits, first_fit_decreasing, longest_run, most_that_could_fit

lengths_of_tokens = st.lists(st.integers(1, 20), min_size=1, max_size=60)
rows = st.integers(1, 9)
segments = st.none() | st.integers(1, 4)
PlainFirstFit = Callable[[list[int], int, int, int | None], list[int] | None]


@given(lengths=lengths_of_tokens, rows=rows, capacity=st.integers(20, 45), limit=segments)
def test_first_fit_is_the_plain_one(
    plain_first_fit: PlainFirstFit, lengths: list[int], rows: int, capacity: int, limit: int | None
) -> None:
    packed = first_fit_decreasing(np.array(lengths, dtype=np.int64), RowLimits(rows, capacity, limit))
    assert (None if packed is None else packed.tolist()) == plain_first_fit(lengths, rows, capacity, limit)


@given(lengths=lengths_of_tokens, rows=rows, capacity=st.integers(20, 45), limit=segments)
def test_the_run_is_the_longest(
    plain_first_fit: PlainFirstFit, lengths: list[int], rows: int, capacity: int, limit: int | None
) -> None:
    run, packed = longest_run(np.array(lengths, dtype=np.int64), RowLimits(rows, capacity, limit))
    packs = [
        k for k in range(len(lengths) + 1) if plain_first_fit(lengths[:k], rows, capacity, limit) is not None
    ]
    assert run == max(packs)
    assert packed.tolist() == plain_first_fit(lengths[:run], rows, capacity, limit)
    assert run <= most_that_could_fit(np.array(lengths, dtype=np.int64), RowLimits(rows, capacity, limit))


def test_a_run_too_large_to_search_in_full_is_a_local_maximum() -> None:
    # Five samples of 11 leave a twelfth of each row empty, which no simple bound sees: 181 candidates fail.
    lengths, limits = np.full(3000, 11, dtype=np.int64), RowLimits(400, 60)
    assert most_that_could_fit(lengths, limits) == 2181
    run, packed = longest_run(lengths, limits)
    assert run == 2000
    assert np.bincount(packed).tolist() == [5] * 400
    assert first_fit_decreasing(lengths[: run + 1], limits) is None
