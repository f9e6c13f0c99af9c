"""Copy the next batches to the device while the training step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.device import (
    DeviceLike,
    Event,
    Stream,
    Streams,
    is_accelerator,
    record_batch,
    streams_of,
    to_device,
)
from evenstep.nodes.epoch_after import epoch_after
from evenstep.nodes.stage import Stage

__all__ = ["DevicePrefetch"]


@dataclass(slots=True)
class _Staged:
    """A batch on its way: its host side, its device side and the source's state after it."""

    host: Any
    batch: Any
    copied: Event
    state: dict[str, Any]


class DevicePrefetch(Stage[Any, Any]):
    """Batches of ``source`` on ``device``, copied ahead on one copy stream; on the CPU they pass through.

    It owns ``depth + 1`` device slots; the batch in use is one. A slot comes back when the device has passed
    the event that is recorded on the consumer's stream as the iterator advances. Between `next` calls it
    stages ahead only what is there: neither a host batch that is not ready (``source.ready()``, where the
    source has it) nor a slot in use is waited for. A batch that must be handed out while every slot is in use
    waits on the device, behind that event; the host waits for nothing but ``source``.

    Consume batches on the stream that is current when `next` is called (others must wait for that one). A
    batch that is kept stays valid. An end or an error met while staging ahead surfaces in its turn.

    Attributes:
        last_host_batch: The host side of the batch handed out last; None before the first.

    Args:
        source: Makes host batches, pinned for copies that overlap with compute.
        device: Where they go; an object with the methods of `evenstep.device.Streams` can stand in.
        depth: Batches to stage ahead; 0 copies each batch when it is asked for.
        cpu_fields: Paths of fields that stay on the host (``"labels"``, ``"vision.grid"``).

    Raises:
        ValueError: ``depth`` is negative.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        device: DeviceLike,
        depth: int = 1,
        *,
        cpu_fields: Collection[str] = (),
    ) -> None:
        super().__init__(source)
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(
                f"depth is {depth!r}: the number of batches staged ahead is an integer >= 0; 0 stages none, "
                "1 hides the copy behind one step"
            )
        self.last_host_batch: Any = None
        self._device = device
        self._depth = depth
        self._cpu_fields = frozenset(cpu_fields)
        self._streams: Streams | None = None
        self._copy_stream: Stream | None = None
        self._staged: deque[_Staged] = deque()
        self._failed: BaseException | None = None  # what the source answered behind the last staged batch
        self._in_use = False
        self._consumed: deque[Event] = deque()  # of slots whose consumer may still run on the device
        self._sources: deque[tuple[Event, Any]] = deque()  # host batches whose copy may still run
        self._handed_state: dict[str, Any] | None = None
        self._pulled_state: dict[str, Any] | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last batch handed out."""
        handed = self._handed_state
        ahead = handed is not None and handed is not self._pulled_state
        for state in epoch_after(handed) if initial_state is None and ahead else (initial_state,):
            super().reset(state)

    def clear(self) -> None:
        """Drop the batches staged for the stream that is left; their copies end in the background."""
        self._release_slot()
        for item in self._staged:
            self._sources.append((item.copied, item.host))
        self._staged.clear()
        self._failed = None
        self._handed_state = self._pulled_state = None
        self.last_host_batch = None

    def get_state(self) -> dict[str, Any]:
        """The source's state at the batch handed out last."""
        return super().get_state() if self._handed_state is None else self._handed_state

    def produce(self) -> Any:
        """The next batch, its copy ordered before whatever the caller launches next."""
        if not is_accelerator(self._device):
            self.last_host_batch = next(self.source)
            return self.last_host_batch
        streams = self._open()
        self._release_slot()
        if not self._staged and self._failed is None:
            self._stage(streams)
        if not self._staged:
            assert self._failed is not None
            raise self._failed
        item = self._staged.popleft()
        consumer = streams.current_stream()
        consumer.wait_event(item.copied)
        record_batch(item.batch, consumer, self._cpu_fields)
        self._sources.append((item.copied, item.host))
        self._in_use = True
        self.prefetch()
        self._handed_state, self.last_host_batch = item.state, item.host
        return item.batch

    def prefetch(self) -> None:
        """Stage ahead what is ready, without waiting; repeating it does no harm."""
        if not is_accelerator(self._device):
            return
        streams = self._open()
        ready = getattr(self.source, "ready", None)
        while (
            self._failed is None
            and len(self._staged) < self._depth
            and self._slot_is_free()
            and (ready is None or ready())
        ):
            self._stage(streams)

    def wait_for_prefetch(self) -> None:
        """Wait until every batch staged so far has arrived; nothing more is staged and nothing is dropped."""
        for item in self._staged:
            item.copied.synchronize()

    def close(self) -> None:
        """Drop what is staged and let go of the host memory that its copies read."""
        self.clear()
        for copied, _ in self._sources:
            copied.synchronize()
        self._sources.clear()
        self._consumed.clear()

    def _open(self) -> Streams:
        if self._streams is None:
            self._streams = streams_of(self._device)
            self._copy_stream = self._streams.new_stream()
        return self._streams

    def _release_slot(self) -> None:
        """The iterator advances: the slot in use comes back once the device is done with what was launched."""
        if not self._in_use:
            return
        assert self._streams is not None
        consumed = self._streams.new_event()
        consumed.record(self._streams.current_stream())
        self._consumed.append(consumed)
        self._in_use = False

    def _slot_is_free(self) -> bool:
        while self._consumed and self._consumed[0].query():
            self._consumed.popleft()
        return len(self._staged) + self._in_use + len(self._consumed) <= self._depth

    def _stage(self, streams: Streams) -> None:
        """Pull one batch and launch its copy."""
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        if self._handed_state is None:
            self._handed_state = self._pulled_state = self.source.state_dict()
        try:
            host = next(self.source)
            self._pulled_state = self.source.state_dict()
            self._launch(streams, host, self._pulled_state)
        except Exception as error:
            self._failed = error

    def _launch(self, streams: Streams, host: Any, state: dict[str, Any]) -> None:
        assert self._copy_stream is not None
        while not self._slot_is_free():
            self._copy_stream.wait_event(self._consumed.popleft())
        copied = streams.new_event()
        try:
            with streams.on(self._copy_stream):
                batch = to_device(host, streams.device, self._cpu_fields)
        except BaseException:
            copied.record(self._copy_stream)  # the leaves before the one that failed are still being read
            self._sources.append((copied, host))
            raise
        copied.record(self._copy_stream)
        self._staged.append(_Staged(host, batch, copied, state))
