"""Streams and events in virtual time, and the race detector that their every access to memory goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenstep.testing.simulated_device import SimulatedDevice

__all__ = ["Clock", "Memory", "SimulatedEvent", "SimulatedStream", "join"]

Clock = dict[int, int]  # stream number -> operations of that stream known to be done


def join(clock: Clock, other: Clock) -> None:
    """Have who knows ``clock`` know ``other`` too."""
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Memory:
    """A block of host or device memory, and who used it.

    Attributes:
        name: What it holds.
        before: What it was last used for.
        nbytes: Its size.
        stream: On which it was allocated; None on the host.
        write: Stream and number of the operation that wrote it last.
        reads: The last operation of each stream that has read it since.
        recorded: Streams that must have come so far before it is used again.
    """

    def __init__(self, name: str, nbytes: int, stream: SimulatedStream | None) -> None:
        self.name = name
        self.before = name
        self.nbytes = nbytes
        self.stream = stream
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
        join(self.clock, event.clock)
        self.busy_until = max(self.busy_until, event.at)

    def run(
        self,
        seconds: float,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        what: str = "an operation",
    ) -> float:
        """Queue an operation; returns the virtual time of its end."""
        device = self.device
        join(self.clock, device.clock)
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
        join(stream.clock, self.device.clock)
        self.clock = dict(stream.clock)
        self.at = stream.busy_until

    def query(self) -> bool:
        """Whether the device has passed the mark; if so, the host knows it from now on."""
        if self.at > self.device.now:
            return False
        join(self.device.clock, self.clock)
        return True

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self.device.host_waits += max(0.0, self.at - self.device.now)
        self.device.now = max(self.device.now, self.at)
        join(self.device.clock, self.clock)
