from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from evenstep.demo.records import LocalMicroBatch, LocalStep, StepRecord, moved_tokens


def local(rank: int, seconds: float) -> LocalStep:
    micro_batches = [
        LocalMicroBatch(
            loss_sum=10.0 * rank + m,
            compute=1.0 + rank,
            elapsed=2.0 + rank,
            predicted=3.0 + m,
            tokens=100 * rank + m,
            padding=m,
            samples={10 * rank + m: 5},
        )
        for m in range(3)
    ]
    return LocalStep(step=7, seconds=seconds, loss_tokens=4, micro_batches=micro_batches)


def test_ranks_become_columns() -> None:
    record = StepRecord.of([local(0, 1.5), local(1, 1.25)])
    assert record.step == 7
    assert record.seconds == 1.5
    assert record.loss == (0 + 1 + 2 + 10 + 11 + 12) / 4
    np.testing.assert_array_equal(record.compute, [[1, 2]] * 3)
    np.testing.assert_array_equal(record.elapsed, [[2, 3]] * 3)
    np.testing.assert_array_equal(record.predicted, [[3, 3], [4, 4], [5, 5]])
    np.testing.assert_array_equal(record.tokens, [[0, 100], [1, 101], [2, 102]])
    np.testing.assert_array_equal(record.padding, [[0, 0], [1, 1], [2, 2]])
    assert record.samples == [[{0: 5}, {10: 5}], [{1: 5}, {11: 5}], [{2: 5}, {12: 5}]]


def test_figures_of_a_step(make_record: Callable[..., StepRecord]) -> None:
    record = make_record([[1, 3], [2, 2]], seconds=5.0, predicted=[[4, 2], [2, 2]], tokens=60, padding=20)
    assert record.makespan == 6
    assert record.computed_makespan == 5
    assert record.predicted_efficiency == 5 / 6
    assert record.measured_efficiency == 4 / 5
    assert record.tokens_per_second == 240 / 5
    assert record.padding_share == 0.25


def test_moved_tokens_are_those_on_another_rank(make_record: Callable[..., StepRecord]) -> None:
    before = make_record([[1, 1]] * 2, samples=[[{1: 10}, {2: 20}], [{3: 30, 4: 40}, {5: 50}]])
    after = make_record([[1, 1]] * 2, samples=[[{3: 30}, {2: 20, 1: 10}], [{5: 50}, {4: 40}]])
    assert moved_tokens(before, after) == 10 + 50 + 40
    assert moved_tokens(before, before) == 0


def test_a_sample_that_was_not_there_before_is_an_error(make_record: Callable[..., StepRecord]) -> None:
    before, after = make_record([[1]], samples=[[{1: 10}]]), make_record([[1]], samples=[[{2: 10}]])
    with pytest.raises(KeyError):
        moved_tokens(before, after)
