"""Collectives that the training thread starts, at whatever places of its loop, give what the producer gives."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import Cursor, DataPlane, Loader, LoaderConfig, RemoteRankError, StepSampler, build_loader
from evenstep.comm.simulated import SimulatedGroup
from evenstep.nodes import CallerPrefetch, HostPrefetch
from evenstep.nodes.stage import upstream
from evenstep.testing import SimulatedWorld
from evenstep.testing.jobs import Layout, Seen, Stream, layouts, streams

STREAM = Stream(kind="step", lengths=tuple(1 + (7 * i) % 20 for i in range(48)), rows=8, seed=3)
OPTIONS = {"micro_batch_size": 1, "balance_window": 2, "collectives": "caller"}

Meet = Callable[[], Any]


class Hooks:
    """Calls the hooks at places of a loop that differ from rank to rank."""

    def __init__(self, loader: Loader[Any], seed: int) -> None:
        self.calls = [loader.prefetch_plan, loader.prefetch]
        self.random = random.Random(seed)

    def maybe(self) -> None:
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 5])):
            self.random.choice(self.calls)()
            if self.random.random() < 0.3:
                time.sleep(0.0002)  # as a training step would, so that the thread gets somewhere


def train(loader: Loader[Any], seed: int, meet: Meet, batches: int | None = None) -> list[Seen]:
    """An epoch, or the next ``batches`` of it, with a collective of the training step in every step."""
    hooks, seen = Hooks(loader, seed), []
    for batch in loader:
        seen.append(Seen.of(batch, loader))
        hooks.maybe()
        meet()
        hooks.maybe()
        if len(seen) == batches:
            break
    return seen


def nodes_of(loader: Loader[Any], kind: type[Any]) -> list[Any]:
    return [node for node in upstream(loader.root) if isinstance(node, kind)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Stream, Layout, list[int]]:
    """A job whose collectives the training threads start, and a seed for the hooks of each rank."""
    stream = draw(streams())
    ahead = draw(st.sampled_from([None, None, 1, 3]))
    layout = draw(
        layouts(
            stream, dp_sizes=(1, 2, 3, 4), tp_sizes=(1, 1, 2), collectives="caller", host_prefetch=[ahead]
        )
    )
    size = layout.dp * layout.tp
    return stream, layout, draw(st.lists(st.integers(0, 2**32), min_size=size, max_size=size))


def by_producer(layout: Layout) -> Layout:
    return Layout(
        dp=layout.dp,
        tp=layout.tp,
        known=layout.known,
        everybody_reads=layout.everybody_reads,
        options={**layout.options, "collectives": "producer"},
    )


@settings(max_examples=20)
@given(jobs())
def test_batches_and_states_are_those_of_the_producer_wherever_the_hooks_are(
    job: tuple[Stream, Layout, list[int]],
) -> None:
    stream, layout, seeds = job

    def epochs(plane: DataPlane, layout: Layout, meet: Meet) -> list[list[Seen]]:
        with layout.loader(stream, plane) as loader:
            seed = seeds[plane.topology.rank]
            return [train(loader, seed, meet), train(loader, seed + 1, meet)]

    world = layout.world()
    expected = world.run(epochs, by_producer(layout), lambda: None)
    assert world.run(epochs, layout, threading.Barrier(world.size, timeout=20).wait) == expected


@settings(max_examples=20)
@given(jobs(), st.integers(1, 6), st.integers(1, 6))
def test_a_state_loaded_in_the_middle_gives_the_same_rest(
    job: tuple[Stream, Layout, list[int]], first: int, second: int
) -> None:
    """Some ranks have posted more than others when they leave one stream for another."""
    stream, layout, seeds = job
    if stream.kind != "auto":
        layout.options["resume"] = "micro_batch"  # type: ignore[index]  # a dict

    def back_and_forth(plane: DataPlane, layout: Layout, meet: Meet) -> list[list[Seen]]:
        with layout.loader(stream, plane) as loader:
            seed = seeds[plane.topology.rank]
            runs = [train(loader, seed, meet, first)]
            state = loader.state_dict()
            runs.append(train(loader, seed + 1, meet, second))
            loader.load_state_dict(state)
            runs.append(train(loader, seed + 2, meet, second))
            return runs

    world = layout.world()
    expected = world.run(back_and_forth, by_producer(layout), lambda: None)
    assert world.run(back_and_forth, layout, threading.Barrier(world.size, timeout=20).wait) == expected
    if stream.kind != "auto":
        last = Cursor.from_dict(expected[0][0][-1].state)
        if (
            last.micro_batch or stream.sampler().step_at(last) is not None
        ):  # else the loop has gone on to an epoch
            assert all(runs[1] == runs[2] for runs in expected)


def test_only_the_training_thread_starts_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, set[str]] = {}
    bring = SimulatedGroup.bring

    def watched(self: SimulatedGroup, turn: int, position: int, kind: str, value: Any) -> None:
        started.setdefault(f"rank{self.ranks[position]}", set()).add(threading.current_thread().name)
        bring(self, turn, position, kind, value)

    monkeypatch.setattr(SimulatedGroup, "bring", watched)
    layout = Layout(dp=2, options=OPTIONS)

    def run(plane: DataPlane) -> int:
        with layout.loader(STREAM, plane) as loader:
            train(loader, plane.topology.rank, lambda: None)
            return len(train(loader, plane.topology.rank, lambda: None, 3))

    layout.world().run(run)
    assert started == {"rank0": {"rank0"}, "rank1": {"rank1"}}


class Counted:
    """How many collectives each rank has started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, int] = {}
        self.payload: dict[int, int] = {}
        bring = SimulatedGroup.bring

        def counted(group: SimulatedGroup, turn: int, position: int, kind: str, value: Any) -> None:
            rank = group.ranks[position]
            self.of[rank] = self.of.get(rank, 0) + 1
            self.payload[rank] = self.payload.get(rank, 0) + (kind == "all_to_all")
            bring(group, turn, position, kind, value)

        monkeypatch.setattr(SimulatedGroup, "bring", counted)


