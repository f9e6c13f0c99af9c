from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cursor import Cursor
from evenstep.demo.greedy import GreedySampler
from evenstep.errors import Infeasible
from evenstep.sampling import Sampler, Step

LENGTHS = st.lists(st.integers(0, 10), min_size=1, max_size=60)


def steps_of(sampler: GreedySampler, cursor: Cursor) -> list[Step]:
    steps = []
    while (step := sampler.step_at(cursor)) is not None:
        steps.append(step)
        cursor = step.next_cursor
    return steps


def test_it_is_a_sampler() -> None:
    assert isinstance(GreedySampler([1], rows_per_step=1, seq_len=4), Sampler)


@given(lengths=LENGTHS, rows=st.integers(1, 6), seed=st.integers(0, 5))
def test_consecutive_samples_fill_row_after_row(lengths: list[int], rows: int, seed: int) -> None:
    sampler = GreedySampler(lengths, rows_per_step=rows, seq_len=10, seed=seed)
    steps = steps_of(sampler, sampler.start())
    assert len(sampler) == len(steps)
    seen = np.concatenate([step.indices for step in steps]) if steps else np.empty(0, np.int64)
    assert len(np.unique(seen)) == len(seen)
    for step in steps:
        tokens = np.asarray(lengths)[step.indices]
        loads = np.bincount(step.rows, tokens, minlength=rows)
        assert len(loads) == rows
        assert loads.max() <= 10
        opens = np.flatnonzero(np.diff(step.rows)) + 1
        assert (np.diff(step.rows)[opens - 1] == 1).all()
        assert (loads[step.rows[opens] - 1] + tokens[opens] > 10).all()  # it did not fit


@given(lengths=LENGTHS, rows=st.integers(1, 4))
def test_a_step_depends_on_its_position_alone(lengths: list[int], rows: int) -> None:
    sampler, cursor = GreedySampler(lengths, rows_per_step=rows, seq_len=10), None
    for step in steps_of(sampler, sampler.start()):
        fresh = GreedySampler(lengths, rows_per_step=rows, seq_len=10)
        again = fresh.step_at(fresh.start() if cursor is None else Cursor.from_dict(cursor))
        assert again is not None
        np.testing.assert_array_equal(again.indices, step.indices)
        np.testing.assert_array_equal(again.rows, step.rows)
        assert again.next_cursor == step.next_cursor
        cursor = step.next_cursor.to_dict()


def test_epochs_differ() -> None:
    sampler = GreedySampler([1] * 50, rows_per_step=5, seq_len=10)
    first, second = sampler.step_at(sampler.start()), sampler.step_at(sampler.start().at_epoch(1))
    assert first is not None
    assert second is not None
    assert not np.array_equal(first.indices, second.indices)
    assert second.next_cursor.epoch == 1


def test_a_sample_longer_than_a_row_is_named() -> None:
    message = "sample 1 has 11 tokens, a row holds seq_len=10: it fits nowhere; split it first"
    with pytest.raises(Infeasible, match=re.escape(message)):
        GreedySampler([3, 11], rows_per_step=1, seq_len=10)
