"""What a trace shows of the stages: each call is a span, with those of the stages it pulls from inside.

`torch.profiler` gets it as a ``record_function`` named ``evenstep.<stage>``, a `evenstep.Timeline` with the item that
the call returned. Where nobody watches, a call costs one more function call and two comparisons.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch.autograd.profiler as profiler

__all__ = ["Watched", "Watcher", "in_span", "watch"]

_Node = TypeVar("_Node", bound="Watched")
Out = TypeVar("Out")


class Watcher(Protocol):
    """Somebody who is told of every call of a stage."""

    def record(self, stage: str, begin: int, end: int, node: Watched | None, item: Any) -> None:
        """``stage`` worked from ``begin`` to ``end`` (`time.perf_counter_ns`) on ``item``; None if it raised."""


class Watched:
    """A node whose calls are spans.

    Attributes:
        shown_as: Name of its spans behind ``evenstep.``; empty: the name of the class.
        watcher: Who is told of them; None most of the time.
    """

    shown_as: str = ""
    watcher: Watcher | None = None


def watch(node: Watched, function: Callable[[], Out], stage: str = "") -> Out:
    """``function()``, as a span of ``stage`` (by default of ``node``) for whoever watches."""
    watcher = node.watcher
    # The flag of the process: `torch.profiler` sets it too. A record_function that nobody records costs a hundred
    # times as much as looking here.
    profiled = profiler._is_profiler_enabled
    if watcher is None and not profiled:
        return function()
    name = stage or node.shown_as or type(node).__name__
    with profiler.record_function(f"evenstep.{name}") if profiled else nullcontext():
        if watcher is None:
            return function()
        item, begin = None, time.perf_counter_ns()
        try:
            item = function()
            return item
        finally:
            watcher.record(name, begin, time.perf_counter_ns(), node, item)


def in_span(method: Callable[[_Node], Out]) -> Callable[[_Node], Out]:
    """``method``, each call of which is a span of its node."""

    @functools.wraps(method)
    def watched(self: _Node) -> Out:
        return watch(self, functools.partial(method, self))

    return watched
