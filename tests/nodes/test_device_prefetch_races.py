"""The order of copies, reads and frees, proved on a simulated device; and that the proof would find what it looks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import BaseNode

import evenstep.nodes.device_prefetch as module
from evenstep.nodes.device_prefetch import DevicePrefetch
from evenstep.nodes.host_prefetch import HostPrefetch
from evenstep.nodes.pin_memory import PinMemory
from evenstep.testing.positions import Positions
from evenstep.testing.simulated_device import (
    SimulatedDevice,
    SimulatedEvent,
    SimulatedStream,
    SimulatedTensor,
)


def on(device: SimulatedDevice) -> Callable[[tuple[int, int]], dict[str, Any]]:
    return lambda position: {"x": SimulatedTensor(device, position).pin_memory(), "at": position}


def build(device: SimulatedDevice, depth: int = 1, **options: Any) -> tuple[DevicePrefetch, Positions]:
    source = Positions(on(device), **options)
    return DevicePrefetch(source, device, depth), source


def train(
    device: SimulatedDevice,
    node: DevicePrefetch,
    steps: list[tuple[float, float, bool, bool]],
) -> list[tuple[int, int]]:
    """A loop with kernels of some length, pauses of the host, kept batches and prefetch hooks."""
    kept: deque[Any] = deque(maxlen=3)
    seen = []
    for kernel, pause, keep, hook in steps:
        try:
            batch = next(node)
        except StopIteration:
            break
        device.compute(kernel, batch["x"])
        for old in [*kept]:
            device.compute(kernel, old["x"])
        old = None
        if keep:
            kept.append(batch)  # drops the oldest, with its kernel still running
        if hook:
            node.prefetch()
        device.sleep(pause)
        seen.append(batch["x"].value)
        del batch
    return seen


SECONDS = st.sampled_from([0.0, 0.0001, 0.001, 0.01])
STEPS = st.lists(st.tuples(SECONDS, SECONDS, st.booleans(), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    steps=STEPS,
    depth=st.integers(0, 3),
    ready=st.none() | st.lists(st.booleans(), max_size=20),
    size=st.integers(1, 8),
)
def test_under_every_schedule_batches_come_in_order_without_a_race_or_a_host_wait(
    steps: list[tuple[float, float, bool, bool]], depth: int, ready: list[bool] | None, size: int
) -> None:
    device = SimulatedDevice()
    node, _ = build(device, depth, size=size, ready=ready)
    expected = [(0, position) for position in range(min(size, len(steps)))]
    assert train(device, node, steps) == expected
    assert device.host_waits == 0
    node.reset()
    assert train(device, node, steps)[:1] == [(1, 0)]
    device.check()
    node.close()
    del node
    device.check()


class DropsSources(DevicePrefetch):
    def produce(self) -> Any:
        batch = super().produce()
        self._books.sources.clear()
        for item in self._books.staged:
            item.host = None
        self.last_host_batch = None
        return batch


Plant = Callable[[pytest.MonkeyPatch], None]


def skip_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedStream, "wait_event", lambda *_: None)


def skip_record_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedTensor, "record_stream", lambda *_: None)


def drop_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "DevicePrefetch", DropsSources)


def forget_the_consumer(patch: pytest.MonkeyPatch) -> None:
    real = DevicePrefetch._advance

    def advance(self: DevicePrefetch) -> None:
        real(self)
        for slot in self._books.slots:
            slot.consumed = SimulatedDevice().new_event()

    patch.setattr(DevicePrefetch, "_advance", advance)


def free_the_slot_in_use(patch: pytest.MonkeyPatch) -> None:
    """The slot comes back as the iterator advances, not when its consumer is done."""
    real = DevicePrefetch._advance

    def advance(self: DevicePrefetch) -> None:
        real(self)
        self._books.slots.clear()

    patch.setattr(DevicePrefetch, "_advance", advance)


def one_slot_for_two(patch: pytest.MonkeyPatch) -> None:
    """Each copy goes where the one before it went."""
    real = SimulatedDevice._allocate
    first: dict[int, Any] = {}

    def allocate(self: SimulatedDevice, name: str, nbytes: int, stream: SimulatedStream) -> Any:
        memory = first.setdefault(id(self), real(self, name, nbytes, stream))
        memory.before, memory.name = memory.name, name
        return memory

    patch.setattr(SimulatedDevice, "_allocate", allocate)


def record_copies_on_the_training_stream(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedEvent.record
    patch.setattr(SimulatedEvent, "record", lambda self, stream: real(self, stream.device.streams[0]))


def record_consumers_on_the_copy_stream(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedEvent.record
    patch.setattr(SimulatedEvent, "record", lambda self, stream: real(self, stream.device.streams[-1]))


def record_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedEvent.record

    def record(self: SimulatedEvent, stream: SimulatedStream) -> None:
        real(self, stream)
        if stream.number:  # the mark stands before the last operation
            self.clock[stream.number] -= 1

    patch.setattr(SimulatedEvent, "record", record)


def wait_on_the_host(patch: pytest.MonkeyPatch) -> None:
    real = DevicePrefetch.produce

    def produce(self: DevicePrefetch) -> Any:
        batch = real(self)
        self.wait_for_prefetch()
        return batch

    patch.setattr(DevicePrefetch, "produce", produce)


WAITS = "the host waited for the device"


@pytest.mark.parametrize(
    ("plant", "symptom"),
    [
        (skip_wait, "a kernel on stream 0 reads the copy of (0, 0) before it is written"),
        (skip_record_stream, "on stream 1 overwrites the copy of (0, 0) while stream 0 reads it"),
        (forget_the_consumer, "on stream 1 overwrites the copy of (0, 0) while stream 0 reads it"),
        (free_the_slot_in_use, "on stream 1 overwrites the copy of (0, 0) while stream 0 reads it"),
        (drop_sources, "pinned (0, 0) is freed while stream 1 may still read it"),
        (one_slot_for_two, "a kernel reads (0, 0) where the copy of (0, 1) lies now"),
        (
            record_copies_on_the_training_stream,
            "a kernel on stream 0 reads the copy of (0, 0) before it is written",
        ),
        (
            record_consumers_on_the_copy_stream,
            "on stream 1 overwrites the copy of (0, 0) while stream 0 reads it",
        ),
        (record_before_the_copy, "a kernel on stream 0 reads the copy of (0, 0) before it is written"),
        (wait_on_the_host, WAITS),
    ],
)
def test_planted_bugs_are_caught(plant: Plant, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[str]:
        found = []
        for keep in (False, True):
            device = SimulatedDevice()
            node = module.DevicePrefetch(Positions(on(device), size=8), device, 1)
            train(device, node, [(0.01, 0.0, keep, False)] * 8)
            found += device.violations + [WAITS] * (device.host_waits > 0)
        return found

    assert run() == []
    plant(monkeypatch)
    found = run()
    assert any(symptom in violation for violation in found), found


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_memory_is_bounded_by_the_slots_however_far_the_host_is_ahead(depth: int) -> None:
    device = SimulatedDevice()
    node, _ = build(device, depth, size=50)
    train(device, node, [(0.01, 0.0, False, True)] * 50)
    assert device.host_waits == 0
    assert device.reserved_bytes <= (depth + 2) * 1000
    device.check()


def test_copies_hide_behind_compute_and_only_with_a_depth() -> None:
    def seconds(depth: int, pinned: bool = True) -> float:
        device = SimulatedDevice(bytes_per_second=1e5)  # a copy takes 10 ms
        source: BaseNode[Any] = Positions(lambda at: {"x": SimulatedTensor(device, at)}, size=20)
        node = DevicePrefetch(PinMemory(source, device) if pinned else source, device, depth)
        for batch in node:
            device.compute(0.050, batch["x"])
            device.sleep(0.050)
        device.synchronize()
        device.check()
        return device.now

    assert seconds(1) == pytest.approx(20 * 0.050 + 0.010)
    assert seconds(0) > 19 * 0.059
    assert seconds(1, pinned=False) > 20 * 0.055  # the host waits for every copy from pageable memory


def test_behind_the_thread_that_pins() -> None:
    device = SimulatedDevice()
    source = Positions(lambda at: {"x": SimulatedTensor(device, at)}, size=30)
    host = HostPrefetch(PinMemory(source, device), 3)
    node = DevicePrefetch(host, device, 2)
    for epoch in range(2):
        node.reset()
        assert train(device, node, [(0.001, 0.001, True, True)] * 30) == [(epoch, at) for at in range(30)]
    node.close()
    host.close()
    device.check()