def test_hooks_before_the_first_batch_of_a_stream_post_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    layout = Layout(dp=2, options=OPTIONS)

    def run(plane: DataPlane) -> list[int]:
        loader, rank, counts = layout.loader(STREAM, plane), plane.topology.rank, []

        def count_hooks() -> None:
            before = counted.of[rank]
            for hook in (loader.prefetch_plan, loader.prefetch) * 3:
                hook()
                time.sleep(0.005)
            counts.append(counted.of[rank] - before)

        count_hooks()
        list(loader)
        iter(loader)
        count_hooks()
        loader.close()
        count_hooks()
        return counts

    assert layout.world().run(run) == [[0, 0, 0], [0, 0, 0]]


def test_the_hooks_do_all_the_work_of_a_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`next` starts nothing for a batch that the hooks have prepared; payload waits for `prefetch`."""
    counted = Counted(monkeypatch)
    layout = Layout(dp=2, options=OPTIONS)

    def run(plane: DataPlane) -> int:
        loader, rank = layout.loader(STREAM, plane), plane.topology.rank
        (node,) = nodes_of(loader, CallerPrefetch)
        for _ in range(4):
            before = counted.of[rank]
            ready = node.ready()
            next(loader)
            assert not ready or counted.of[rank] == before
            payload = counted.payload.get(rank, 0)
            for _ in range(20):
                loader.prefetch_plan()
                time.sleep(0.002)
            assert counted.payload.get(rank, 0) == payload
            limit = time.monotonic() + 20
            while not node.ready() and time.monotonic() < limit:
                loader.prefetch()
                time.sleep(0.002)
            assert node.ready()
        loader.close()
        return counted.payload[rank]

    assert min(layout.world().run(run)) > 0


@pytest.mark.parametrize("seed", range(4))
def test_in_lockstep_every_rank_starts_the_same_at_the_same_hook(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a rank's thread takes to read and pack."""
    counted = Counted(monkeypatch)

    def run(plane: DataPlane) -> list[int]:
        rng = random.Random(10 * seed + plane.topology.rank)

        class Slow:
            def __len__(self) -> int:
                return len(STREAM)

            def __getitem__(self, index: int) -> Any:
                time.sleep(rng.choice([0, 0, 0.002]))
                return STREAM[index]

        layout = Layout(dp=2, options={**OPTIONS, "host_prefetch": [None, 1, 3][seed % 3]})
        with layout.loader(STREAM, plane, dataset=Slow()) as loader:
            (node,) = nodes_of(loader, CallerPrefetch)
            node._lockstep, node._patience = True, 20.0
            counts = []
            for _ in loader:
                counts.append(counted.of[plane.topology.rank])
                for hook in (loader.prefetch_plan, loader.prefetch):
                    hook()
                    counts.append(counted.of[plane.topology.rank])
            return counts

    first, second = Layout(dp=2).world().run(run)
    assert first == second
    assert len(set(first)) > 10


