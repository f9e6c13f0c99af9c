"""The background thread of `HostPrefetch`: drives everything upstream, and always ends.

The thread holds the source but not the node that owns it, so that an abandoned node can be collected, which
stops the thread. All collectives upstream run on it: production, the reset that leaves one stream for another,
and the last header on shutdown.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.comm.plane import CLOSE_GRACE, DataPlane
from evenstep.nodes.stage import nothing_lost, upstream

__all__ = ["Produced", "Producer"]

_PATIENCE = 2.0  # seconds that a thread gets to notice that it is to give up


class Produced:
    """One result of the source: an item with the state after it, or the error (an end is one) that stopped it."""

    __slots__ = ("boundary", "error", "item", "state")

    def __init__(self, item: Any, state: Any, error: BaseException | None, boundary: bool) -> None:
        self.item: Any = item
        self.state: Any = state
        self.error: BaseException | None = error
        self.boundary: bool = boundary


class Producer:
    """Runs a source ahead in one daemon thread.

    Args:
        source: What is driven; nobody else calls it while the thread lives.
        has_room: Given what is queued, whether another item may be produced.
        is_boundary: Whether a state lies between two windows.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        has_room: Callable[[deque[Produced]], bool],
        is_boundary: Callable[[Any], bool],
    ) -> None:
        self._source = source
        self._has_room = has_room
        self._is_boundary = is_boundary
        self._changed = threading.Condition()
        self._queue: deque[Produced] = deque()
        self._thread: threading.Thread | None = None
        self._running = False  # may produce
        self._busy = False  # is inside the source
        self._order: Callable[[], None] | None = None
        self._stop = False

    @property
    def alive(self) -> bool:
        """Whether the thread has been started and not stopped."""
        return self._thread is not None and not self._stop

    def start(self) -> None:
        """Produce, from now on; the thread is started by the first call."""
        if self._running and not self._stop:
            return  # and wake nobody
        with self._changed:
            if self._stop:
                raise RuntimeError("this prefetcher has been closed and gives no more items")
            self._running = not any(produced.error for produced in self._queue)
            if self._thread is None and self._running:
                rank = next((p.topology.rank for p in [self._plane()] if p is not None), 0)
                self._thread = threading.Thread(
                    target=self._run, name=f"evenstep-prefetch-rank{rank}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def get(self) -> Produced:
        """The next result, once there is one; an error stays in the queue."""
        with self._changed:
            while not self._queue:
                if self._stop:
                    raise RuntimeError("this prefetcher has been closed and gives no more items")
                self._pause()
            first = self._queue[0]
            if first.error is None:
                self._queue.popleft()
                if self._has_room(self._queue):
                    self._changed.notify_all()
            elif isinstance(first.error, StopIteration):
                # The traceback of one that is raised holds the frames of its loop, and with them the node whose
                # thread, waiting for the next epoch, holds this one.
                return Produced(first.item, first.state, StopIteration(), first.boundary)
            return first

    def ready(self) -> bool:
        """Whether `get` would not wait."""
        return bool(self._queue)

    def settle(self) -> None:
        """Wait until the thread has produced all it may."""
        with self._changed:
            while self.alive and self._at_work():
                self._pause()

    def call(self, order: Callable[[], None]) -> None:
        """Stop producing, drop what is queued, and run ``order`` on the thread; raises what it raises.

        Without a thread it runs here.
        """
        if not self.alive:
            self._queue.clear()
            order()
            return
        done = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                order()
            except BaseException as error:
                failure.append(error)
            finally:
                done.set()

        with self._changed:
            self._running = False
            self._order = run
            self._changed.notify_all()
            # A timeout lets the main thread hear Ctrl-C on every platform.
            while not done.is_set() and self._thread is not None and self._thread.is_alive():
                self._pause(0.5)
            self._queue.clear()
        if failure:
            raise failure[0]

    def close(self, grace: float | None = None) -> None:
        """Leave the other ranks properly, or without ceremony after ``grace`` seconds, and end the thread."""
        with self._changed:
            self._stop = True
            self._running = False
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        plane = self._plane()
        if grace is None:
            grace = CLOSE_GRACE if plane is None else plane.close_grace
        self._join(thread, grace)
        if thread.is_alive() and plane is not None:
            plane.abandon()
            self._join(thread, _PATIENCE)
        with self._changed:
            self._queue.clear()

    def _at_work(self) -> bool:
        """Whether the thread is inside the source or about to be; the lock is held."""
        return self._busy or (self._running and self._has_room(self._queue))

    def _pause(self, seconds: float | None = None) -> None:
        """Wait, at most ``seconds``, for the thread to do something; the lock is held."""
        try:
            self._changed.wait(seconds)
        except BaseException as error:  # Ctrl-C: only the thread takes anything from the source
            nothing_lost(error)
            raise

    def _join(self, thread: threading.Thread, seconds: float) -> None:
        """Wait, at most ``seconds``, for the thread to end."""
        thread.join(seconds)

    def _plane(self) -> DataPlane | None:
        planes = (getattr(node, "plane", None) for node in upstream(self._source))
        return next((plane for plane in planes if plane is not None), None)

    def _run(self) -> None:
        while self._turn():
            pass
        self._leave()

    def _turn(self) -> bool:
        """Follow an order or produce an item; whether there may be more to do."""
        with self._changed:
            while not (self._stop or self._order or (self._running and self._has_room(self._queue))):
                self._changed.wait()
            if self._stop:
                return False
            order, self._order = self._order, None
            self._busy = True
        if order is not None:
            order()
            result = None
        else:
            result = self._produce()
        with self._changed:
            self._busy = False
            if result is not None and not (self._order or self._stop):
                self._queue.append(result)
                self._running = self._running and result.error is None
            self._changed.notify_all()
        if result is None or result.error is None:
            return True
        self._leave()
        return isinstance(result.error, StopIteration) or not self._retire()

    def _retire(self) -> bool:
        """End the thread after an error, unless there is an order: see `get` for what it would hold for ever."""
        with self._changed:
            if self._order or self._stop:
                return False
            self._thread = None
            self._changed.notify_all()
            return True

    def _produce(self) -> Produced:
        try:
            item = next(self._source)
            state = copy.deepcopy(self._source.state_dict())  # some count in the dictionary they hand out
            return Produced(item, state, None, self._is_boundary(state))
        except BaseException as error:
            return Produced(None, None, error, True)

    def _leave(self) -> None:
        """Tell the other ranks that nothing more comes from here."""
        plane = self._plane()
        if plane is not None and plane.rounds is not None:
            plane.rounds.leave()
