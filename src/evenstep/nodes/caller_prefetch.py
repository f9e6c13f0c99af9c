"""Produces ahead where collectives must start from the training thread (NCCL, HCCL): the loop says when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from evenstep.device import DeviceLike, bind_thread, is_accelerator, streams_of
from evenstep.nodes.host_prefetch import HostPrefetch, is_boundary
from evenstep.nodes.launch_desk import PAYLOAD, LaunchDesk
from evenstep.nodes.producer import Produced, Producer
from evenstep.nodes.stage import upstream

__all__ = ["CallerPrefetch"]

T = TypeVar("T")
_PATIENCE = 0.001  # seconds, where nobody minds what another rank starts first
_LOCKSTEP_PATIENCE = 10.0  # seconds; it runs out only where ranks have their hooks at different places


class CallerPrefetch(HostPrefetch[T]):
    """`HostPrefetch` whose thread starts no collective: `prefetch_plan`, `prefetch` and `next` do, for it.

    The thread reads, plans, decodes and packs. Whenever it comes to a collective, it waits until the training thread
    passes by: in `prefetch_plan` (called once the forward pass is launched), which starts headers, columns and plans
    up to the next payload; in `prefetch` (once the backward pass is launched), which goes on to the next payload and
    starts that; and in `next`, which starts whatever its item still needs. The hooks are optional and harmless to
    repeat, and the order of the collectives is that of the stages, whoever starts them: ranks with their hooks at
    different places get the same items. A hook waits for nothing while the next item is there; while it is not, it
    waits for others at most ``patience`` seconds, so that none hangs. An end or an error that a hook meets is raised by
    `next`, in its turn.

    NCCL also wants collectives of different groups, the training step's among them, started in one order on every
    rank. So with an accelerator the hooks keep ``lockstep``: each waits until its part is done, and then what it has
    started does not depend on how fast the thread of a rank is, if all ranks have them at the same places.

    After an error was raised, the thread tells the other ranks by itself, since a loop that has failed passes by
    no more.

    Args:
        source: Anything; only the thread calls it.
        depth: As for `HostPrefetch`.
        device: Where the collectives' tensors are; on an accelerator the thread works on a stream of its own, and the
            collectives are started on it, so that they never wait for the training stream.
        lockstep: Whether a hook waits for the thread to come to a collective; None: on an accelerator.
        patience: Longest wait of a hook between two collectives, in seconds; None: 10 in lockstep, else 0.001.
    """

    def __init__(
        self,
        source: BaseNode[T],
        depth: int | None = None,
        *,
        device: DeviceLike = "cpu",
        lockstep: bool | None = None,
        patience: float | None = None,
    ) -> None:
        self._device = device
        super().__init__(source, depth)
        self._lockstep = is_accelerator(device) if lockstep is None else lockstep
        usual = _LOCKSTEP_PATIENCE if self._lockstep else _PATIENCE
        self._patience = usual if patience is None else patience

    def prefetch_plan(self) -> None:
        """Start what the next plan needs."""
        self._attend(payload=False)

    def prefetch(self) -> None:
        """Start the next payload, and what comes before it."""
        self._attend(payload=True)

    def _attend(self, *, payload: bool) -> None:
        if isinstance(self._producer, _CalledProducer):
            self._producer.attend(self._patience, payload=payload, wait=self._lockstep)

    def _make_producer(self, source: BaseNode[T], has_room: Callable[[deque[Produced]], bool]) -> Producer:
        producer = _CalledProducer(source, has_room, is_boundary, self._device)
        for node in upstream(source):
            plane = getattr(node, "plane", None)
            if plane is not None:
                plane.launch_through(producer.desk)
        return producer


class _CalledProducer(Producer):
    """A producer whose every wait serves the thread's collectives."""

    def __init__(
        self,
        source: BaseNode[Any],
        has_room: Callable[[deque[Produced]], bool],
        is_boundary: Callable[[Any], bool],
        device: DeviceLike,
    ) -> None:
        super().__init__(source, has_room, is_boundary)
        self.desk = LaunchDesk(self._changed)
        self._device = device
        self._ended = False

    def start(self) -> None:
        if self._thread is None and is_accelerator(self._device):
            self.desk.scope = _data_stream(self._device)
        super().start()

    def get(self) -> Produced:
        produced = super().get()
        if produced.error is not None and not isinstance(produced.error, StopIteration):
            self.desk.leave_alone()
        return produced

    def call(self, order: Callable[[], None]) -> None:
        self.desk.attend()
        super().call(order)

    def close(self, grace: float | None = None) -> None:
        if threading.current_thread() is self._thread:
            self.desk.leave_alone()  # the node was collected there, and nobody comes by any more
        super().close(grace)

    def attend(self, patience: float, *, payload: bool, wait: bool) -> None:
        """Start what the thread brings, until it brings payload (which is started, if it may be) or nothing any more.

        Args:
            patience: Seconds in which it must bring the next.
            payload: Whether payload may be started.
            wait: Whether to wait for the first one too, and also where the next item is there already.
        """
        deadline = time.monotonic() + (patience if wait else 0.0)
        with self._changed:
            while self.alive:
                brought = self.desk.waiting
                if brought is None:
                    left = deadline - time.monotonic()
                    # A later pass will do: the loop has better to do than wait.
                    in_time = not wait and self._queue
                    if left <= 0 or in_time or not self._at_work():
                        return
                    self._changed.wait(left)
                    continue
                if brought != PAYLOAD or payload:
                    self.desk.serve()
                if brought == PAYLOAD:
                    return
                deadline = time.monotonic() + patience

    def _pause(self, seconds: float | None = None) -> None:
        if not self.desk.serve():
            super()._pause(seconds)

    def _join(self, thread: threading.Thread, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._ended and (left := deadline - time.monotonic()) > 0:
                self._pause(left)
        super()._join(thread, max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        self.desk.worker, self._ended = threading.current_thread(), False
        bind_thread(self._device)
        try:
            with self.desk.scope():
                super()._run()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def _data_stream(device: DeviceLike) -> Callable[[], AbstractContextManager[Any]]:
    streams = streams_of(device)
    stream = streams.new_stream()
    return lambda: streams.on(stream)