def test_a_hook_waits_for_no_other_rank() -> None:
    layout = Layout(dp=2, options=OPTIONS)
    gone_ahead = threading.Event()

    def run(plane: DataPlane) -> float:
        longest = 0.0
        with layout.loader(STREAM, plane) as loader:
            next(loader)
            if plane.topology.rank == 0:
                for hook in (loader.prefetch_plan, loader.prefetch) * 10:
                    began = time.monotonic()
                    hook()
                    longest = max(longest, time.monotonic() - began)
                gone_ahead.set()
            else:
                assert gone_ahead.wait(20)
            for _ in loader:
                pass
        return longest

    assert max(layout.world().run(run)) < 1.0


def fail_at(stream: Stream, index: int) -> Any:
    class Failing:
        def __len__(self) -> int:
            return len(stream)

        def __getitem__(self, at: int) -> Any:
            if at == index:
                raise OSError(f"disk of {at}")
            return stream[at]

    return Failing()


@settings(max_examples=15)
@given(jobs(), st.data())
def test_an_error_is_raised_by_next_after_the_same_batch_as_by_the_producer(
    job: tuple[Stream, Layout, list[int]], data: st.DataObject
) -> None:
    stream, layout, seeds = job
    index = data.draw(st.sampled_from([index for _, members in stream.steps() for index in members]))

    def until_the_error(plane: DataPlane, layout: Layout) -> tuple[list[Seen], str, str]:
        loader, seen = layout.loader(stream, plane, dataset=fail_at(stream, index)), []
        hooks = Hooks(loader, seeds[plane.topology.rank])
        with loader:
            try:
                for batch in loader:
                    seen.append(Seen.of(batch, loader))
                    hooks.maybe()
            except Exception as error:
                hooks.maybe()
                with pytest.raises(type(error), match=re.escape(str(error))):
                    next(loader)
                return seen, type(error).__name__, str(error)
        raise AssertionError("the epoch ended without the sample")

    world = layout.world()
    expected = world.run(until_the_error, by_producer(layout))
    outcomes = world.run(until_the_error, layout)
    assert [told for _, *told in outcomes] == [told for _, *told in expected]
    if not layout.known:  # else the other ranks hear of it at their next header
        assert outcomes == expected


def test_a_loader_that_failed_tells_the_others_though_nobody_comes_by_any_more() -> None:
    """A pack that fails does so after the exchange; its rank keeps the loader and does something else."""
    layout = Layout(dp=2, options=OPTIONS)
    told = threading.Event()

    def run(plane: DataPlane) -> str:
        def pack(samples: list[Any], seq_len: int) -> dict[str, Any]:
            if plane.topology.rank == 1:
                raise ZeroDivisionError("pack divides by zero")
            return {"members": [sample["index"] for sample in samples]}

        loader = build_loader(
            STREAM,
            plane,
            layout.config(STREAM),
            sampler=STREAM.sampler(),
            metadata_fn=lambda sample: sample["length"],
            pack=pack,
            collate=lambda rows: {"rows": rows},
        )
        try:
            for _ in loader:
                pass
        except (ZeroDivisionError, RemoteRankError) as error:
            if plane.topology.rank == 0:
                told.set()
            assert told.wait(20)
            return f"{type(error).__name__}: {error}"
        return "end"

    first, second = layout.world().run(run)
    assert second == "ZeroDivisionError: pack divides by zero"
    assert first == (
        "RemoteRankError: rank 1 failed: ZeroDivisionError: pack divides by zero (every rank stops here; the traceback "
        "is on rank 1)"
    )


def test_the_others_hear_of_a_rank_that_closes_after_its_hooks_ran_ahead() -> None:
    layout = Layout(dp=2, options=OPTIONS)

    def run(plane: DataPlane) -> str:
        loader = layout.loader(STREAM, plane)
        next(loader)
        if plane.topology.rank == 0:
            Hooks(loader, 1).maybe()
            loader.prefetch()
            began = time.monotonic()
            loader.close()
            assert time.monotonic() - began < 4  # the other rank came by in its `next`
            return "closed"
        try:
            list(loader)
        except RemoteRankError as error:
            return str(error)
        finally:
            loader.close()
        return "end"

    first, second = layout.world().run(run)
    assert first == "closed"
    assert second.startswith("rank 0 left the loader before the end of the epoch")


