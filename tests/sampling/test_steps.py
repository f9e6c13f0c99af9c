"""A fixed number of samples per step: against a model that is just the list of an epoch's samples."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cursor import Cursor
from evenstep.sampling import Remainder, Sampler, Step, StepSampler


def steps_from(sampler: Sampler, cursor: Cursor) -> list[Step]:
    steps = []
    while (step := sampler.step_at(cursor)) is not None:
        steps.append(step)
        cursor = step.next_cursor
    return steps


class Backwards:
    """A custom order over a dataset larger than the epoch."""

    identity = ("backwards", 7)

    def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return 1000 * (epoch + 1) - positions


sizes = st.integers(1, 60)
SMALL = [1, 3, 7, 9, 2, 8, 6, 4, 5, 0]
LARGE = [560491874382, 784032422695, 127568362192, 523464566866]


@given(
    n=sizes, batch=sizes, order=st.sampled_from(["sequential", "shuffled"]), seed=st.integers(0, 2**64 - 1)
)
def test_pad_visits_every_sample_once(n: int, batch: int, order: str, seed: int) -> None:
    sampler = StepSampler(n, global_batch_size=batch, order=order, seed=seed, remainder="pad")
    for epoch in (0, 1):
        steps = steps_from(sampler, sampler.start().at_epoch(epoch))
        assert len(steps) == len(sampler) == -(-n // batch)
        seen = np.concatenate([step.indices for step in steps])
        assert sorted(seen[:n]) == list(range(n))
        assert (seen[n:] == -1).all()
        assert all(step.rows.tolist() == list(range(batch)) for step in steps)
        assert steps[-1].next_cursor.consumed_samples == n


@given(n=sizes, batch=sizes, remainder=st.sampled_from(["drop", "wrap", "pad"]), epoch=st.integers(0, 3))
def test_steps_cut_one_epoch_order(n: int, batch: int, remainder: Remainder, epoch: int) -> None:
    batch = min(batch, n) if remainder == "drop" else batch
    sampler = StepSampler(n, global_batch_size=batch, remainder=remainder)
    whole = StepSampler(n, global_batch_size=n).step_at(Cursor(epoch=epoch))
    assert whole is not None
    cycle = {"drop": whole.indices, "wrap": np.tile(whole.indices, batch + 1)}.get(
        remainder, np.append(whole.indices, [-1] * batch)
    )
    steps = steps_from(sampler, sampler.start().at_epoch(epoch))
    assert len(steps) == len(sampler)
    for k, step in enumerate(steps):
        assert step.indices.dtype == np.int64
        assert step.rows.dtype == np.int32
        assert step.indices.tolist() == cycle[k * batch : (k + 1) * batch].tolist()


@given(n=sizes, batches=st.lists(st.integers(1, 9), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_a_changed_batch_size_continues_the_order(n: int, batches: list[int], seed: int) -> None:
    whole = StepSampler(n, global_batch_size=n, seed=seed).step_at(Cursor())
    assert whole is not None
    cursor, seen = Cursor(), list[int]()
    for batch in batches:
        step = StepSampler(n, global_batch_size=batch, seed=seed, remainder="pad").step_at(cursor)
        if step is None:
            break
        cursor = step.next_cursor
        seen += step.indices[step.indices >= 0].tolist()
    assert seen == whole.indices[: len(seen)].tolist()
    assert cursor.consumed_samples == len(seen)


def test_next_cursor_has_the_identity_and_keeps_the_layout() -> None:
    sampler = StepSampler(1000, global_batch_size=8, seed=5)
    cursor = Cursor(
        epoch=2, consumed_samples=30, micro_batch=3, step=77, plan=99, micro_batch_size=2, dp_size=4, window=5
    )
    step = sampler.step_at(cursor)
    assert step is not None
    assert step.next_cursor == replace(
        cursor,
        consumed_samples=38,
        micro_batch=0,
        plan=0,
        step=78,
        global_batch_size=8,
        dataset_size=1000,
        order="shuffled",
        seed=5,
    )


def test_epochs_and_seeds_differ() -> None:
    first = StepSampler(100, global_batch_size=100, seed=0)
    orders = [
        sampler.step_at(Cursor(epoch=epoch))
        for sampler in (first, StepSampler(100, global_batch_size=100, seed=1))
        for epoch in range(3)
    ]
    assert len({tuple(step.indices.tolist()) for step in orders if step is not None}) == 6


def test_a_shuffled_order_never_changes() -> None:
    """Golden values: whoever changes them breaks every saved position."""
    small = StepSampler(10, global_batch_size=10, seed=1).step_at(Cursor(epoch=2))
    large = StepSampler(10**12, global_batch_size=4, seed=1).step_at(Cursor(epoch=2, consumed_samples=10**11))
    assert small is not None
    assert large is not None
    assert small.indices.tolist() == SMALL
    assert large.indices.tolist() == LARGE


def test_custom_order() -> None:
    sampler = StepSampler(10, global_batch_size=4, order=Backwards(), remainder="pad")
    steps = steps_from(sampler, sampler.start().at_epoch(1))
    assert [step.indices.tolist() for step in steps] == [
        [2000, 1999, 1998, 1997],
        [1996, 1995, 1994, 1993],
        [1992, 1991, -1, -1],
    ]
    assert sampler.start().order == "custom"
    assert sampler.start().stream != 0
    other = type("Other", (Backwards,), {"identity": ("backwards", 8)})()
    assert StepSampler(10, global_batch_size=4, order=other).start().stream != sampler.start().stream
    nameless = type("Nameless", (Backwards,), {"identity": None})()
    assert StepSampler(10, global_batch_size=4, order=nameless).start().stream == 0


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"num_samples": 0},
            ValueError,
            "num_samples is 0: expected 1 or more samples",
        ),
        (
            {"num_samples": 3.0},
            TypeError,
            "num_samples must be an integer, the number of samples, but is 3.0 (float)",
        ),
        (
            {"global_batch_size": True},
            TypeError,
            "global_batch_size must be an integer, the number of samples per optimizer step, but is True (bool)",
        ),
        (
            {"num_samples": [{"input_ids": list(range(50))} for _ in range(100)]},
            TypeError,
            "num_samples must be an integer, the number of samples, but is [{'input_ids': [0, 1, 2, ...]}, "
            "{'input_ids': [0, 1, 2, ...]}, {'input_ids': ... (list); of a dataset pass len(dataset)",
        ),
        (
            {"global_batch_size": -4},
            ValueError,
            "global_batch_size is -4: expected 1 or more samples per optimizer step",
        ),
        ({"seed": -1}, ValueError, "seed is -1: expected an integer in [0, 2**64)"),
        ({"seed": "0"}, TypeError, "seed is '0' (str): expected an integer in [0, 2**64)"),
        (
            {"remainder": "keep"},
            ValueError,
            "remainder is 'keep': expected one of 'drop', 'wrap', 'pad'",
        ),
        (
            {"order": "random"},
            ValueError,
            "order is 'random': expected 'sequential', 'shuffled' or an object with index_at",
        ),
        (
            {"order": [3, 1, 2]},
            TypeError,
            "order is a list: expected 'sequential', 'shuffled' or an object with index_at(epoch, positions) -> "
            "indices; a torch Sampler goes through TorchSamplerAdapter",
        ),
        (
            {"global_batch_size": 101},
            ValueError,
            "global_batch_size 101 is larger than the dataset of 100 samples: remainder='drop' would leave no "
            "step at all; make the step smaller, or use 'wrap' or 'pad'",
        ),
    ],
)
def test_bad_arguments(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        StepSampler(**{"num_samples": 100, "global_batch_size": 10, **kwargs})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            np.array([0.0, 1.0]),
            "Fixed.index_at gave float64 [2] for 2 positions of epoch 3: expected one integer per position",
        ),
        (
            np.array([4]),
            "Fixed.index_at gave int64 [1] for 2 positions of epoch 3: expected one integer per position",
        ),
        (
            np.array([4, -2]),
            "Fixed.index_at gave index -2 for position 1 of epoch 3: a dataset index is >= 0 (-1 is reserved "
            "for padding)",
        ),
    ],
)
def test_a_custom_order_is_checked(result: npt.NDArray[np.int64], message: str) -> None:
    class Fixed:
        def index_at(self, *_: object) -> npt.NDArray[np.int64]:
            return result

    sampler = StepSampler(2, global_batch_size=2, order=Fixed())
    with pytest.raises(ValueError, match=re.escape(message)):
        sampler.step_at(Cursor(epoch=3))


def test_no_step_follows_a_position_past_the_end() -> None:
    remainders: tuple[Remainder, ...] = ("drop", "wrap", "pad")
    for remainder in remainders:
        sampler = StepSampler(10, global_batch_size=4, remainder=remainder)
        assert sampler.step_at(Cursor(consumed_samples=10)) is None
        assert sampler.step_at(Cursor(consumed_samples=11)) is None
