"""The search over whole rows: it packs what can be packed, and says so where nothing can."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.plan import Plan, completion
from evenstep.plan.completion import complete_rows

CAP = 20


@settings(deadline=None, max_examples=150)
@given(sizes=st.lists(st.integers(0, CAP), max_size=7), rows=st.integers(1, 3))
def test_it_finds_a_packing_exactly_where_one_exists(sizes: list[int], rows: int) -> None:
    tokens = np.array(sizes, dtype=np.int64)
    exists = any(
        np.bincount(row, tokens, minlength=rows).max() <= CAP
        for row in map(np.array, itertools.product(range(rows), repeat=len(sizes)))
        if len(row)
    )
    found = complete_rows(tokens, CAP, rows)
    assert (found is not None) == (exists or not sizes)
    if found is not None and sizes:
        assert found.min() >= 0
        assert found.max() < rows
        assert np.bincount(found, tokens).max() <= CAP


def _planted(seed: int, rows: int, documents: int, used: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    generator = np.random.default_rng(seed)
    cuts = [np.sort(generator.permutation(used - 1)[: documents - 1] + 1) for _ in range(rows)]
    return generator.permutation(np.concatenate([np.diff(cut, prepend=0, append=used) for cut in cuts]))


@pytest.mark.parametrize("documents", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_rows_without_a_free_token_are_found(
    documents: int, seed: int, make_plan: Callable[..., Plan]
) -> None:
    # No greedy rule packs most of these: every row must be one of a few exact sums.
    tokens = _planted(seed, 8, documents, 100)
    plan = make_plan(tokens, dp_size=4, micro_batches=2)
    assert np.bincount(plan.assignment, tokens).tolist() == [100] * 8


def test_more_tokens_than_the_rows_hold_are_not_searched_for() -> None:
    assert complete_rows(np.array([60, 60, 60]), 100, 1) is None


def test_the_search_ends_after_as_many_rows_as_it_may_try() -> None:
    tokens = _planted(0, 8, 2, 100)
    assert complete_rows(tokens, 100, 8) is not None
    assert complete_rows(tokens, 100, 8, nodes=7) is None


def test_the_search_ends_before_it_holds_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    words = 1_000_000
    monkeypatch.setattr(completion, "_WORDS", words)
    tokens = np.random.default_rng(0).integers(1, 32, 2000)
    rows = -(-int(tokens.sum()) // 64)
    tracemalloc.start()
    try:
        assert complete_rows(tokens, 64, rows) is None
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words < held < 8 * words  # 8 bytes each
