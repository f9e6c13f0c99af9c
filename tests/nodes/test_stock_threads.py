"""torchdata's reading threads behind our collectives: every rank may leave its epoch wherever they have got to."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torchdata.nodes as tn
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import DataPlane, Loader
from evenstep.errors import RemoteRankError
from evenstep.nodes import HostPrefetch, Stage
from evenstep.testing.jobs import Layout, Stream

# Collected on one of its own threads, a stock prefetcher tries to join it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_LENGTHS = tuple(random.Random(0).choices(range(1, 9), k=72))
STREAM = Stream(kind="step", lengths=_LENGTHS, rows=12, seed=1)
KINDS = ("prefetcher", "mapper", "batches", "rare snapshots", "over ours", "below ours")
CLOSES_WITHIN = 4.0  # seconds; a rank that the others do not answer gives up after five

Place = tuple[int, int, list[list[int]]]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


class Plain(Stage[Any, Any]):
    """A stage of a user's own."""

    def produce(self) -> Any:
        return next(self.source)


def behind(kind: str, node: tn.BaseNode[Any], depth: int) -> tn.BaseNode[Any]:
    """A stock thread that reads ``node`` ahead."""
    if kind == "mapper":
        return tn.ParallelMapper(node, lambda batch: batch, num_workers=1 + depth // 2)
    if kind == "batches":
        return tn.ParallelMapper(node, lambda batch: batch, num_workers=1, prebatch=1 + depth // 2)
    if kind == "rare snapshots":
        return tn.Prefetcher(node, depth, snapshot_frequency=3)
    if kind == "over ours":
        return tn.Prefetcher(HostPrefetch(node, 1), depth)
    if kind == "below ours":
        return Plain(tn.Prefetcher(Plain(tn.Mapper(node, lambda batch: batch)), depth))
    return tn.Prefetcher(node, depth)


class Slow:
    """The stream's samples, each of which takes a while of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(STREAM)

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(self._random.random() * 0.002)
        return STREAM[index]


def place(batch: Any) -> Place:
    return batch["info"].step, batch["info"].micro_batch, batch["rows"]


@dataclass(frozen=True)
class Story:
    """What every rank does alike: so many batches, then back to an earlier state; at last it leaves where it is."""

    ranks: int
    known: bool
    kind: str
    depth: int
    takes: list[int]
    back: list[int]
    seed: int
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        options = {"host_prefetch": 0, "resume": "micro_batch"}
        object.__setattr__(self, "layout", Layout(dp=self.ranks, known=self.known, options=options))

    def graph(self, plane: DataPlane) -> tn.BaseNode[Any]:
        return self.layout.loader(STREAM, plane, dataset=Slow(self.seed + plane.topology.rank)).root

    def loader(self, plane: DataPlane) -> Loader[Any]:
        return Loader(behind(self.kind, self.graph(plane), self.depth))

    def model(self, plane: DataPlane) -> list[Place]:
        """Five epochs without a thread."""
        loader = self.layout.loader(STREAM, plane)
        return [place(batch) for _ in range(5) for batch in loader]

    def tell(self, plane: DataPlane) -> tuple[list[list[Place]], float]:
        """The batches between two loaded states, and how long it took to leave."""
        loader = self.loader(plane)
        wait = random.Random(self.seed - 1 - plane.topology.rank)
        states = [loader.state_dict()]
        seen: list[list[Place]] = []
        for count, back in zip(self.takes, [*self.back, 0], strict=True):
            seen.append([])
            while len(seen[-1]) < count:
                for batch in loader:  # an epoch's end is not counted
                    seen[-1].append(place(batch))
                    states.append(loader.state_dict())
                    time.sleep(wait.random() * 0.002)
                    if len(seen[-1]) == count:
                        break
            if len(seen) < len(self.takes):
                loader.load_state_dict(states[-1 - back % len(states)])
                states = states[: len(states) - back % len(states)]
        began = time.monotonic()
        loader.close()
        return seen, time.monotonic() - began


STORIES = st.builds(
    Story,
    ranks=st.sampled_from([2, 3, 4]),
    known=st.booleans(),
    kind=st.sampled_from(KINDS),
    depth=st.integers(1, 4),
    takes=st.tuples(*[st.integers(1, 30)] * 3).map(list),
    back=st.tuples(*[st.integers(0, 12)] * 2).map(list),
    seed=st.integers(0, 1000),
)


@settings(max_examples=8)
@given(STORIES)
def test_every_rank_gets_the_batches_of_a_loader_without_threads(story: Story) -> None:
    """Over epochs, wherever a state is loaded or the loader is left: windows of two streams never meet."""
    models = story.layout.world().run(story.model)
    for (seen, seconds), model in zip(story.layout.world().run(story.tell), models, strict=True):
        begin = 0
        for part, back in zip(seen, [*story.back, 0], strict=True):
            assert part == model[begin : begin + len(part)]
            begin += len(part)
            begin -= back % (begin + 1)
        assert seconds < CLOSES_WITHIN


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_before_the_others_is_one_clear_error_on_all_of_them(kind: str) -> None:
    def leaves(plane: DataPlane) -> int:
        story = Story(3, False, kind, 2, [], [], 0)
        taken = 0
        with story.loader(plane) as loader:
            for _ in loader:
                taken += 1
                if plane.topology.rank == 1 and taken == 5:
                    break
        return taken

    outcomes = Layout(dp=3).world().outcomes(leaves)
    assert outcomes[1] == 5
    told = "rank 1 left the loader before the end of the epoch (a break, close() or an exit); the remaining batches"
    for rank in (0, 2):
        assert type(outcomes[rank]) is RemoteRankError, outcomes[rank]
        assert told in str(outcomes[rank])


class Gate:
    """The stream's samples; the first of the third window is held back until the gate is opened."""

    def __init__(self, waits: bool) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self._waits = waits
        self._held = STREAM.sampler().start()
        step = STREAM.sampler().step_at(self._held)
        assert step is not None
        following = STREAM.sampler().step_at(step.next_cursor)
        assert following is not None
        self._members = set(following.indices.tolist())

    def __len__(self) -> int:
        return len(STREAM)

    def __getitem__(self, index: int) -> dict[str, int]:
        if index in self._members and self._waits:
            self.reached.set()
            assert self.opened.wait(20)
        return STREAM[index]


@pytest.mark.parametrize("slow", [{0}, {1}, {0, 1}])
def test_a_thread_that_reads_for_longer_than_torchdata_waits_takes_nothing_of_the_next_stream(
    slow: set[int],
) -> None:
    layout = Layout(dp=2, options={"host_prefetch": 0, "resume": "micro_batch"})

    def reads(plane: DataPlane) -> list[Place]:
        gate = Gate(plane.topology.rank in slow)
        loader = Loader(tn.Prefetcher(layout.loader(STREAM, plane, dataset=gate).root, 1))
        state = loader.state_dict()
        first = [place(next(loader)) for _ in range(6)]  # the whole first window
        if plane.topology.rank in slow:
            assert gate.reached.wait(10)
        threading.Timer(0.8, gate.opened.set).start()  # torchdata goes on after half a second
        loader.load_state_dict(state)
        again = [place(batch) for batch in loader]
        loader.close()
        assert first == again[:6]
        return again

    expected = layout.world().run(lambda plane: [place(b) for b in layout.loader(STREAM, plane)])
    assert layout.world().run(reads) == expected


def test_who_closes_waits_for_what_the_thread_reads_and_ends_it() -> None:
    layout = Layout(dp=2, options={"host_prefetch": 0, "resume": "micro_batch"})

    def closes(plane: DataPlane) -> tuple[bool, list[str]]:
        gate = Gate(waits=True)
        before = set(threading.enumerate())
        loader = Loader(tn.Prefetcher(layout.loader(STREAM, plane, dataset=gate).root, 1))
        for _ in range(6):
            next(loader)
        assert gate.reached.wait(10)
        mine = [
            t for t in set(threading.enumerate()) - before if getattr(t, "_target", None) is not None
        ]  # also of the other rank
        threading.Timer(0.8, gate.opened.set).start()
        loader.close()
        return gate.opened.is_set(), [t.name for t in mine if t.is_alive() and "populate" in t.name]

    assert layout.world().run(closes) == [(True, [])] * 2


def test_who_closes_waits_for_a_hung_thread_only_as_long_as_for_the_others() -> None:
    layout = Layout(dp=2, options={"host_prefetch": 0})

    def closes(plane: DataPlane) -> float:
        plane.close_grace = 0.2
        gate = Gate(waits=True)
        loader = Loader(tn.Prefetcher(layout.loader(STREAM, plane, dataset=gate).root, 1))
        for _ in range(6):
            next(loader)
        assert gate.reached.wait(10)
        began = time.monotonic()
        loader.close()
        seconds = time.monotonic() - began
        gate.opened.set()
        return seconds

    assert max(layout.world().run(closes)) < CLOSES_WITHIN


def test_a_plane_that_is_closed_under_the_stock_loader_waits_for_its_thread() -> None:
    for seed in range(5):
        story = Story(2, False, "prefetcher", 3, [], [], seed)

        def breaks(plane: DataPlane, story: Story = story) -> float:
            loader: Any = tn.Loader(behind("prefetcher", story.graph(plane), 3))
            taken = iter(loader)
            for _ in range(3 + story.seed):
                next(taken)
            began = time.monotonic()
            plane.close()
            return time.monotonic() - began

        assert max(story.layout.world().run(breaks)) < CLOSES_WITHIN


def test_a_users_own_thread_may_be_used_for_several_streams() -> None:
    """Only torchdata's are made anew for each stream."""
    node = Plain(tn.IterableWrapper(range(10)))
    node.reset(None)
    taken: list[Any] = []
    steps = [threading.Semaphore(0), threading.Semaphore(0)]

    def pulls() -> None:
        for _ in range(2):
            assert steps[0].acquire(timeout=10)
            taken.append(next(node))
            steps[1].release()

    thread = threading.Thread(target=pulls)
    thread.start()
    for _ in range(2):
        steps[0].release()
        assert steps[1].acquire(timeout=10)
        node.reset(None)
    thread.join(10)
    assert taken == [0, 0]


LEFT = "a reset in another thread has left the stream that this thread reads: the next item is of another one"


class Held(tn.BaseNode[int]):
    """Counts; its first item is held back until it may come."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
        self.count = 0
        self.inside, self.may_come = threading.Event(), threading.Event()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.count = 0

    def next(self) -> int:
        self.count += 1
        if not self.may_come.is_set():
            self.inside.set()
            assert self.may_come.wait(10)
        return self.count

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}


def test_a_thread_that_waits_for_its_turn_while_the_node_is_reset_gets_an_error() -> None:
    source = Held()
    node = Plain(source)
    node.reset(None)
    outcomes: dict[str, Any] = {}

    def ask(name: str) -> None:
        try:
            outcomes[name] = next(node)
        except Exception as error:
            outcomes[name] = error

    first = threading.Thread(target=ask, args=("first",))
    first.start()
    assert source.inside.wait(10)
    reset = threading.Thread(target=node.reset)
    reset.start()
    first_count = source.count
    time.sleep(0.05)
    assert source.count == first_count == 1  # the reset waits
    source.may_come.set()
    first.join(10)
    reset.join(10)
    assert outcomes == {"first": 1}
    assert next(node) == 1

    source.may_come.clear()
    with node._turn.reset():  # as if it took long
        late = threading.Thread(target=ask, args=("late",))
        late.start()
        time.sleep(0.05)
        node.reset(None)
    source.may_come.set()
    late.join(10)
    assert type(outcomes["late"]) is RuntimeError
    assert str(outcomes["late"]) == LEFT
    assert next(node) == 1


def test_a_stock_thread_that_comes_late_gets_nothing_of_the_next_stream() -> None:
    """One that its prefetcher has not stopped: a mapper's lives on where something holds its iterator."""
    node = Plain(tn.IterableWrapper(range(100)))
    old: Any = tn.ParallelMapper(node, lambda item: item, num_workers=1, max_concurrent=1)
    assert next(old) == 0
    node.reset(None)
    with pytest.raises(RuntimeError, match=re.escape(LEFT)):
        list(old)
    assert next(node) == 0
