"""The turnstile of a node: one thread at a time is inside, and none that a reset has left behind gets in.

The threads of torchdata's nodes take items while another thread may reset their source, or leave: it waits for them for
half a second, and then goes on. But inside a node they talk to the other ranks, who count on every word of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from evenstep.comm.rounds import Rounds
from evenstep.nodes.stock_threads import is_stock_thread

__all__ = ["Turn"]

Out = TypeVar("Out")

_HEARS = 0.5  # seconds after which a waiting thread listens for Ctrl-C, on every platform


class Turn:
    """Lets one thread into a node; inside, that thread may come again.

    Args:
        rounds: The conversation that goes on inside, if any: it hears who is in there (see `Rounds.enter`).
    """

    def __init__(self, rounds: Rounds | None = None) -> None:
        self._rounds = rounds
        self._lock = threading.RLock()
        self._names = threading.Lock()  # of what follows; never held while somebody waits
        self._resets = 0
        self._last: weakref.ref[threading.Thread] | None = None  # who came last
        # torchdata's threads that have come, and those of them that belong to a stream that has been left.
        self._stock: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def pull(self, produce: Callable[[], Out]) -> Out:
        """``produce()``, in turn.

        Raises:
            RuntimeError: A reset in another thread has left the stream that this one wants an item of.
            Abandoned: This rank has left the others.
        """
        resets, thread = self._resets, self.note()
        with self._lock:
            if self._resets != resets or (self._left and thread in self._left):
                raise RuntimeError(
                    "a reset in another thread has left the stream that this thread reads: the next item is of another one"
                )
            if self._rounds is None:
                return produce()
            self._rounds.enter()
            try:
                return produce()
            finally:
                self._rounds.exit()

    @contextmanager
    def reset(self) -> Iterator[None]:
        """Reset the node inside: who is in there is waited for, and who is to come in gets nothing of the new stream."""
        while not self._lock.acquire(timeout=_HEARS):
            pass
        try:
            with self._names:
                self._left.update(self._stock)
                self._left.discard(threading.current_thread())
            yield
        finally:
            self._resets += 1
            self._lock.release()

    def note(self) -> threading.Thread:
        """The current thread, which is remembered: it reads the stream that is under way."""
        thread = threading.current_thread()
        if self._last is None or self._last() is not thread:
            with self._names:
                self._last = weakref.ref(thread)
                if is_stock_thread(thread):
                    self._stock.add(thread)
        return thread
