"""Where a worker thread hands over its collectives, because the training thread has to start them.

NCCL and HCCL run the collectives of a process in the order in which one thread starts them; started by several
threads, the ranks' orders differ sooner or later, and all hang. So the worker that reads, plans and packs brings each
collective here and waits; the training thread starts it when it passes by, without waiting for it to finish, and the
worker awaits the result.

```
 worker     read ── gather ............ decode ── plan ── broadcast ............ decode ── ...
                       |  |                                   |  |
 training   forward ── start it ── backward ── ... ────────── start it ── ...
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["PAYLOAD", "LaunchDesk"]

PAYLOAD = "all_to_all"  # the collective that carries samples; all others are small


class _Launch:
    """A collective that waits to be started."""

    __slots__ = ("done", "error", "name", "start", "work")

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self.start = start
        self.done = False
        self.work: Any = None
        self.error: BaseException | None = None


class LaunchDesk:
    """Passes on the collectives of one worker thread, one at a time, in its order.

    The order is the worker's program, which is the same on every rank; only the moment depends on when the training
    thread comes by. So ranks whose training threads come by at different moments never start different collectives.

    Attributes:
        worker: The thread whose collectives wait here.
        scope: Makes the context in which they are started (a stream, on an accelerator).

    Args:
        changed: Guards the desk, and is notified of everything that happens at it.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.worker: threading.Thread | None = None
        self.scope: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._changed = changed
        self._waiting: _Launch | None = None
        self._unattended = False

    def __call__(self, name: str, start: Callable[[], Any]) -> Any:
        """What ``start`` returns, called by the training thread; here, if this is not the worker.

        Raises:
            BaseException: What ``start`` raised.
        """
        if threading.current_thread() is not self.worker:
            return start()
        launch = _Launch(name, start)
        with self._changed:
            self._waiting = launch
            self._changed.notify_all()
            while not launch.done:
                if self._unattended:
                    self.serve()
                else:
                    self._changed.wait()
        if launch.error is not None:
            raise launch.error
        return launch.work

    @property
    def waiting(self) -> str | None:
        """Name of the collective that waits to be started."""
        return None if self._waiting is None else self._waiting.name

    def serve(self) -> bool:
        """Start the collective that waits; the lock is held. Returns whether one did."""
        launch = self._waiting
        if launch is None:
            return False
        self._waiting = None
        try:
            with self.scope():
                launch.work = launch.start()
        except BaseException as error:
            launch.error = error
            if not isinstance(error, Exception):
                raise  # Ctrl-C is meant for this thread; the worker hears of it too
        finally:
            launch.done = True
            self._changed.notify_all()
        return True

    def attend(self) -> None:
        """From now on the training thread comes by."""
        self._unattended = False

    def leave_alone(self) -> None:
        """The training thread may not come by any more: the worker starts what it still has to say."""
        with self._changed:
            self._unattended = True
            self._changed.notify_all()
