"""Produces ahead in one background thread, so that the next window is ready before the step needs it."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from evenstep.cursor import find_cursor
from evenstep.nodes.epoch_after import epoch_after
from evenstep.nodes.producer import Produced, Producer
from evenstep.nodes.spans import in_span
from evenstep.nodes.stage import Stage, met_again

__all__ = ["HostPrefetch", "is_boundary"]

T = TypeVar("T")
_WITHOUT_WINDOWS = 2  # items ahead where the source's state shows no windows


class HostPrefetch(Stage[T, T]):
    """Hands out the source's items, produced ahead.

    The state of each item is kept beside it: taking the state never waits and never shows how far ahead the
    thread is. An error appears after the items before it, as the original exception object.

    Args:
        source: Anything; only the thread calls it.
        depth: Items produced ahead; None: the whole next window, that is up to the second window boundary ahead.
    """

    shown_as = "wait"

    def __init__(self, source: BaseNode[T], depth: int | None = None) -> None:
        super().__init__(source)
        if depth is not None and (
            isinstance(depth, bool) or not isinstance(depth, (int, np.integer)) or depth < 1
        ):
            raise ValueError(f"depth={depth!r}, expected a number of items >= 1, or None for the next window")
        self.depth = depth
        self._producer = self._make_producer(source, _room(depth))
        # Also runs at interpreter exit, before the finalizers of what upstream was built on. Its reference is weak:
        # the source may hold an exception, that the frames of a loop, and those this node. A live thread holds on.
        self._finalizer = weakref.finalize(self, _close, weakref.ref(self._producer))
        self._state: dict[str, Any] | None = None
        self._ahead = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last item handed out, however far the thread was."""
        with self._turn.reset():
            BaseNode.reset(self, initial_state)
            handed_out, ahead, source = self._state, self._ahead, self.source
            states: list[Any] = []

            def move() -> None:
                for state in epoch_after(handed_out) if initial_state is None and ahead else (initial_state,):
                    source.reset(state)
                states.append(copy.deepcopy(source.state_dict()))

            self._producer.call(move)
            self._state, self._ahead, self._stopped = states[0], False, None

    def get_state(self) -> dict[str, Any]:
        """The source's state at the last item handed out."""
        assert self._state is not None
        return self._state

    @in_span
    def next(self) -> T:
        """The next item; an error or an end, once met, is met again until `reset`.

        An interrupt (Ctrl-C) while it waits loses nothing: call it again.
        """
        return self._turn.pull(self._next)

    def _next(self) -> T:
        if self._stopped is not None:
            raise self._stopped
        try:
            self.start()
            produced = self._producer.get()
            if produced.error is None:
                self._state = produced.state
        except BaseException as error:
            self._stopped = None if isinstance(error, Exception) else met_again(error)
            raise
        if produced.error is not None:
            raise produced.error  # it stays in the queue; an end is a new one each time
        item: T = produced.item
        return item

    def start(self) -> None:
        """Begin to produce, without waiting."""
        self._ahead = True
        self._producer.start()

    def ready(self) -> bool:
        """Whether an item, an end or an error can be had without waiting."""
        return self._producer.ready()

    def wait(self) -> None:
        """Wait until everything that may be produced ahead has been."""
        self._producer.settle()

    def _make_producer(self, source: BaseNode[T], has_room: Callable[[deque[Produced]], bool]) -> Producer:
        return Producer(source, has_room, is_boundary)

    def close(self) -> None:
        """Leave the stream and end the thread, within seconds. Idempotent; raises nothing undelivered."""
        self._finalizer()


def _close(producer: weakref.ref[Producer]) -> None:
    alive = producer()
    if alive is not None:
        alive.close()


def _room(depth: int | None) -> Callable[[deque[Produced]], bool]:
    if depth is not None:
        return lambda queue: len(queue) < depth
    return _room_for_windows


def _room_for_windows(queue: deque[Produced]) -> bool:
    """Until the end of the window after the one under way is in the queue."""
    return sum(produced.boundary for produced in queue) < _WITHOUT_WINDOWS


def is_boundary(state: Any) -> bool:
    """Whether no plan is under way; a source without a cursor counts every item as a window."""
    try:
        return not find_cursor(state).get("plan", 0)
    except (ValueError, AttributeError):
        return True