def test_closing_gives_up_on_ranks_that_do_not_come() -> None:
    layout = Layout(dp=2, options=OPTIONS)
    closed = threading.Event()

    def run(plane: DataPlane) -> float:
        loader = layout.loader(STREAM, plane)
        next(loader)
        began = time.monotonic()
        if plane.topology.rank == 0:
            plane.close_grace = 0.3
            loader.close()
            closed.set()
        assert closed.wait(20)
        return time.monotonic() - began

    assert layout.world().run(run)[0] < 4


def test_waiting_for_prefetch_leaves_nothing_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    layout = Layout(dp=2, options={**OPTIONS, "host_prefetch": 3})

    def run(plane: DataPlane) -> tuple[int, int]:
        with layout.loader(STREAM, plane) as loader:
            next(loader)
            loader.wait_for_prefetch()
            before = counted.of[plane.topology.rank]
            loader.prefetch_plan()
            loader.prefetch()
            loader.wait_for_prefetch()
            (node,) = nodes_of(loader, CallerPrefetch)
            return counted.of[plane.topology.rank] - before, len(node._producer._queue)

    assert layout.world().run(run) == [(0, 3), (0, 3)]


def test_a_loader_that_nobody_holds_ends_its_thread() -> None:
    others = set(threading.enumerate())
    loader = Layout(options=OPTIONS).loader(STREAM, DataPlane.single())
    next(loader)
    loader.prefetch()
    (thread,) = set(threading.enumerate()) - others
    del loader
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_node_that_is_collected_on_its_own_thread_still_tells_the_others() -> None:
    layout = Layout(dp=2, options=OPTIONS)

    def run(plane: DataPlane) -> str:
        ends: list[Callable[[], Any]] = []

        class Collects:
            def __len__(self) -> int:
                return len(STREAM)

            def __getitem__(self, index: int) -> Any:
                if plane.topology.rank == 1 and len(ends) == 1:
                    ends.pop()()
                return STREAM[index]

        loader = layout.loader(STREAM, plane, dataset=Collects())
        next(loader)
        (node,) = nodes_of(loader, CallerPrefetch)
        if plane.topology.rank == 1:
            thread = node._producer._thread
            ends.append(node._finalizer)
            while ends:
                loader.prefetch()
                if ends and node.ready():
                    with suppress(RuntimeError):  # it has just been collected
                        next(node)
            thread.join(20)
            assert not thread.is_alive()
            return "collected"
        try:
            list(loader)
        except RemoteRankError as error:
            return str(error)
        return "end"

    first, second = layout.world().run(run)
    assert first.startswith("rank 1 left the loader before the end of the epoch")
    assert second == "collected"


DOCUMENTS = [{"input_ids": [1] * (1 + i % 5)} for i in range(16)]


def build(**options: Any) -> Loader[Any]:
    return build_loader(
        DOCUMENTS, None, LoaderConfig(seq_len=8, **options), sampler=StepSampler(16, global_batch_size=4)
    )


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, HostPrefetch),
        ({"collectives": "producer"}, HostPrefetch),
        ({"collectives": "caller"}, CallerPrefetch),
        ({"backend": "nccl"}, CallerPrefetch),
        ({"payload_backend": "hccl"}, CallerPrefetch),
        ({"backend": "nccl", "collectives": "caller"}, CallerPrefetch),
    ],
)
def test_the_backend_decides_who_starts_collectives(options: dict[str, Any], kind: type[Any]) -> None:
    with build(**options) as loader:
        (node,) = nodes_of(loader, HostPrefetch)
        assert type(node) is kind
        assert len(list(loader)) == len(loader)


def test_nothing_is_started_ahead_without_host_prefetch() -> None:
    with build(collectives="caller", host_prefetch=0) as loader:
        assert not nodes_of(loader, HostPrefetch)
        next(loader)
        loader.prefetch_plan()
        loader.prefetch()
        assert len(list(loader)) == len(loader) - 1


@pytest.mark.parametrize("field", ["backend", "payload_backend"])
def test_a_producer_of_accelerator_collectives_is_refused(field: str) -> None:
    message = (
        f"collectives='producer' with {field}='nccl': its collectives run in the order in which one thread starts them, "
        "and with the training step's beside them the ranks would hang. Choose collectives='auto' (or 'caller'), or "
        "the backend 'gloo'."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        build(**{field: "nccl", "collectives": "producer"})


def test_a_world_of_one_has_nothing_to_start() -> None:
    world = SimulatedWorld(1)
    layout = Layout(options=OPTIONS)
    (seen,) = world.run(lambda plane: train(layout.loader(STREAM, plane), 5, lambda: None))
    (expected,) = world.run(lambda plane: train(by_producer(layout).loader(STREAM, plane), 5, lambda: None))
    assert seen == expected
