"""An accelerator in pure Python, so that the order of copies, reads and frees can be proved without one.

Streams, events, asynchronous copies and a caching allocator, in virtual time. Every access carries a vector clock, as
in race detectors for threads (Mattern, "Virtual time and global states of distributed systems", 1989): two accesses
to the same memory, one of them a write, of which neither happens before the other, are reported even where this
schedule let them come out right.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evenstep.testing.simulated_stream import Clock, Memory, SimulatedEvent, SimulatedStream

__all__ = ["SimulatedDevice", "SimulatedEvent", "SimulatedStream", "SimulatedTensor"]


class SimulatedTensor:
    """A value in pageable, pinned or device memory, with the methods of a tensor that `evenstep.device` calls.

    Args:
        device: The device it may be copied to.
        value: What it holds; copies hold the same object.
        nbytes: Its size; copies take ``nbytes / device.bytes_per_second``.
    """

    def __init__(self, device: SimulatedDevice, value: Any, nbytes: int = 1000) -> None:
        self.value = value
        self.nbytes = nbytes
        self._device = device
        self._memory = Memory(f"pageable {value!r}", nbytes, None)
        self._kind = "pageable"
        self._write: tuple[int, int] | None = None  # what put the value there

    @property
    def is_on_device(self) -> bool:
        """Whether it lies in device memory."""
        return self._kind == "device"

    def is_pinned(self) -> bool:
        """Whether it lies in pinned host memory."""
        return self._kind == "pinned"

    def pin_memory(self) -> SimulatedTensor:
        """A copy in pinned memory, made by the host; freeing it before the device has read it is reported."""
        twin = self._twin("pinned", Memory(f"pinned {self.value!r}", self.nbytes, None))
        weakref.finalize(twin, self._device._free_pinned, twin._memory).atexit = False
        return twin

    def to(self, device: SimulatedDevice, non_blocking: bool = False) -> SimulatedTensor:
        """A copy in device memory, made on the current stream; the host waits if this is not pinned."""
        if device.broken is not None:
            raise device.broken
        stream = device.current_stream()
        memory = device._allocate(f"the copy of {self.value!r}", self.nbytes, stream)
        twin = self._twin("device", memory)
        weakref.finalize(twin, device._free, memory).atexit = False
        what = f"the copy of {self.value!r}"
        stream.run(self.nbytes / device.bytes_per_second, [self._memory], [memory], what)
        twin._write = memory.write
        if not (non_blocking and self.is_pinned()):
            event = device.new_event()
            event.record(stream)
            event.synchronize()
        return twin

    def record_stream(self, stream: SimulatedStream) -> None:
        """Keep the memory from being used again, once freed, before ``stream`` has come to where it is then."""
        self._memory.recorded[stream.number] = stream

    def _twin(self, kind: str, memory: Memory) -> SimulatedTensor:
        twin = SimulatedTensor(self._device, self.value, self.nbytes)
        twin._kind, twin._memory = kind, memory
        return twin


class SimulatedDevice:
    """Stands in for `evenstep.device.Streams`: give it to `PinMemory` and `DevicePrefetch` as their device.

    Attributes:
        device: Itself, as the argument of ``to()``.
        now: Virtual seconds on the host's clock.
        host_waits: Virtual seconds that the host spent waiting for the device.
        violations: What was wrong with the order of operations, in words.
        reserved_bytes: Device memory that the allocator has taken; freed blocks are kept for reuse.
        broken: Raised by the next copies, where it is not None.

    Args:
        bytes_per_second: Speed of copies.
    """

    def __init__(self, bytes_per_second: float = 1e6) -> None:
        self.bytes_per_second = bytes_per_second
        self.device = self
        self.now: float = 0.0
        self.host_waits: float = 0.0
        self.violations: list[str] = []
        self.reserved_bytes: int = 0
        self.broken: Exception | None = None
        self.clock: Clock = {}
        self.streams: list[SimulatedStream] = []
        self._cache: list[tuple[Memory, list[SimulatedEvent]]] = []
        self._current = self.new_stream()

    def new_stream(self) -> SimulatedStream:
        """A stream of its own; number 0 is the default one."""
        stream = SimulatedStream(self, len(self.streams))
        self.streams.append(stream)
        return stream

    def new_event(self) -> SimulatedEvent:
        """An event that nobody has recorded."""
        return SimulatedEvent(self)

    def current_stream(self) -> SimulatedStream:
        """The stream on which the host launches."""
        return self._current

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Launch on ``stream``."""
        previous, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = previous

    @contextmanager
    def bind(self) -> Iterator[None]:
        """Nothing to do: there is one device."""
        yield

    def compute(self, seconds: float, *tensors: SimulatedTensor) -> None:
        """Launch a kernel of ``seconds`` that reads ``tensors`` on the current stream; the host goes on."""
        for tensor in tensors:
            assert tensor.is_on_device, f"{tensor.value!r} is not on the device"
            if tensor._memory.write != tensor._write:
                self.report(f"a kernel reads {tensor.value!r} where {tensor._memory.name} lies now")
        self._current.run(seconds, [tensor._memory for tensor in tensors], what="a kernel")

    def sleep(self, seconds: float) -> None:
        """The host is busy with something else."""
        self.now += seconds

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            event = self.new_event()
            event.record(stream)
            event.synchronize()

    def report(self, violation: str) -> None:
        """Note a violation; what happens inside a finalizer cannot raise."""
        self.violations.append(f"at {self.now:.6g} s: {violation}")

    def check(self) -> None:
        """Raise AssertionError if anything was wrong with the order of operations so far."""
        assert not self.violations, "\n".join(self.violations)

    def _allocate(self, name: str, nbytes: int, stream: SimulatedStream) -> Memory:
        """Reuse as CUDA's caching allocator does: in stream order, and after the events of recorded streams."""
        for at, (memory, events) in enumerate(self._cache):
            fits = memory.nbytes == nbytes and memory.stream is stream
            if fits and all(event.query() for event in events):
                del self._cache[at]
                memory.before, memory.name, memory.recorded = memory.name, name, {}
                return memory
        self.reserved_bytes += nbytes
        return Memory(name, nbytes, stream)

    def _free(self, memory: Memory) -> None:
        events = []
        for stream in memory.recorded.values():
            event = self.new_event()
            event.record(stream)
            events.append(event)
        self._cache.append((memory, events))

    def _free_pinned(self, memory: Memory) -> None:
        for stream, count in memory.reads.items():
            if self.clock.get(stream, 0) < count:
                self.report(f"{memory.name} is freed while stream {stream} may still read it")
