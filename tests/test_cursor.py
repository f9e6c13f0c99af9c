"""The cursor: checked field by field, small, and readable wherever a checkpointer has put it."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cursor import Cursor, find_cursor, next_epoch_state
from evenstep.errors import StateMismatch

NUMBERS = [f.name for f in fields(Cursor) if f.name not in ("version", "order")]
LARGEST = 2**64 - 1

cursors = st.builds(
    Cursor,
    order=st.from_regex(r"[A-Za-z0-9_-]{0,16}", fullmatch=True),
    **{name: st.integers(0, LARGEST) for name in NUMBERS},
)


def hyper_parallel(*, finished: bool = False, size: int | None = 1000, **changes: Any) -> dict[str, Any]:
    inner = {"consumed_samples": 96, "epoch": 2, "global_batch_size": 32, "dp_world_size": 4, **changes}
    return {
        "_index_sampler_state": {key: value for key, value in inner.items() if value is not ...},
        "_iterator_finished": finished,
        "dataset_state": None if size is None else {"dataset_size": size, "seed": 5},
    }


@given(cursor=cursors)
def test_round_trip_through_json_and_pickle(cursor: Cursor) -> None:
    state = cursor.to_dict()
    assert Cursor.from_dict(json.loads(json.dumps(state))) == cursor
    assert pickle.loads(pickle.dumps(cursor)) == cursor
    assert list(state) == [f.name for f in fields(Cursor)]


def test_torch_save_with_weights_only(tmp_path: Path) -> None:
    cursor = Cursor(step=3, order="shuffled", stream=LARGEST)
    torch.save(cursor.to_dict(), tmp_path / "state.pt")
    assert Cursor.from_dict(torch.load(tmp_path / "state.pt", weights_only=True)) == cursor


def test_less_than_512_bytes_at_the_largest_values() -> None:
    largest = Cursor(order="x" * 16, **dict.fromkeys(NUMBERS, LARGEST))
    assert len(json.dumps(largest.to_dict())) < 512


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Cursor().step = 1  # type: ignore[misc]


def test_a_stored_state_of_the_first_version_loads() -> None:
    stored = json.loads((Path(__file__).parent / "fixtures" / "cursor-v1.json").read_text())
    assert Cursor.from_dict(stored) == Cursor(
        epoch=3,
        consumed_samples=40960,
        micro_batch=2,
        step=1234,
        global_batch_size=512,
        micro_batch_size=2,
        accumulation_steps=8,
        window=8,
        dp_size=32,
        plan=0x1234567890ABCDEF,
        dataset_size=1_000_000,
        order="shuffled",
        seed=17,
        stream=2**63 + 5,
    )


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, "cursor[{name!r}] is True (bool), expected an integer"),
        (1.0, TypeError, "cursor[{name!r}] is 1.0 (float), expected an integer"),
        ("1", TypeError, "cursor[{name!r}] is '1' (str), expected an integer"),
        (None, TypeError, "cursor[{name!r}] is None (NoneType), expected an integer"),
        (-1, ValueError, "cursor[{name!r}] is -1 (int), expected an integer in [0, 2**64)"),
        (
            2**64,
            ValueError,
            "cursor[{name!r}] is 18446744073709551616 (int), expected an integer in [0, 2**64)",
        ),
    ],
)
def test_every_number_is_checked(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Cursor.from_dict({**Cursor().to_dict(), name: value})
    assert str(caught.value) == message.format(name=name)


@pytest.mark.parametrize("name", NUMBERS)
def test_integers_of_numpy_become_pythons(name: str) -> None:
    odd: dict[str, Any] = {name: np.uint64(2**63 + 5)}
    plain: dict[str, Any] = {name: 2**63 + 5}
    cursor = Cursor(**odd)
    assert cursor == Cursor(**plain)
    assert json.loads(json.dumps(cursor.to_dict()))[name] == 2**63 + 5


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (3, TypeError, "(int), expected a string"),
        (b"shuffled", TypeError, "(bytes), expected a string"),
        ("x" * 17, ValueError, "(str), expected at most 16 ASCII letters, digits, '-' or '_'"),
        ("größe", ValueError, "(str), expected at most 16 ASCII letters, digits, '-' or '_'"),
        ('a"', ValueError, "(str), expected at most 16 ASCII letters, digits, '-' or '_'"),
    ],
)
def test_the_order_is_checked(value: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error) as caught:
        Cursor.from_dict({**Cursor().to_dict(), "order": value})
    assert str(caught.value) == f"cursor['order'] is {value!r} {expected}"


def test_another_version() -> None:
    message = "cursor['version'] is 2 (int), expected version 1; it was written by another evenstep"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Cursor.from_dict({**Cursor().to_dict(), "version": 2, "a_key_of_tomorrow": 1})


@pytest.mark.parametrize("name", ["epoch", "version"])
def test_missing_and_unknown_keys(name: str) -> None:
    state: dict[str, Any] = {**Cursor().to_dict(), "rank": 3}
    del state[name]
    message = (
        f"this is not an evenstep cursor: missing keys ['{name}'], unknown keys ['rank']; pass what "
        "loader.state_dict() returned"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Cursor.from_dict(state)


def test_no_mapping() -> None:
    with pytest.raises(TypeError, match=r"^a cursor is a mapping, got list \[1\]$"):
        Cursor.from_dict([1])  # type: ignore[arg-type]


# ---- where it goes next


def test_next_epoch() -> None:
    begun = Cursor(epoch=4, consumed_samples=8, micro_batch=1, step=9, plan=5, seed=3)
    fresh = Cursor(epoch=5, step=9, seed=3)
    assert begun.next_epoch() == fresh
    assert replace(begun, consumed_samples=0).next_epoch() == fresh, "a micro-batch was handed out"
    assert fresh.next_epoch() == fresh, "nothing of it was handed out"
    assert begun.at_epoch(7) == Cursor(epoch=7, step=9, seed=3)


# ---- other streams


@pytest.mark.parametrize(
    ("name", "saved", "current"),
    [("dataset_size", 100, 101), ("order", "shuffled", "sequential"), ("seed", 1, 2), ("stream", 0, 7)],
)
def test_another_stream_is_refused(name: str, saved: Any, current: Any) -> None:
    base = Cursor(dataset_size=100, order="shuffled", seed=1)
    state, expected = replace(base, **{name: saved}), replace(base, **{name: current})
    state.check_stream(state)
    with pytest.raises(StateMismatch) as caught:
        state.check_stream(expected)
    cause = (
        ", so another kind of sampler made it, or one of other lengths, order or weights"
        if name == "stream"
        else ""
    )
    assert str(caught.value) == (
        f"the state was saved with {name}={saved!r}, this loader has {name}={current!r}{cause}: resuming would skip, "
        "repeat or reshuffle samples. Load it with the dataset and sampler it was saved with, or pass "
        "allow_changed_dataset=True to continue at the same position of the other stream."
    )
    state.check_stream(expected, allow_changed_dataset=True)


def test_the_layout_is_no_part_of_the_stream() -> None:
    a = Cursor(order="shuffled", dp_size=8, global_batch_size=64, window=4)
    a.check_stream(Cursor(order="shuffled", dp_size=3, global_batch_size=6, window=1))


# ---- HyperParallel


def test_hyper_parallel_unfinished() -> None:
    assert Cursor.from_dict(hyper_parallel()) == Cursor(
        epoch=2, consumed_samples=96, global_batch_size=32, dp_size=4, dataset_size=1000, seed=5, step=3
    )


def test_hyper_parallel_finished_stands_past_its_dropped_remainder() -> None:
    cursor = Cursor.from_dict(hyper_parallel(finished=True, consumed_samples=992))
    assert (cursor.epoch, cursor.consumed_samples, cursor.step) == (2, 1000, 31)
    assert Cursor.from_dict(hyper_parallel(consumed_samples=992)).consumed_samples == 992
    assert cursor.next_epoch() == replace(cursor, epoch=3, consumed_samples=0)


def test_hyper_parallel_without_dataset_state_or_with_an_offset() -> None:
    cursor = Cursor.from_dict(hyper_parallel(size=None, finished=True, optimizer_step_offset=40))
    assert (cursor.dataset_size, cursor.seed, cursor.consumed_samples, cursor.step) == (0, 0, 96, 43)
    cursor.check_stream(Cursor(dataset_size=77, seed=9, order="shuffled", stream=4))


def test_hyper_parallel_is_checked_against_what_it_knows() -> None:
    cursor = Cursor.from_dict(hyper_parallel())
    cursor.check_stream(Cursor(dataset_size=1000, seed=5, order="shuffled"))
    with pytest.raises(StateMismatch, match=r"^the state was saved with dataset_size=1000, this loader has "):
        cursor.check_stream(Cursor(dataset_size=999, seed=5))
    with pytest.raises(StateMismatch, match=r"^the state was saved with seed=5, this loader has seed=6"):
        cursor.check_stream(Cursor(dataset_size=1000, seed=6))


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            {"_index_sampler_state": None},
            TypeError,
            "cursor['_index_sampler_state'] is None (NoneType), expected a mapping",
        ),
        (
            hyper_parallel(epoch=...),
            ValueError,
            "cursor['_index_sampler_state'] has no key 'epoch'",
        ),
        (
            hyper_parallel(consumed_samples=True),
            TypeError,
            "cursor['consumed_samples'] is True (bool), expected an integer",
        ),
        (
            hyper_parallel(global_batch_size=0),
            ValueError,
            "cursor['global_batch_size'] is 0 (int), expected a positive integer",
        ),
        (
            {**hyper_parallel(), "_iterator_finished": 1},
            TypeError,
            "cursor['_iterator_finished'] is 1 (int), expected a bool",
        ),
        (
            {**hyper_parallel(), "dataset_state": 3},
            TypeError,
            "cursor['dataset_state'] is 3 (int), expected a mapping or None",
        ),
        (
            hyper_parallel(size=-1),
            ValueError,
            "cursor['dataset_size'] is -1 (int), expected an integer in [0, 2**64)",
        ),
        (
            hyper_parallel(optimizer_step_offset="2"),
            TypeError,
            "cursor['step'] is '2' (str), expected an integer",
        ),
    ],
)
def test_bad_hyper_parallel_states(state: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Cursor.from_dict(state)
    assert str(caught.value) == message


# ---- inside other states

WRAPPERS = [
    lambda s: s,
    lambda s: {"root": s, "num_yielded": 7},
    lambda s: {"source": {"source": s}},
    lambda s: {"root": {"snapshot": {"source": s}, "steps_since_snapshot": 0}, "num_yielded": 1},
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("state", [Cursor(step=4).to_dict(), hyper_parallel()])
def test_the_cursor_is_found_under_stock_wrappers(wrap: Any, state: dict[str, Any]) -> None:
    assert find_cursor(wrap(state)) is state


def test_what_lies_inside_a_cursor_is_its_own() -> None:
    state = {**Cursor().to_dict(), "source": {"0": Cursor(step=5).to_dict()}}
    assert find_cursor({"root": state}) is state


@pytest.mark.parametrize(
    ("state", "found"), [({"a": 1}, 0), ({"a": Cursor().to_dict(), "b": Cursor().to_dict()}, 2)]
)
def test_no_cursor_or_two(state: dict[str, Any], found: int) -> None:
    message = (
        f"the state with keys {sorted(state)} holds {found} evenstep cursors, expected one; pass what "
        "loader.state_dict() returned"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_cursor(state)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_next_epoch_state_moves_the_cursor_alone(wrap: Any) -> None:
    begun = Cursor(epoch=1, consumed_samples=8, step=2)
    state = {**begun.to_dict(), "source": {"0": {"position": 3}}}
    moved = {**begun.next_epoch().to_dict(), "source": {"0": {"position": 3}}}
    assert next_epoch_state(wrap(state)) == wrap(moved)
    assert state["epoch"] == 1, "the old state is left alone"


def test_next_epoch_state_of_a_hyper_parallel_cursor_is_ours() -> None:
    state = hyper_parallel()
    assert next_epoch_state({"root": state}) == {"root": Cursor.from_dict(state).next_epoch().to_dict()}


@pytest.mark.parametrize("state", [None, 3, "text"])
def test_next_epoch_state_of_nothing(state: Any) -> None:
    assert next_epoch_state(state) is state
