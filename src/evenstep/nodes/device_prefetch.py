"""Copy the next batches to the device while the training step runs."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from evenstep.device import (
    DeviceLike,
    DeviceMemory,
    Event,
    Stream,
    Streams,
    is_accelerator,
    streams_of,
    to_device,
)
from evenstep.nodes.epoch_after import epoch_after
from evenstep.nodes.spans import in_span
from evenstep.nodes.stage import Stage, met_again

__all__ = ["DevicePrefetch"]


@dataclass(slots=True)
class _Staged:
    """A batch on its way: its host side, its device side and the source's state after it."""

    host: Any
    batch: Any
    copied: Event
    state: dict[str, Any]


@dataclass(slots=True)
class _Slot:
    """Device memory of a batch that was handed out, and the mark behind its consumer's work."""

    memory: DeviceMemory
    consumer: Stream
    consumed: Event | None = None


class _Books:
    """All that the device may still use, apart from the node, so that it can be given up when the node is gone."""

    def __init__(self) -> None:
        self.staged: deque[_Staged] = deque()
        self.sources: deque[tuple[Event, Any]] = deque()  # host batches whose copy may still run
        self.handed: deque[_Slot | None] = deque([None, None])  # the batch before, the batch in use
        self.slots: deque[_Slot] = (
            deque()
        )  # of batches before those, oldest first; their consumer may still run

    def occupied(self) -> int:
        return len(self.staged) + len(self.slots) + sum(slot is not None for slot in self.handed)

    def pop_slot(self) -> Event:
        """Free the oldest slot's memory; its next user must be ordered behind the event returned."""
        consumed = self.slots.popleft().consumed
        assert consumed is not None, "a slot is listed when its consumer has moved on"
        return consumed

    def leave(self) -> None:
        """Give everything up, at any time."""
        for slot in (*self.slots, *self.handed):
            if slot is not None:
                slot.memory.give_up(slot.consumer)
        for copied in [event for event, _ in self.sources] + [item.copied for item in self.staged]:
            copied.synchronize()
        self.staged.clear()
        self.sources.clear()
        self.slots.clear()
        self.handed = deque([None, None])


