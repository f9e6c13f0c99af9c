"""The loop's end of a graph as trainers use it: lengths, epochs, ends, states."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torchdata.nodes as tn

from evenstep import DataPlane, Loader
from evenstep.testing.jobs import Layout, Stream

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


def test_nobody_loops_over_a_closed_loader_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """As ``while loader.step < steps: for batch in loader`` would."""
    loader = loader_of()
    loader.close()
    assert [list(loader) for _ in range(8)] == [[]] * 8
    assert {record.getMessage() for record in caplog.records} == {
        "evenstep: a loop over a closed loader has no batches; build another one to train on"
    }
    with pytest.raises(RuntimeError, match=r"^this loader has been closed; build another one to train on$"):
        list(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_leaving_a_with_block_closes() -> None:
    with loader_of() as loader:
        next(loader)
    assert list(loader) == []
