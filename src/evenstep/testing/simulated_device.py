"""An accelerator in pure Python, so that the order of copies, reads and frees can be proved without one.

Streams, events, asynchronous copies and a caching allocator, in virtual time. Every access carries a vector clock, as
in race detectors for threads (Mattern, "Virtual time and global states of distributed systems", 1989): two accesses
to the same memory, one of them a write, of which neither happens before the other, are reported even where this
schedule let them come out right.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["SimulatedDevice", "SimulatedEvent", "SimulatedStream", "SimulatedTensor"]

Clock = dict[int, int]  # stream number -> operations of that stream known to be done


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class _Memory:
    """A block of host or device memory, and who used it."""

    def __init__(self, name: str, nbytes: int, stream: SimulatedStream | None) -> None:
        self.name = name
        self.before = name  # what it was last used for
        self.nbytes = nbytes
        self.stream = stream  # on which it was allocated; None on the host
        self.write: tuple[int, int] | None = None
        self.reads: dict[int, int] = {}
        self.recorded: dict[int, SimulatedStream] = {}


class SimulatedStream:
    """Operations in order; see `SimulatedDevice`."""

    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self.device = device
        self.number = number
        self.clock: Clock = {number: 0}
        self.busy_until: float = 0.0

    def wait_event(self, event: SimulatedEvent) -> None:
        """Operations given from now on start after ``event``."""
        _join(self.clock, event.clock)
        self.busy_until = max(self.busy_until, event.at)

    def run(
        self,
        seconds: float,
        reads: Sequence[_Memory] = (),
        writes: Sequence[_Memory] = (),
        what: str = "an operation",
    ) -> float:
        """Queue an operation; returns the virtual time of its end."""
        device = self.device
        _join(self.clock, device.clock)
        self.clock[self.number] += 1
        self.busy_until = max(self.busy_until, device.now) + seconds
        for memory in reads:
            if memory.write is not None and not self._knows(*memory.write):
                device.report(f"{what} on stream {self.number} reads {memory.name} before it is written")
            memory.reads[self.number] = self.clock[self.number]
        for memory in writes:
            if memory.write is not None and not self._knows(*memory.write):
                device.report(
                    f"{what} on stream {self.number} overwrites {memory.before} while it is written"
                )
            for stream, count in memory.reads.items():
                if not self._knows(stream, count):
                    device.report(
                        f"{what} on stream {self.number} overwrites {memory.before} while stream {stream} reads it"
                    )
            memory.write = (self.number, self.clock[self.number])
            memory.reads = {}
        return self.busy_until

    def _knows(self, stream: int, count: int) -> bool:
        return self.clock.get(stream, 0) >= count


class SimulatedEvent:
    """A mark in a stream; before `record`, it has always been passed."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.clock: Clock = {}
        self.at: float = 0.0

    def record(self, stream: SimulatedStream) -> None:
        """Put the mark behind everything ``stream`` was given so far."""
        _join(stream.clock, self.device.clock)
        self.clock = dict(stream.clock)
        self.at = stream.busy_until

    def query(self) -> bool:
        """Whether the device has passed the mark; if so, the host knows it from now on."""
        if self.at > self.device.now:
            return False
        _join(self.device.clock, self.clock)
        return True

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self.device.host_waits += max(0.0, self.at - self.device.now)
        self.device.now = max(self.device.now, self.at)
        _join(self.device.clock, self.clock)


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
        self._memory = _Memory(f"pageable {value!r}", nbytes, None)
        self._kind = "pageable"

    @property
    def is_on_device(self) -> bool:
        """Whether it lies in device memory."""
        return self._kind == "device"

    def is_pinned(self) -> bool:
        """Whether it lies in pinned host memory."""
        return self._kind == "pinned"

    def pin_memory(self) -> SimulatedTensor:
        """A copy in pinned memory, made by the host; freeing it before the device has read it is reported."""
        twin = self._twin("pinned", _Memory(f"pinned {self.value!r}", self.nbytes, None))
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
        stream.run(
            self.nbytes / device.bytes_per_second, [self._memory], [memory], f"the copy of {self.value!r}"
        )
        if not (non_blocking and self.is_pinned()):
            event = device.new_event()
            event.record(stream)
            event.synchronize()
        return twin

    def record_stream(self, stream: SimulatedStream) -> None:
        """Keep the memory from being used again, once freed, before ``stream`` has come to where it is then."""
        self._memory.recorded[stream.number] = stream

    def _twin(self, kind: str, memory: _Memory) -> SimulatedTensor:
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
        self._cache: list[tuple[_Memory, list[SimulatedEvent]]] = []
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

    def _allocate(self, name: str, nbytes: int, stream: SimulatedStream) -> _Memory:
        """Reuse as CUDA's caching allocator does: in stream order, and after the events of recorded streams."""
        for at, (memory, events) in enumerate(self._cache):
            fits = memory.nbytes == nbytes and memory.stream is stream
            if fits and all(event.query() for event in events):
                del self._cache[at]
                memory.before, memory.name, memory.recorded = memory.name, name, {}
                return memory
        self.reserved_bytes += nbytes
        return _Memory(name, nbytes, stream)

    def _free(self, memory: _Memory) -> None:
        events = []
        for stream in memory.recorded.values():
            event = self.new_event()
            event.record(stream)
            events.append(event)
        self._cache.append((memory, events))

    def _free_pinned(self, memory: _Memory) -> None:
        for stream, count in memory.reads.items():
            if self.clock.get(stream, 0) < count:
                self.report(f"{memory.name} is freed while stream {stream} may still read it")
