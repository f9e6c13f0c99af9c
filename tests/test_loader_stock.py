"""What goes wrong at the loop's end of a graph under the stock Loader, and goes right under ours: on the same graph."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torchdata.nodes as tn

from evenstep import DataPlane, Loader
from evenstep.nodes import HostPrefetch
from evenstep.testing.jobs import Layout, Stream

STREAM = Stream(kind="step", lengths=(3, 5, 2, 7, 1, 4, 6, 2), rows=2, seed=1)

# Collected on one of its own threads, a stock prefetcher tries to join it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a test leaves of the stock nodes goes now, not in the middle of another module."""
    yield
    gc.collect()


def graph(prefetch: int = 0, **arguments: Any) -> tn.BaseNode[Any]:
    layout = Layout(options={"host_prefetch": prefetch, "resume": "micro_batch"})
    return layout.loader(STREAM, DataPlane.single(), **arguments).root


def stock(**arguments: Any) -> Any:
    return tn.Loader(graph(**arguments))


def ours(**arguments: Any) -> Loader[Any]:
    return Loader(graph(**arguments))


def place(batch: Batch) -> int:
    """Micro-batches before this one since the start of training."""
    return int(batch["info"].step * 2 + batch["info"].micro_batch)


def places(batches: Any) -> list[int]:
    return [place(batch) for batch in batches]


def take(iterator: Iterator[Any], count: int) -> list[int]:
    return [place(next(iterator)) for _ in range(count)]


def state_after(loader: Any, count: int) -> dict[str, Any]:
    iterator = iter(loader)
    take(iterator, count)
    state: dict[str, Any] = loader.state_dict()
    return state


def test_a_state_loaded_after_one_was_asked_for_is_not_lost() -> None:
    """torch.distributed.checkpoint asks for a state to fill before it loads."""
    state = state_after(stock(), 3)
    theirs = stock()
    theirs.state_dict()
    theirs.load_state_dict(state)
    assert places(theirs) == [0, 1, 2, 3, 4, 5, 6, 7]

    state = state_after(ours(), 3)
    loader = ours()
    loader.state_dict()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert places(loader) == [3, 4, 5, 6, 7]


def test_the_state_moves_on_after_a_restore_at_the_end_of_an_epoch() -> None:
    state = state_after(stock(), 8)
    theirs = stock()
    theirs.load_state_dict(state)
    iterator = iter(theirs)
    take(iterator, 1)
    frozen = copy.deepcopy(theirs.state_dict())
    take(iterator, 2)
    assert theirs.state_dict() == frozen

    state = state_after(ours(), 8)
    loader = ours()
    loader.load_state_dict(state)
    assert places(loader) == []  # the end that was restored
    assert take(iter(loader), 3) == [8, 9, 10]
    middle = loader.state_dict()
    assert (middle["epoch"], middle["step"], middle["micro_batch"]) == (1, 5, 1)
    again = ours()
    again.load_state_dict(middle)
    assert places(again) == [11, 12, 13, 14, 15]


def test_none_is_an_item() -> None:
    def nothing(batch: Batch) -> Batch | None:
        return None if place(batch) == 3 else batch

    def mapped() -> tn.BaseNode[Any]:
        return tn.Mapper(graph(), nothing)

    theirs: Any = tn.Loader(mapped())
    state = state_after(theirs, 3)
    theirs = tn.Loader(mapped())
    theirs.load_state_dict(state)
    # Taken for the end of the epoch, and another one is begun.
    assert [None if batch is None else place(batch) for batch in theirs] != [None, 4, 5, 6, 7]

    loader = Loader(mapped())
    state = state_after(loader, 3)
    loader = Loader(mapped())
    loader.load_state_dict(state)
    assert [None if batch is None else place(batch) for batch in loader] == [None, 4, 5, 6, 7]