class DevicePrefetch(Stage[Any, Any]):
    """Batches of ``source`` on ``device``, copied ahead on one copy stream; on the CPU they pass through.

    It owns ``depth + 2`` device slots: the batch in use is one, and the batch before it another, because only when
    the iterator has advanced twice is it known that nobody holds it. Then its slot comes back as soon as the
    device has passed the event that is recorded on the consumer's stream as the iterator advances. Between
    `next` calls it stages ahead only what is there: neither a host batch that is not ready (``source.ready()``,
    where the source has it) nor a slot in use is waited for. A batch that is asked for while every slot is in
    use is copied behind that event, on the device; the host waits for nothing but ``source``. The memory of a
    slot that came back serves the next copy: it stays flat however far the host is ahead of the device.

    Consume batches on the stream that is current when `next` is called (others must wait for that one). A
    batch that is kept stays valid: its memory is not used again before it is dropped. An end or an error met
    while staging ahead surfaces in its turn.

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

    shown_as = "copy"

    def __init__(
        self,
        source: BaseNode[Any],
        device: DeviceLike,
        depth: int = 1,
        *,
        cpu_fields: Collection[str] = (),
    ) -> None:
        super().__init__(source)
        if isinstance(depth, bool) or not isinstance(depth, (int, np.integer)) or depth < 0:
            raise ValueError(
                f"depth is {depth!r}: the number of batches staged ahead is an integer >= 0; 0 stages none, "
                "1 hides the copy behind one step"
            )
        self.last_host_batch: Any = None
        self._depth = int(depth)
        self._cpu_fields = frozenset(cpu_fields)
        self._streams: Streams | None = streams_of(device) if is_accelerator(device) else None
        self._copy_stream: Stream | None = None
        self._books = _Books()
        self._failed: BaseException | None = None  # what the source answered behind the last staged batch
        self._handed_state: dict[str, Any] | None = None
        self._pulled_state: dict[str, Any] | None = None
        self._leave = weakref.finalize(self, self._books.leave)
        self._leave.atexit = False  # the device may be gone by then

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last batch handed out."""
        with self._turn.reset():
            handed = self._handed_state
            ahead = handed is not None and handed is not self._pulled_state
            for state in epoch_after(handed) if initial_state is None and ahead else (initial_state,):
                super().reset(state)

    def clear(self) -> None:
        """Drop the batches staged for the stream that is left; their copies end in the background."""
        books = self._books
        books.sources.extend((item.copied, item.host) for item in books.staged)
        books.staged.clear()
        self._failed = None
        self._handed_state = self._pulled_state = None
        self.last_host_batch = None

    def get_state(self) -> dict[str, Any]:
        """The source's state at the batch handed out last."""
        return super().get_state() if self._handed_state is None else self._handed_state

    def produce(self) -> Any:
        """The next batch, its copy ordered before whatever the caller launches next."""
        if self._streams is None:
            self.last_host_batch = next(self.source)
            return self.last_host_batch
        streams, books = self._streams, self._books
        if books.handed[-1] is not None:  # None: an interrupted call has advanced already
            self._advance()
        if not books.staged and self._failed is None:
            self._stage(streams)
        if not books.staged:
            assert self._failed is not None
            raise self._failed
        self._stage_ahead(behind=1)  # first, for an interrupt of its wait must leave this batch staged
        item = books.staged.popleft()
        consumer = streams.current_stream()
        consumer.wait_event(item.copied)
        books.handed[-1] = _Slot(DeviceMemory(item.batch, self._cpu_fields), consumer)
        books.sources.append((item.copied, item.host))
        self._handed_state, self.last_host_batch = item.state, item.host
        return item.batch

    @in_span
    def prefetch(self) -> None:
        """Stage ahead what is ready, without waiting; repeating it does no harm."""
        self._stage_ahead()

    def _stage_ahead(self, behind: int = 0) -> None:
        """Stage what is ready, up to the depth, behind the first ``behind`` batches staged."""
        if self._streams is None:
            return
        streams, books = self._streams, self._books
        ready = getattr(self.source, "ready", None)
        while (
            self._failed is None
            and len(books.staged) < self._depth + behind
            and self._slot_is_free()
            and (ready is None or ready())
        ):
            self._stage(streams)

    def wait_for_prefetch(self) -> None:
        """Wait until every batch staged so far has arrived; nothing more is staged and nothing is dropped."""
        for item in self._books.staged:
            item.copied.synchronize()

    def close(self) -> None:
        """Drop what is staged and let go of the host memory that its copies read."""
        self.clear()
        self._books.leave()

    def _advance(self) -> None:
        """The consumer is done with the batch in use, as far as it launched anything, unless it keeps the batch."""
        before = self._books.handed.popleft()
        self._books.handed.append(None)
        if before is None:
            return
        assert self._streams is not None
        before.consumer = self._streams.current_stream()
        before.memory.give_up_shared(before.consumer)
        before.consumed = self._streams.new_event()
        before.consumed.record(before.consumer)
        self._books.slots.append(before)

    def _slot_is_free(self) -> bool:
        slots = self._books.slots
        while slots and slots[0].consumed is not None and slots[0].consumed.query():
            slots.popleft()
        return self._books.occupied() < self._depth + 2

    def _stage(self, streams: Streams) -> None:
        """Pull one batch and launch its copy."""
        sources = self._books.sources
        while sources and sources[0][0].query():
            sources.popleft()
        if self._handed_state is None:
            self._handed_state = self._pulled_state = copy.deepcopy(self.source.state_dict())
        try:
            host = next(self.source)
            self._pulled_state = copy.deepcopy(self.source.state_dict())
            self._launch(streams, host, self._pulled_state)
        except Exception as error:
            self._failed = error
        except BaseException as interrupt:
            # In `prefetch`, which is no `next`, nobody else notes that a batch is lost.
            self._failed = met_again(interrupt)
            raise

    def _launch(self, streams: Streams, host: Any, state: dict[str, Any]) -> None:
        books = self._books
        if self._copy_stream is None:
            self._copy_stream = streams.new_stream()
        while not self._slot_is_free():
            self._copy_stream.wait_event(books.pop_slot())
        copied = streams.new_event()
        try:
            with streams.on(self._copy_stream):
                batch = to_device(host, streams.device, self._cpu_fields)
        except BaseException:
            copied.record(self._copy_stream)  # the leaves before the one that failed are still being read
            books.sources.append((copied, host))
            raise
        copied.record(self._copy_stream)
        books.staged.append(_Staged(host, batch, copied, state))
