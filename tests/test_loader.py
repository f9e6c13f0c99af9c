"""The loop's end of a graph as trainers use it: lengths, epochs, ends, states."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torchdata.nodes as tn

from evenstep import Cursor, DataPlane, Loader, StateMismatch
from evenstep.testing import SimulatedWorld
from evenstep.testing.jobs import Layout, Stream, members_by_step
from evenstep.testing.jobs import Seen as SeenBatch

STREAM = Stream(kind="step", lengths=(3, 5, 2, 7, 1, 4, 6, 2, 9, 1, 8, 3), rows=4, seed=1)
LAYOUT = Layout(options={"host_prefetch": 0, "micro_batch_size": 2})


def loader_of(stream: Stream = STREAM, layout: Layout = LAYOUT, **arguments: Any) -> Loader[Any]:
    return layout.loader(stream, DataPlane.single(), **arguments)


def members(batches: Any) -> list[int]:
    return sorted(index for batch in batches for row in batch["rows"] for index in row)


@pytest.mark.parametrize("kind", ["step", "tokens", "mixture"])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_the_length_is_that_of_each_epoch(kind: str, remainder: str) -> None:
    lengths = tuple(6 + (5 * i) % 9 for i in range(250))
    loader = loader_of(replace(STREAM, kind=kind, lengths=lengths, rows=4, remainder=remainder))
    counts = set()
    for _ in range(4):
        promised = len(loader)
        assert sum(1 for _ in loader) == promised
        counts.add(promised)
    if kind == "tokens":
        assert len(counts) > 1, "epochs of a token budget were meant to differ"


def test_no_length_is_better_than_a_wrong_one() -> None:
    with pytest.raises(
        TypeError,
        match=re.escape(
            "with accumulation_steps='auto' the number of micro-batches depends on the plan of each step; "
            "len(loader.sampler) is the number of optimizer steps"
        ),
    ):
        len(loader_of(replace(STREAM, kind="auto")))
    assert len(loader_of(replace(STREAM, kind="auto")).sampler) == 3
    with pytest.raises(TypeError, match=r"^_Endless does not know how many batches an epoch has$"):
        len(Loader(_Endless()))


class _Endless(tn.BaseNode[int]):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations


class _Letters(tn.BaseNode[str]):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
        self._given = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._given = 0

    def next(self) -> str:
        if self._given == len(self):
            raise StopIteration
        self._given += 1
        return "abc"[self._given - 1]

    def get_state(self) -> dict[str, Any]:
        return {"given": self._given}

    def __len__(self) -> int:
        return 3


def test_a_foreign_source_knows_its_length_and_nothing_of_balance() -> None:
    loader = Loader(tn.Prefetcher(_Letters(), prefetch_factor=1))
    assert len(loader) == 3
    assert list(loader) == ["a", "b", "c"]
    assert loader.last_balance is None
    assert loader.last_host_batch is None
    assert loader.sampler is None


def test_it_is_its_own_iterator() -> None:
    loader = loader_of()
    assert iter(loader) is loader
    first = next(loader)
    rest = list(loader)
    assert members([first, *rest]) == list(range(12))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)


def test_epochs_follow_each_other() -> None:
    loader = loader_of()
    orders = [[batch["rows"] for batch in loader] for _ in range(3)]
    assert [sorted(i for rows in order for row in rows for i in row) for order in orders] == [
        list(range(12))
    ] * 3
    assert orders[0] != orders[1] != orders[2]
    assert loader.state_dict()["epoch"] == 2
    assert loader.step == 9
    iter(loader)
    assert (loader.state_dict()["epoch"], loader.step) == (3, 9)


def test_loops_that_count_batches_reach_the_next_epoch() -> None:
    loader, other = loader_of(), loader_of()
    counted = [
        [batch["rows"] for _, batch in zip(range(len(loader)), loader, strict=False)] for _ in range(3)
    ]
    assert counted == [[batch["rows"] for batch in other] for _ in range(3)]


def test_set_epoch_on_the_current_epoch_changes_nothing() -> None:
    loader, plain = loader_of(), loader_of()
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert [b["rows"] for b in loader] == [b["rows"] for b in plain]
    loader.set_epoch(2)
    loader.set_epoch(3)
    first = next(loader)
    loader.set_epoch(3)
    assert [first["rows"], *[b["rows"] for b in loader]] == [b["rows"] for b in plain]


def test_set_epoch_jumps_only_where_nothing_is_lost() -> None:
    loader, plain = loader_of(), loader_of()
    orders = [[batch["rows"] for batch in plain] for _ in range(6)]
    of_numpy: Any = np.int64(2)
    loader.set_epoch(of_numpy)
    assert (json.dumps(loader.state_dict()["epoch"]), loader.step) == ("2", 0)
    assert [b["rows"] for b in loader] == orders[2]
    loader.set_epoch(5)
    assert next(loader)["rows"] == orders[5][0]
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            "set_epoch(6) in the middle of epoch 5 (after 0 samples) would skip the rest of it. Finish the epoch, or "
            "load a state that stands elsewhere."
        ),
    ):
        loader.set_epoch(6)
    assert [b["rows"] for b in loader] == orders[5][1:]


def test_set_epoch_after_a_restore_at_the_end_begins_the_epoch() -> None:
    loader, plain = loader_of(), loader_of()
    orders = [[batch["rows"] for batch in plain] for _ in range(2)]
    state = loader_of()
    list(state)
    loader.load_state_dict(state.state_dict())
    loader.set_epoch(1)
    assert loader.step == 3
    assert [b["rows"] for b in loader] == orders[1]


def test_after_a_restore_at_the_end_the_first_loop_is_empty_unless_told_otherwise() -> None:
    done, plain = loader_of(), loader_of()
    orders = [[batch["rows"] for batch in plain] for _ in range(3)]
    list(done)
    end = done.state_dict()
    loader = loader_of()
    loader.load_state_dict(end)
    assert [b["rows"] for b in loader] == []
    assert [b["rows"] for b in loader] == orders[1]

    loader = loader_of()
    loader.restart_on_stop_iteration = True
    loader.load_state_dict(end)
    assert loader.state_dict() == end
    assert iter(iter(loader)) is loader
    assert (loader.state_dict()["epoch"], loader.step) == (1, 3)
    assert [b["rows"] for b in loader] == orders[1]
    assert [b["rows"] for b in loader] == orders[2]
    loader.load_state_dict(end)
    assert list(_rest(loader)) == []


def _rest(loader: Loader[Any]) -> list[Any]:
    """By ``next`` alone, which never leaves an epoch."""
    rest = []
    while (batch := next(loader, None)) is not None:
        rest.append(batch)
    return rest


@pytest.mark.parametrize(
    ("epoch", "error", "message"),
    [
        (True, TypeError, "epoch=True (bool), expected an integer"),
        (1.0, TypeError, "epoch=1.0 (float), expected an integer"),
        (-1, ValueError, "epoch=-1, expected an integer >= 0"),
    ],
)
def test_a_wrong_epoch_is_named(epoch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        loader_of().set_epoch(epoch)


def test_set_epoch_reaches_the_dataset() -> None:
    class Dataset:
        told: list[int]

        def __init__(self) -> None:
            self.told = []

        def __len__(self) -> int:
            return len(STREAM)

        def __getitem__(self, index: int) -> dict[str, int]:
            return STREAM[index]

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    dataset = Dataset()
    loader = loader_of(dataset=dataset)
    loader.set_epoch(0)
    loader.set_epoch(4)
    assert dataset.told == [0, 4]


def test_after_close_it_ends_and_refuses() -> None:
    loader = loader_of(layout=replace(LAYOUT, options={**LAYOUT.options, "host_prefetch": 2}))
    next(loader)
    state = loader.state_dict()
    loader.close()
    loader.close()
    assert list(loader) == []
    assert loader.state_dict() == state
    with pytest.raises(RuntimeError, match=r"^this loader has been closed; build another one to train on$"):
        loader.set_epoch(1)
    with pytest.raises(
        RuntimeError, match=r"^this loader has been closed; build another one to load a state$"
    ):
        loader.load_state_dict(state)


def test_leaving_a_with_block_closes() -> None:
    with loader_of() as loader:
        next(loader)
    assert list(loader) == []


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
    seen = [SeenBatch.of(batch, loader) for batch in loader]
    assert members_by_step([seen]) == {c.step: m for c, m in STREAM.steps() if c.step >= 1}
    assert [b["info"].step for b in loader] == [3, 3, 4, 4, 5, 5]


def test_another_state_is_refused_by_every_graph() -> None:
    with loader_of() as loader:
        state = {**loader.state_dict(), "seed": 2}
        with pytest.raises(StateMismatch, match="seed=2"):
            loader.load_state_dict(state)