def test_a_state_counts_what_was_delivered() -> None:
    theirs = stock()
    uninterrupted = state_after(theirs, 4)
    state = state_after(stock(), 3)
    theirs = stock()
    theirs.load_state_dict(state)
    take(iter(theirs), 1)
    assert theirs.state_dict()["num_yielded"] == uninterrupted["num_yielded"] + 1

    uninterrupted = state_after(ours(), 4)
    loader = ours()
    loader.load_state_dict(state_after(ours(), 3))
    take(iter(loader), 1)
    assert loader.state_dict() == uninterrupted


def test_a_loader_in_use_can_be_brought_elsewhere() -> None:
    """A second resume of the same object: what a trainer does after a bad loss."""
    theirs = stock()
    iterator = iter(theirs)
    take(iterator, 2)
    state = theirs.state_dict()
    take(iterator, 5)
    theirs.load_state_dict(state)
    assert theirs.state_dict() != state  # who saves now saves the position that was left
    assert take(iterator, 1) == [7]

    loader = ours()
    state = state_after(loader, 2)
    take(loader, 5)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert take(loader, 2) == [2, 3]
    loader.load_state_dict(state)
    assert places(loader) == [2, 3, 4, 5, 6, 7]


class Counter(tn.BaseNode[int]):
    """A source that hands out the dictionary it counts in, as many do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
        self.state = {"consumed_samples": 0}
        self.read = threading.Event()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.state = {"consumed_samples": 0 if initial_state is None else initial_state["consumed_samples"]}

    def next(self) -> int:
        if self.state["consumed_samples"] == 20:
            raise StopIteration
        self.state["consumed_samples"] += 1
        if self.state["consumed_samples"] == 4:
            self.read.set()
        return self.state["consumed_samples"] - 1

    def get_state(self) -> dict[str, Any]:
        return self.state


def test_a_prefetcher_that_runs_ahead_does_not_move_the_state() -> None:
    source = Counter()
    theirs: Any = tn.Loader(tn.Prefetcher(source, 4))
    assert next(iter(theirs)) == 0
    assert source.read.wait(10)
    assert theirs.state_dict()["root"]["snapshot"] != {"consumed_samples": 1}

    source = Counter()
    prefetch = HostPrefetch(source, 4)
    loader = Loader(prefetch)
    assert next(loader) == 0
    assert source.read.wait(10)
    assert loader.state_dict() == {"consumed_samples": 1}
    loader.close()


def test_asking_for_the_state_starts_nothing() -> None:
    class Noting:
        def __init__(self) -> None:
            self.read = threading.Event()

        def __len__(self) -> int:
            return len(STREAM)

        def __getitem__(self, index: int) -> dict[str, int]:
            self.read.set()
            return STREAM[index]

    stock = Noting()
    theirs: Any = tn.Loader(tn.Prefetcher(graph(dataset=stock), 2))
    theirs.state_dict()
    assert stock.read.wait(10)

    # The thread that the stock loader started may live on: it reads another dataset.
    noting = Noting()
    threads = set(threading.enumerate())
    loader = ours(prefetch=2, dataset=noting)
    assert loader.state_dict() == loader.state_dict()
    assert len(loader) == 8
    assert loader.step == 0
    assert set(threading.enumerate()) <= threads
    assert not noting.read.is_set()
    assert places(loader) == [0, 1, 2, 3, 4, 5, 6, 7]
    loader.close()


def test_len_is_exact_and_moves_nothing() -> None:
    with pytest.raises(TypeError):
        len(stock())
    loader = ours()
    seen = []
    for batch in loader:
        assert len(loader) == 8
        seen.append(place(batch))
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


def test_breaking_out_of_an_epoch_loses_nothing() -> None:
    theirs = stock()
    for batch in theirs:
        if place(batch) == 2:
            break
    assert places(theirs) != [3, 4, 5, 6, 7]  # begins another epoch

    loader = ours(prefetch=2)
    for batch in loader:
        if place(batch) == 2:
            break
    assert places(loader) == [3, 4, 5, 6, 7]
    loader.close()


def test_an_error_stays_raised() -> None:
    def failing(batch: Batch) -> Batch:
        if place(batch) == 2:
            raise OSError("broken")
        return batch

    theirs = iter(tn.Loader(tn.Mapper(graph(), failing)))
    assert take(theirs, 2) == [0, 1]
    with pytest.raises(OSError, match="broken"):
        next(theirs)
    assert take(theirs, 1) == [3]  # as if nothing had been there

    loader = Loader(tn.Mapper(graph(), failing))
    assert take(loader, 2) == [0, 1]
    errors = []
    for _ in range(3):
        with pytest.raises(OSError, match="broken") as caught:
            next(iter(loader))
        errors.append(caught.value)
    assert errors[0] is errors[1] is errors[2]


def test_ten_thousand_abandoned_iterators_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    theirs: Any = tn.Loader(tn.Prefetcher(graph(), 2))
    for _ in range(5):
        next(iter(theirs))
    assert len(started) >= 5  # a thread for each
    del theirs
    gc.collect()

    started.clear()
    loader = ours(prefetch=2)
    seen = [place(next(iter(loader))) for _ in range(8)]
    for _ in range(10_000):
        iter(loader)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]
    assert started == ["evenstep-prefetch-rank0"]
    thread = next(t for t in threading.enumerate() if t.name == "evenstep-prefetch-rank0")
    del loader
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_our_graph_under_the_stock_loader_gives_the_same_batches_and_its_states_load() -> None:
    theirs = stock()
    assert places(theirs) == places(ours())
    state = state_after(stock(), 3)
    assert set(state) == {"root", "num_yielded"}
    loader = ours()
    loader.load_state_dict(state)
    assert loader.state_dict() == state["root"]
    assert places(loader) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "behind",
    [
        lambda node: tn.Mapper(node, lambda batch: batch),
        lambda node: tn.Prefetcher(node, 2),
        lambda node: tn.Prefetcher(tn.Mapper(node, lambda batch: batch), 2),
        lambda node: tn.Prefetcher(node, 2, snapshot_frequency=3),
    ],
    ids=["mapper", "prefetcher", "both", "rare snapshots"],
)
def test_stock_nodes_behind_ours_keep_the_position(behind: Any) -> None:
    for cut in range(9):
        loader = Loader(behind(graph()))
        state = state_after(loader, cut)
        again = Loader(behind(graph()))
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert places(again) == list(range(cut, 8)), cut


def test_a_state_moves_between_graphs_of_another_shape() -> None:
    shapes: list[Callable[[], tn.BaseNode[Any]]] = [
        graph,
        lambda: graph(prefetch=2),
        lambda: tn.Prefetcher(tn.Mapper(graph(), lambda b: b), 2),
    ]
    for save in shapes:
        state = state_after(Loader(save()), 3)
        for load in shapes:
            loader = Loader(load())
            loader.load_state_dict(state)
            assert places(loader) == [3, 4, 5, 6, 7]
            loader.close()


def test_a_cursor_replaces_what_a_stock_node_has_counted_since_its_last_snapshot() -> None:
    loader = Loader(tn.Prefetcher(graph(), 2, snapshot_frequency=4))
    cursor = state_after(ours(), 1)
    take(loader, 6)
    loader.load_state_dict(cursor)
    assert places(loader) == [1, 2, 3, 4, 5, 6, 7]


def test_nodes_that_change_the_number_of_items_have_no_length() -> None:
    loader = Loader(tn.Batcher(graph(), 2))
    with pytest.raises(
        TypeError, match=f"^{re.escape('how many batches Batcher makes of an epoch is not known')}$"
    ):
        len(loader)
    assert len(Loader(tn.Prefetcher(tn.Mapper(graph(), lambda b: b), 2))) == 8
