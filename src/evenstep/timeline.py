"""When each stage of a loader worked, on every thread of a rank, as a file for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from evenstep.loader import Loader
from evenstep.nodes.items import GatheredWindow, Place, PlannedBatch, RoutedBatch, Window
from evenstep.nodes.planner import Planner
from evenstep.nodes.spans import Watched
from evenstep.nodes.stage import upstream
from evenstep.samples import BatchInfo

__all__ = ["Timeline"]


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    begin: int  # nanoseconds of time.perf_counter_ns
    end: int
    thread: int
    facts: dict[str, Any]


class Timeline:
    """Records the stages of a loader while it is open; each rank has its own.

    ::

        with Timeline(loader, "traces") as timeline:
            for batch in islice(loader, 20):
                with timeline.span("train"):
                    train(batch)

    A span holds those of the stages that it pulls from, and says which step and micro-batch it made and what was moved
    for it. Times are those of the wall clock, so that the files of several ranks fit together (`evenstep trace` merges
    them) as well as the clocks of their hosts do.

    Args:
        loader: What is watched; work under way when it begins is left out.
        folder: Where `close` writes ``rank-<rank>.json``; None: nothing is written.
        limit: Spans kept, the last ones; one takes about half a kilobyte.

    Attributes:
        rank: Rank of the loader, under which its spans are shown.

    Raises:
        ValueError: ``limit`` is not positive.
        RuntimeError: Another timeline watches the loader.
    """

    def __init__(
        self, loader: Loader[Any], folder: str | os.PathLike[str] | None = None, *, limit: int = 100_000
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit={limit!r}, expected a number of spans >= 1: nothing would be recorded")
        nodes = list(upstream(loader.root))
        planes = (getattr(node, "plane", None) for node in nodes)
        self.rank: int = next((plane.topology.rank for plane in planes if plane is not None), 0)
        self._folder = None if folder is None else Path(folder)
        self._spans: deque[_Span] = deque(maxlen=limit)
        self._threads: dict[int, str] = {}
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._nodes = [node for node in nodes if isinstance(node, Watched)]
        if any(node.watcher is not None for node in self._nodes):
            raise RuntimeError("another Timeline watches this loader: close that one first")
        for node in self._nodes:
            node.watcher = self

    def record(self, stage: str, begin: int, end: int, node: Watched | None, item: Any) -> None:
        """Keep a span of ``stage`` on the calling thread; called by the stages, from ``begin`` to ``end``.

        Args:
            stage: Its name.
            begin: `time.perf_counter_ns`.
            end: The same.
            node: Whose span it is; None: the loop's own.
            item: What it made; None if it raised.
        """
        thread = threading.current_thread()
        number = threading.get_native_id()
        self._threads[number] = "training loop" if thread is threading.main_thread() else thread.name
        facts = _facts(item)
        if isinstance(node, Planner) and isinstance(item, PlannedBatch):
            facts.update(_moved(node, item))
        self._spans.append(_Span(stage, begin, end, number, facts))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show what the loop itself does meanwhile, such as its forward pass."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(name, begin, time.perf_counter_ns(), None, None)

    def to_dict(self) -> dict[str, Any]:
        """The spans in Chrome's trace event format: microseconds since 1970, one process per rank."""
        rank = self.rank
        events: list[dict[str, Any]] = [
            _meta("process_name", rank, 0, name=f"rank {rank}"),
            _meta("process_sort_index", rank, 0, sort_index=rank),
            *(
                _meta("thread_name", rank, number, name=name)
                for number, name in sorted(self._threads.items())
            ),
        ]
        for span in sorted(self._spans, key=lambda span: (span.begin, -span.end)):
            events.append(
                {
                    "name": span.name,
                    "cat": "evenstep",
                    "ph": "X",
                    "ts": (span.begin + self._epoch) / 1000,
                    "dur": (span.end - span.begin) / 1000,
                    "pid": rank,
                    "tid": span.thread,
                    "args": span.facts,
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to ``path``, whose folder is made if need be."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.to_dict()))

    def close(self) -> None:
        """Stop watching, and write the file of this rank. Idempotent."""
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            node.watcher = None
        if nodes and self._folder is not None:
            self.save(self._folder / f"rank-{self.rank}.json")

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _meta(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}


def _facts(item: Any) -> dict[str, Any]:
    """Which micro-batch or window ``item`` is, and how large."""
    if isinstance(item, dict) and isinstance(item.get("info"), BatchInfo):
        item = item["info"]
    elif isinstance(item, RoutedBatch):
        item = item.info
    if isinstance(item, BatchInfo):
        facts = {"step": item.step, "micro_batch": item.micro_batch}
        return {**facts, "samples": item.num_samples, "tokens": item.num_tokens}
    if isinstance(item, PlannedBatch):
        place = item.window.place
        return {"step": place.start.step, "micro_batch": place.first + item.micro_batch}
    if isinstance(item, (Window, GatheredWindow)):
        return _window(item.place, len(item.columns), int(item.columns.tokens.sum()))
    return {}


def _window(place: Place, samples: int, tokens: int) -> dict[str, Any]:
    return {"step": place.start.step, "first_micro_batch": place.first, "samples": samples, "tokens": tokens}


def _moved(planner: Planner, batch: PlannedBatch) -> dict[str, Any]:
    """What the plan of a window brings, at its first micro-batch, on ranks that know the plan."""
    place = batch.window.place
    balance = next((b for b in reversed(planner.balances) if b.place is place), None)
    if balance is None or batch.micro_batch != place.skip:
        return {}
    return {
        "algorithm": balance.plan.decision.algorithm,
        "efficiency": balance.efficiency,
        "reference_efficiency": balance.reference_efficiency,
        "moved_samples": balance.moved_samples,
        "moved_tokens": balance.moved_tokens,
        "moved_bytes": balance.moved_bytes,
    }
