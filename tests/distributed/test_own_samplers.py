"""A sampler of the user's own: in whatever types it counts, and told on every rank where it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from evenstep import Cursor, DataPlane, RemoteRankError, Step
from evenstep.testing.jobs import Layout, Seen, Stream

SMALL = Stream(kind="step", lengths=tuple([7, 3, 12, 1, 9, 20, 5, 2] * 8), rows=24, seed=5)
LAYOUT = Layout(dp=2, options={"micro_batch_size": 2, "host_prefetch": 0})


def train(plane: DataPlane, **options: Any) -> tuple[list[Seen], str]:
    with LAYOUT.loader(SMALL, plane, **options) as loader:
        return [Seen.of(batch, loader) for batch in loader], json.dumps(loader.state_dict())


def test_a_sampler_that_fills_too_few_rows_stops_every_rank() -> None:
    """With rank, expected and got."""

    class Wrong:
        def __init__(self, change: Callable[[Any], Any]) -> None:
            self.inner, self.change = SMALL.sampler(), change
            self.rows_per_step = SMALL.rows
            self.start = self.inner.start

        def step_at(self, cursor: Cursor) -> Any:
            step = self.inner.step_at(cursor)
            return step if step is None or cursor.consumed_samples == 0 else self.change(step)

        def __len__(self) -> int:
            return len(self.inner)

    def empty_row(step: Any) -> Any:
        return replace(step, rows=np.maximum(step.rows, 1).astype(np.int32))

    def fewer_rows(step: Any) -> Any:
        return replace(step, rows=step.rows[:-1])

    def fractions(step: Any) -> Any:
        return replace(step, indices=step.indices / 2)

    for change, words in (
        (
            fractions,
            "the sampler gave indices of dtype float64 and shape [24], expected one integer for each sample",
        ),
        (empty_row, "the sampler filled 23 rows of a step, expected each of 0..23"),
        (fewer_rows, "the sampler gave 24 indices and 23 rows, expected one row for each index"),
    ):
        wrong = Wrong(change)
        for error in LAYOUT.world().outcomes(lambda plane, sampler=wrong: train(plane, sampler=sampler)):
            assert isinstance(error, RemoteRankError)
            assert re.search(rf"rank \d: {re.escape(words)}", str(error))


def test_a_sampler_may_give_lists_and_count_in_numpy() -> None:
    class Plain:
        """As somebody writes it who knows neither int64 nor int32."""

        rows_per_step = SMALL.rows

        def __init__(self) -> None:
            self.inner = SMALL.sampler()
            self.start = self.inner.start

        def step_at(self, cursor: Cursor) -> Any:
            step = self.inner.step_at(cursor)
            if step is None:
                return None
            consumed: Any = np.int64(step.next_cursor.consumed_samples)
            following = replace(step.next_cursor, consumed_samples=consumed)
            return Step(step.indices.tolist(), step.rows.tolist(), following)

        def __len__(self) -> int:
            return len(self.inner)

    world = LAYOUT.world()
    assert world.run(lambda plane: train(plane, sampler=Plain())) == world.run(train)
