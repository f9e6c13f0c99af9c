"""Who leaves, fails or is forgotten while the training thread starts collectives is heard of, and no thread stays."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from evenstep import DataPlane, Loader, RemoteRankError, build_loader
from evenstep.nodes import CallerPrefetch
from evenstep.nodes.stage import upstream
from evenstep.testing.hooks import Hooks
from evenstep.testing.jobs import Layout, Stream

STREAM = Stream(kind="step", lengths=tuple(1 + (7 * i) % 20 for i in range(48)), rows=8, seed=3)
OPTIONS = {"micro_batch_size": 1, "balance_window": 2, "collectives": "caller"}


def nodes_of(loader: Loader[Any], kind: type[Any]) -> list[Any]:
    return [node for node in upstream(loader.root) if isinstance(node, kind)]


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
