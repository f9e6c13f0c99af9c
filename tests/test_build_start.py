"""Where a built loader starts: at any position of its own stream, and at none of another."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from evenstep import (
    Cursor,
    DataPlane,
    LoaderConfig,
    StateMismatch,
    StepSampler,
    TokenBudgetSampler,
    build_loader,
)
from evenstep.testing import SimulatedWorld, assert_same

LENGTHS = [(7 * i) % 61 for i in range(200)]
DATA = [{"input_ids": torch.arange(i, i + n)} for i, n in enumerate(LENGTHS)]
CONFIG = LoaderConfig(seq_len=64, micro_batch_size=1, balance_window=2)


def sampler() -> TokenBudgetSampler:
    return TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=64, seed=5)


def test_a_state_of_an_epochs_end_restores_to_that_end() -> None:
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as loader:
        list(loader)
        end, second = loader.state_dict(), list(loader)
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as restored:
        restored.load_state_dict(end)
        assert list(restored) == []
        assert_same(list(restored), second)
    for how in ("set_epoch", "restart_on_stop_iteration"):
        with build_loader(DATA, None, CONFIG, sampler=sampler()) as restored:
            restored.load_state_dict(end)
            if how == "set_epoch":
                restored.set_epoch(1)
            else:
                restored.restart_on_stop_iteration = True
            assert_same(list(restored), second, how)


def test_a_start_of_another_stream_is_refused() -> None:
    other = TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=64, seed=6).start()
    with pytest.raises(StateMismatch, match="the state was saved with seed=6, this loader has seed=5"):
        build_loader(DATA, None, CONFIG, sampler=sampler(), start=other)


def test_a_start_that_does_not_know_its_stream_becomes_one_of_it() -> None:
    first = sampler().step_at(sampler().start())
    assert first is not None
    start = Cursor(consumed_samples=first.next_cursor.consumed_samples, step=1)
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as whole:
        batches = list(whole)
    with build_loader(DATA, None, CONFIG, sampler=sampler(), start=start) as rest:
        assert {key: rest.state_dict()[key] for key in ("seed", "order", "dataset_size")} == {
            "seed": 5,
            "order": "shuffled",
            "dataset_size": 200,
        }
        assert_same(list(rest), [batch for batch in batches if batch["info"].step > 0])


def test_a_start_inside_a_step_of_another_layout_begins_that_step_again() -> None:
    config = LoaderConfig(
        seq_len=64, micro_batch_size=1, balance_window=1, resume="micro_batch", host_prefetch=0
    )
    order = StepSampler(len(DATA), global_batch_size=8, order="sequential")

    def stop_inside(plane: DataPlane) -> dict[str, Any]:
        with build_loader(DATA, plane, config, sampler=order) as loader:
            next(loader)
            next(loader)
            return loader.state_dict()

    start = Cursor.from_dict(SimulatedWorld(2).run(stop_inside)[0])
    assert (start.step, start.micro_batch) == (0, 2)
    with build_loader(DATA, None, config, sampler=order) as loader:
        whole = list(loader)
    with pytest.warns(
        UserWarning, match="^the state stands after micro-batch 2 of step 0, but was taken in another"
    ):
        again = build_loader(DATA, None, config, sampler=order, start=start)
    with again:
        assert_same(list(again), whole)


def test_a_position_beyond_the_epoch_or_the_step_is_refused() -> None:
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as loader:
        next(loader)
        state = loader.state_dict()
        message = re.escape(
            "cursor['consumed_samples'] is 500, but an epoch of this sampler has 200 samples: "
        )
        with pytest.raises(ValueError, match="^" + message):
            loader.load_state_dict({**state, "consumed_samples": 500})
    config = LoaderConfig(seq_len=64, balance_window=2, resume="micro_batch")
    with build_loader(DATA, None, config, sampler=sampler()) as loader:
        loader.load_state_dict({**state, "micro_batch": 8})
        message = re.escape("cursor['micro_batch'] is 8, but a step of this layout has 8 micro-batches: ")
        with pytest.raises(ValueError, match="^" + message):
            next(loader)
