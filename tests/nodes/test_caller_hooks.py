"""What a hook starts, in which thread, and how long it waits."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from evenstep import DataPlane, Loader
from evenstep.comm.simulated import SimulatedGroup
from evenstep.nodes import CallerPrefetch
from evenstep.nodes.stage import upstream
from evenstep.testing.hooks import train
from evenstep.testing.jobs import Layout, Stream

STREAM = Stream(kind="step", lengths=tuple(1 + (7 * i) % 20 for i in range(48)), rows=8, seed=3)
OPTIONS = {"micro_batch_size": 1, "balance_window": 2, "collectives": "caller"}


def nodes_of(loader: Loader[Any], kind: type[Any]) -> list[Any]:
    return [node for node in upstream(loader.root) if isinstance(node, kind)]


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


def test_a_hook_does_not_wait_while_the_next_batch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """However patient it is: a collective that another rank holds up is left to a later pass."""
    counted = Counted(monkeypatch)
    layout = Layout(dp=2, options={**OPTIONS, "host_prefetch": 4})
    gone_ahead = threading.Event()

    def run(plane: DataPlane) -> int:
        with layout.loader(STREAM, plane) as loader:
            (node,) = nodes_of(loader, CallerPrefetch)
            next(loader)
            next(loader)
            loader.wait_for_prefetch()
            next(loader)  # three are left, and what the thread brings is the header of the window behind them
            if plane.topology.rank == 0:
                node._patience = 60.0
                before, limit = counted.of[0], time.monotonic() + 20
                while counted.of[0] == before and time.monotonic() < limit:
                    loader.prefetch_plan()
                    loader.prefetch()
                    time.sleep(0.001)
                assert node.ready()
                assert counted.of[0] > before
                assert time.monotonic() < limit
                node._patience = 0.001
                gone_ahead.set()
            else:
                assert gone_ahead.wait(20)
            return sum(1 for _ in loader)

    first, second = layout.world().run(run)
    assert first == second > 2


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
