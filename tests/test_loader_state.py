"""The state of a loader: small, plain, a copy, the same on every rank, and refused where it is none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from evenstep import Cursor, DataPlane, Loader, StateMismatch
from evenstep.testing import SimulatedWorld
from evenstep.testing.jobs import Layout, Seen, Stream, members_by_step

STREAM = Stream(kind="step", lengths=(3, 5, 2, 7, 1, 4, 6, 2, 9, 1, 8, 3), rows=4, seed=1)
LAYOUT = Layout(options={"host_prefetch": 0, "micro_batch_size": 2})


def loader_of(stream: Stream = STREAM, layout: Layout = LAYOUT, **arguments: Any) -> Loader[Any]:
    return layout.loader(stream, DataPlane.single(), **arguments)


def test_the_state_is_small_plain_and_the_same_on_every_rank() -> None:
    big = 2**63 - 1
    cursor = Cursor(
        epoch=10**9,
        consumed_samples=10**12,
        micro_batch=10**4,
        step=10**9,
        global_batch_size=10**6,
        micro_batch_size=10**3,
        accumulation_steps=10**4,
        window=10**4,
        dp_size=10**5,
        plan=big,
        dataset_size=10**12,
        order="x" * 16,
        seed=big,
        stream=big,
    )
    assert len(json.dumps(cursor.to_dict())) < 512

    def states(plane: DataPlane) -> list[str]:
        with Layout(dp=2, tp=2, options={"micro_batch_size": 1}).loader(STREAM, plane) as loader:
            seen = [json.dumps(loader.state_dict())]
            seen += [json.dumps(loader.state_dict()) for _ in loader]
        return seen

    ranks = SimulatedWorld({"dp": 2, "tp": 2}).run(states)
    assert all(other == ranks[0] for other in ranks)
    assert len(set(ranks[0])) == len(ranks[0]) == 7
    assert all(len(state) < 512 for state in ranks[0])
    for state in ranks[0]:
        assert set(json.loads(state)) == set(cursor.to_dict())
    told = json.loads(ranks[0][3])
    names = (
        "global_batch_size",
        "micro_batch_size",
        "accumulation_steps",
        "window",
        "dp_size",
        "micro_batch",
    )
    assert [told[name] for name in names] == [4, 1, 2, 2, 2, 1]


def test_the_state_is_a_copy() -> None:
    loader = loader_of()
    loader.state_dict()["epoch"] = 7
    assert loader.state_dict()["epoch"] == 0
    state = loader.state_dict()
    loader.load_state_dict(state)
    state["epoch"] = 7
    loader.state_dict()["epoch"] = 7
    assert loader.state_dict()["epoch"] == 0
    assert len(list(loader)) == 6


def test_save_state_is_the_state() -> None:
    loader = loader_of()
    next(loader)
    assert loader.save_state() == loader.state_dict()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"consumed_samples": True},
            TypeError,
            "cursor['consumed_samples'] is True (bool), expected an integer",
        ),
        ({"epoch": -1}, ValueError, "cursor['epoch'] is -1 (int), expected an integer in [0, 2**64)"),
        (
            {"version": 9},
            ValueError,
            "cursor['version'] is 9 (int), expected version 1; it was written by another evenstep",
        ),
        (
            {"extra": 1},
            ValueError,
            "this is not an evenstep cursor: missing keys [], unknown keys ['extra']; pass what loader.state_dict() "
            "returned",
        ),
    ],
)
def test_a_broken_state_is_refused_when_it_is_loaded(
    change: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    loader = loader_of()
    next(loader)
    before = loader.state_dict()
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


@pytest.mark.parametrize("lost", ["consumed_samples", "epoch", "plan"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "of the stock Loader"])
def test_a_state_without_a_key_names_it(lost: str, wrapped: bool) -> None:
    loader = loader_of()
    state = loader.state_dict()
    del state[lost]
    message = (
        f"this is not an evenstep cursor: missing keys ['{lost}'], unknown keys []; pass what loader.state_dict() "
        "returned"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loader.load_state_dict({"root": state, "num_yielded": 0} if wrapped else state)


@pytest.mark.parametrize(
    "state", [{}, {"model": 1}, {"a": {"consumed_samples": 1}, "b": {"consumed_samples": 1}}]
)
def test_what_holds_no_single_cursor_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"evenstep cursors?, expected one; pass what loader\.state_dict\(\) returned"
    ):
        loader_of().load_state_dict(state)


def test_a_state_is_a_mapping() -> None:
    with pytest.raises(TypeError, match=r"^a state is a mapping, got list \[\]$"):
        loader_of().load_state_dict([])  # type: ignore[arg-type]


def test_a_start_is_where_a_fresh_loader_begins() -> None:
    first = loader_of()
    next(first)
    next(first)
    start = Cursor.from_dict(first.state_dict())
    loader = loader_of(start=start)
    assert loader.step == 1
    seen = [Seen.of(batch, loader) for batch in loader]
    assert members_by_step([seen]) == {c.step: m for c, m in STREAM.steps() if c.step >= 1}
    assert [b["info"].step for b in loader] == [3, 3, 4, 4, 5, 5]


def test_another_state_is_refused_by_every_graph() -> None:
    with loader_of() as loader:
        state = {**loader.state_dict(), "seed": 2}
        with pytest.raises(StateMismatch, match="seed=2"):
            loader.load_state_dict(state)
