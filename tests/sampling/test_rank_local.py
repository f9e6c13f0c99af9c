"""Rank-local batch samplers: any stop, any resume, the same micro-batches as a plain loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cursor import Cursor
from evenstep.errors import StateMismatch
from evenstep.sampling import LocalStepSource, RankLocalBatchSampler, sample_seed

BATCHES = 11


class Plain:
    """No state, no epoch: the same batches each time."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * i, 2 * i + 1] for i in range(BATCHES)])

    def __len__(self) -> int:
        return BATCHES


class WithEpoch(Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(BATCHES), key=lambda i: sample_seed(1, self.epoch, i))
        return iter([[2 * i, 2 * i + 1] for i in order])


class WithState(WithEpoch):
    """As trainers of the Megatron family do it: a consumed count, reset by another epoch only."""

    consumed = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in list(super().__iter__())[self.consumed :]:
            self.consumed += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.consumed = state["epoch"], state["consumed"]


KINDS: list[type[Plain]] = [Plain, WithEpoch, WithState]


def source_of(kind: Callable[[], Iterable[Sequence[int]]], accumulation: int = 2) -> RankLocalBatchSampler:
    return RankLocalBatchSampler(kind(), accumulation_steps=accumulation, global_batch_size=accumulation * 8)


def lists(source: RankLocalBatchSampler, cursor: Cursor) -> tuple[list[list[int]] | None, Cursor]:
    step = source.local_step(cursor)
    return (None, cursor) if step is None else ([b.tolist() for b in step.micro_batches], step.next_cursor)


@pytest.mark.parametrize("kind", KINDS)
@given(accumulation=st.integers(1, 5), kills=st.lists(st.booleans(), min_size=20, max_size=40))
def test_a_resumed_run_sees_what_a_plain_loop_sees(
    kind: type[Plain], accumulation: int, kills: list[bool]
) -> None:
    per_epoch = BATCHES // accumulation
    wanted: list[list[list[int]]] = []
    for epoch in range(len(kills)):
        batches = kind()
        if isinstance(batches, WithEpoch):
            batches.set_epoch(epoch)
        epoch_batches = list(batches)
        wanted += [epoch_batches[k * accumulation : (k + 1) * accumulation] for k in range(per_epoch)]
    source = source_of(kind, accumulation)
    cursor, seen = source.start(), list[list[list[int]]]()
    for kill in kills:
        if kill:
            state = json.loads(json.dumps(source.state()))
            source = source_of(kind, accumulation)
            source.load_state(state)
        step, cursor = lists(source, cursor)
        if step is None:
            assert lists(source, cursor)[0] is None, "the end stays the end"
            cursor = cursor.next_epoch()
        else:
            seen.append(step)
            assert cursor.step == len(seen)
            assert cursor.consumed_samples == 8 * accumulation * ((len(seen) - 1) % per_epoch + 1)
    assert seen == wanted[: len(seen)]
    assert len(source) == per_epoch


@pytest.mark.parametrize("kind", KINDS)
def test_the_epoch_begins_again_where_the_cursor_says_so(kind: type[Plain]) -> None:
    source = source_of(kind)
    first, after = lists(source, source.start())
    lists(source, after)
    assert lists(source, source.start()) == (first, after)


def test_another_epoch_after_a_break() -> None:
    source = source_of(WithState)
    _, cursor = lists(source, source.start())
    assert lists(source, cursor.next_epoch())[0] == lists(source_of(WithState), Cursor(epoch=1))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_given_again_from_the_state_before_it(kind: type[Plain]) -> None:
    source = source_of(kind)
    _, cursor = lists(source, source.start())
    before = source.state()
    step = lists(source, cursor)
    source.load_state(before)
    assert source.state() == before
    assert lists(source, cursor) == step


def test_taking_the_state_changes_nothing() -> None:
    source = source_of(WithState)
    before = source.state()
    source.state()["batch_sampler"]["consumed"] = 5
    assert source.state() == before
    assert isinstance(source, LocalStepSource)


def test_a_cursor_of_elsewhere() -> None:
    source = source_of(Plain)
    message = (
        "the cursor is at sample 32 of epoch 0, this rank's Plain at 0 of epoch 0: a rank-local sampler has one "
        "position, load the state that was saved beside the cursor"
    )
    with pytest.raises(StateMismatch, match=f"^{re.escape(message)}$"):
        source.local_step(Cursor(consumed_samples=32))


def test_a_restored_stateful_sampler_cannot_go_back() -> None:
    source = source_of(WithState)
    _, cursor = lists(source, source.start())
    other = source_of(WithState)
    other.load_state(source.state())
    with pytest.raises(
        StateMismatch, match=r"^the cursor is at sample 0 of epoch 0, this rank's WithState at 16 "
    ):
        other.local_step(source.start())
    assert lists(other, cursor)[0] == lists(source, cursor)[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"ended": ...},
            ValueError,
            "this is not the state of a RankLocalBatchSampler: missing keys ['ended']",
        ),
        ({"epoch": True}, ValueError, "state['epoch'] is True: expected an integer >= 0"),
        ({"micro_batches": -1}, ValueError, "state['micro_batches'] is -1: expected an integer >= 0"),
        ({"consumed_samples": 0.0}, ValueError, "state['consumed_samples'] is 0.0: expected an integer >= 0"),
        ({"ended": 0}, ValueError, "state['ended'] is 0: expected a bool"),
        (
            {"batch_sampler": {}},
            StateMismatch,
            "the state was saved with a state_dict of its batch sampler, Plain has none: build the loader with the "
            "batch sampler it was saved with",
        ),
    ],
)
def test_bad_states(change: dict[str, Any], error: type[Exception], message: str) -> None:
    source = source_of(Plain)
    state = {key: value for key, value in {**source.state(), **change}.items() if value is not ...}
    with pytest.raises(error) as caught:
        source.load_state(state)
    assert str(caught.value) == message


@pytest.mark.parametrize("batch", [[], [1.5], [0, -1], 3])
def test_bad_micro_batches(batch: Any) -> None:
    source = RankLocalBatchSampler([batch], accumulation_steps=1, global_batch_size=1)
    message = (
        f"list gave the micro-batch {batch!r}: expected at least one dataset index, all of them integers >= 0"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        source.local_step(source.start())


def test_no_length() -> None:
    source = RankLocalBatchSampler(iter([[1]]), accumulation_steps=1, global_batch_size=1)
    with pytest.raises(TypeError, match="has no len"):
        len(source)
