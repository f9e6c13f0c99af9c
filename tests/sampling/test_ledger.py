"""Any interleaving of steps, kills, restores, batch sizes and epochs, against a list of an epoch's samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch.utils.data import RandomSampler

from evenstep.cursor import Cursor, find_cursor, next_epoch_state
from evenstep.sampling import (
    MixtureOrder,
    MixtureSampler,
    Sampler,
    StepSampler,
    TokenBudgetSampler,
    TorchSamplerAdapter,
)

N = 40
LENGTHS = np.random.default_rng(5).integers(0, 17, N)


class Reversed:
    identity = "reversed"

    def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return N - 1 - (positions + epoch) % N


def step(batch: int, **kwargs: Any) -> Sampler:
    return StepSampler(N, global_batch_size=batch, remainder="pad", **kwargs)


SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "shuffled": step,
    "sequential": lambda batch: step(batch, order="sequential"),
    "custom": lambda batch: step(batch, order=Reversed()),
    "torch": lambda batch: TorchSamplerAdapter(
        RandomSampler(range(N)), global_batch_size=batch, remainder="pad", seed=3
    ),
    "token budget": lambda batch: TokenBudgetSampler(
        LENGTHS, rows_per_step=batch, seq_len=16, remainder="pad"
    ),
    "token budget over a mixture": lambda batch: TokenBudgetSampler(
        LENGTHS,
        rows_per_step=batch,
        seq_len=16,
        remainder="pad",
        order=MixtureOrder([10, 30], [1, 2], num_samples=N),
    ),
    "mixture": lambda batch: MixtureSampler(
        [10, 30], [1, 2], global_batch_size=batch, num_samples=N, remainder="pad"
    ),
}


class Ledger(RuleBasedStateMachine):
    """What was handed out of an epoch is always the next stretch of that epoch's order."""

    build: Callable[[int], Sampler]

    @initialize(batch=st.integers(1, 7))
    def begin(self, batch: int) -> None:
        self.sampler = self.build(batch)
        self.cursor = self.sampler.start()
        self.saved = self.cursor.to_dict()
        self.orders: dict[int, list[int]] = {}
        self.steps = self.saved_steps = 0

    def order(self, epoch: int) -> list[int]:
        """The order of an epoch in one pass of a fresh sampler with single-sample (or single-row) steps."""
        if epoch not in self.orders:
            sampler, order = self.build(1), list[int]()
            cursor = sampler.start().at_epoch(epoch)
            while (step := sampler.step_at(cursor)) is not None:
                order += step.indices[step.indices >= 0].tolist()
                cursor = step.next_cursor
            self.orders[epoch] = order
        return self.orders[epoch]

    @rule(count=st.integers(1, 12))
    def next(self, count: int) -> None:
        for _ in range(count):
            step = self.sampler.step_at(self.cursor)
            order, done = self.order(self.cursor.epoch), self.cursor.consumed_samples
            if step is None:
                assert done == len(order) == N, "an epoch ends when every sample was used"
                self.cursor = self.cursor.next_epoch()
                continue
            following = step.next_cursor
            seen = step.indices[step.indices >= 0].tolist()
            assert sorted(seen) == sorted(order[done : following.consumed_samples])
            assert following.consumed_samples == done + len(seen)
            assert set(step.rows.tolist()) == set(range(self.sampler.rows_per_step)), "no row is forgotten"
            self.steps += 1
            assert following.step == self.steps
            self.cursor = following

    @rule()
    def save(self) -> None:
        self.saved, self.saved_steps = self.cursor.to_dict(), self.steps

    @rule(batch=st.integers(1, 7))
    def kill_and_restore(self, batch: int) -> None:
        self.sampler = self.build(batch)
        state = json.loads(json.dumps({"root": self.saved, "num_yielded": 3}))
        self.cursor = Cursor.from_dict(find_cursor(state))
        self.cursor.check_stream(self.sampler.start())
        self.steps = self.saved_steps

    @rule()
    def break_out(self) -> None:
        self.cursor = Cursor.from_dict(next_epoch_state(self.cursor.to_dict()))

    @rule(epoch=st.integers(0, 5))
    def set_epoch(self, epoch: int) -> None:
        self.cursor = self.cursor.at_epoch(epoch)


@pytest.mark.parametrize("name", SAMPLERS)
def test_ledger(name: str) -> None:
    machine = type("Machine", (Ledger,), {"build": staticmethod(SAMPLERS[name])})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_is_one(name: str) -> None:
    sampler = SAMPLERS[name](3)
    assert isinstance(sampler, Sampler)
    steps, cursor = 0, sampler.start()
    while (following := sampler.step_at(cursor)) is not None:
        steps, cursor = steps + 1, following.next_cursor
    assert len(sampler) == steps
