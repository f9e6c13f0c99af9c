"""Batches come to the device in order, with their types, states and errors, whatever was staged ahead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torchdata.nodes import BaseNode, IterableWrapper

from evenstep.nodes.device_prefetch import DevicePrefetch
from evenstep.nodes.pin_memory import PinMemory
from evenstep.nodes.stage import Stage, nothing_lost
from evenstep.testing import assert_node_conforms
from evenstep.testing.positions import Positions
from evenstep.testing.simulated_device import SimulatedDevice, SimulatedTensor


def on(device: SimulatedDevice) -> Callable[[tuple[int, int]], dict[str, Any]]:
    return lambda position: {"x": SimulatedTensor(device, position).pin_memory(), "at": position}


def build(device: SimulatedDevice, depth: int = 1, **options: Any) -> tuple[DevicePrefetch, Positions]:
    source = Positions(on(device), **options)
    return DevicePrefetch(source, device, depth), source


def positions(node: DevicePrefetch) -> list[tuple[int, int]]:
    return [batch["x"].value for batch in node]


class TestOnTheCPU:
    def test_batches_pass_through_and_nothing_is_pulled_ahead(self) -> None:
        source = Positions(lambda at: {"x": torch.tensor(at)})
        node = DevicePrefetch(source, "cpu", depth=3)
        assert node.last_host_batch is None
        for pulled in range(1, 4):
            batch = next(node)
            assert node.last_host_batch is batch
            node.prefetch()
            node.wait_for_prefetch()
            assert source.pulls == pulled
            assert node.state_dict() == source.at.to_dict()

    def test_an_end_lasts_until_the_next_epoch_which_is_one_reset(self) -> None:
        source = Positions(lambda at: at, size=2)
        node = DevicePrefetch(source, torch.device("cpu"))
        assert list(node) == [(0, 0), (0, 1)]
        with pytest.raises(StopIteration):
            next(node)
        node.reset()
        assert list(node) == [(1, 0), (1, 1)]
        assert source.resets == [None, None]
        node.close()
        node.close()


@pytest.mark.parametrize("depth", [-1, True, 1.0])
def test_an_impossible_depth_is_refused(depth: Any) -> None:
    message = (
        f"depth is {depth!r}: the number of batches staged ahead is an integer >= 0; 0 stages none, 1 hides the copy "
        "behind one step"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        DevicePrefetch(Positions(on(SimulatedDevice())), "cpu", depth)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_one_copy_stream_for_the_life_of_the_loader(depth: int) -> None:
    device = SimulatedDevice()
    node, _ = build(device, depth)
    for _ in range(3):
        positions(node)
        node.reset()
    assert len(device.streams) == 2


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_the_state_is_the_sources_at_the_batch_handed_out_last(depth: int) -> None:
    device = SimulatedDevice()
    node, source = build(device, depth, size=4)
    states = [node.state_dict()]
    assert source.pulls == 0
    for _ in range(4):
        next(node)
        before = source.pulls
        states.append(node.state_dict())
        assert source.pulls == before
    assert [state["consumed_samples"] for state in states] == [0, 1, 2, 3, 4]
    for done, state in enumerate(states):
        again, _ = build(device, depth, size=4)
        again.reset(state)
        assert again.state_dict() == state
        assert positions(again) == [(0, position) for position in range(done, 4)]


def test_the_state_before_the_first_batch_stands_even_when_batches_are_staged() -> None:
    node, source = build(SimulatedDevice(), 2)
    before = node.state_dict()
    node.prefetch()
    assert source.pulls == 2
    assert node.state_dict() == before
    node.reset()
    assert next(node)["at"] == (0, 0)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("taken", [0, 1, 2, 4])
def test_the_next_epoch_follows_the_batches_handed_out_and_is_one_reset(depth: int, taken: int) -> None:
    node, source = build(SimulatedDevice(), depth, size=4)
    node.reset()
    assert [next(node)["at"] for _ in range(taken)] == [(0, position) for position in range(taken)]
    node.reset()
    assert len(source.resets) == 2
    assert next(node)["at"] == (1 if taken else 0, 0)


def test_a_source_without_a_cursor_is_brought_back_and_then_to_its_next_epoch() -> None:
    device = SimulatedDevice()
    items = [SimulatedTensor(device, n) for n in range(4)]
    node = DevicePrefetch(IterableWrapper(items), device)
    assert next(node).value == 0
    node.reset()
    assert [item.value for item in node] == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_failure_of_a_later_batch_surfaces_in_its_turn_and_stays(depth: int) -> None:
    node, _ = build(SimulatedDevice(), depth, fail_at=3)
    assert [next(node)["at"] for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(node)
    assert node.state_dict()["consumed_samples"] == 3


def test_a_failed_copy_surfaces_in_its_turn_and_its_batch_counts_as_not_handed_out() -> None:
    device = SimulatedDevice()
    node, source = build(device, 1, ready=[False, True])
    next(node)
    assert source.pulls == 1
    device.broken = RuntimeError("out of memory")
    node.prefetch()
    assert source.pulls == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        next(node)
    assert node.state_dict()["consumed_samples"] == 1
    device.broken = None
    node.reset(node.state_dict())
    assert next(node)["at"] == (0, 1)


class Interrupted(Positions):
    """Its wait for each position in ``at_positions`` is interrupted once; nothing is taken by then."""

    def __init__(
        self, make: Callable[[tuple[int, int]], Any], at_positions: set[int], **options: Any
    ) -> None:
        super().__init__(make, **options)
        self.at_positions = at_positions

    def next(self) -> Any:
        if self.at.consumed_samples in self.at_positions:
            self.at_positions.remove(self.at.consumed_samples)
            interrupt = KeyboardInterrupt()
            nothing_lost(interrupt)
            raise interrupt
        return super().next()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("at_positions", [{0}, {3}, {1, 2}, {5}])
def test_an_interrupted_wait_loses_no_batch_and_no_error(depth: int, at_positions: set[int]) -> None:
    device = SimulatedDevice()
    node = DevicePrefetch(Interrupted(on(device), set(at_positions), size=8, fail_at=6), device, depth)
    found: list[tuple[int, int]] = []
    interrupts = 0
    while len(found) < 6:
        before = (node.state_dict(), node.last_host_batch)
        try:
            batch = next(node)
        except KeyboardInterrupt:
            interrupts += 1
            assert (node.state_dict(), node.last_host_batch) == before
            continue
        found.append(batch["at"])
        device.compute(0.01, batch["x"])
        assert node.last_host_batch["at"] == batch["at"]
        assert node.state_dict()["consumed_samples"] == len(found)
    assert found == [(0, position) for position in range(6)]
    assert interrupts == len(at_positions)
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(node)
    node.wait_for_prefetch()
    device.check()


def test_the_batch_in_use_keeps_its_slot_over_interrupts() -> None:
    device = SimulatedDevice()
    node = DevicePrefetch(Interrupted(on(device), {2}), device, 0)
    next(node)
    next(node)
    with pytest.raises(KeyboardInterrupt):
        next(node)
    handed = list(node._books.handed)
    assert handed[0] is not None
    next(node)
    assert node._books.handed[0] is handed[0]


def test_a_prefetch_that_is_interrupted_inside_a_batch_says_so_in_its_turn() -> None:
    device = SimulatedDevice()
    source = Positions(on(device), ready=[False, True])
    node = DevicePrefetch(source, device, 2)
    next(node)
    make, broken = source.make, [True]

    def interrupted(at: tuple[int, int]) -> Any:
        if at == (0, 2) and broken:
            broken.clear()
            raise KeyboardInterrupt
        return make(at)

    source.make = interrupted
    with pytest.raises(KeyboardInterrupt):
        node.prefetch()
    assert next(node)["at"] == (0, 1)
    message = (
        "the loader was interrupted inside a batch (KeyboardInterrupt), and going on would skip data; load the last "
        "state to go on: loader.load_state_dict(loader.state_dict())"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        next(node)
    node.reset(node.state_dict())
    assert next(node)["at"] == (0, 2)


def test_a_host_batch_that_is_not_ready_is_neither_pulled_nor_waited_for() -> None:
    device = SimulatedDevice()
    source = Positions(on(device), ready=[False, True, False])
    node = DevicePrefetch(source, device, 2)
    next(node)
    assert source.pulls == 1
    node.prefetch()
    assert source.pulls == 2
    node.prefetch()
    assert source.pulls == 3


def test_waiting_for_the_prefetch_stages_nothing_and_drops_nothing() -> None:
    device = SimulatedDevice()
    node, source = build(device, 2)
    next(node)
    node.wait_for_prefetch()
    assert source.pulls == 3
    assert device.now >= device.streams[1].busy_until
    assert positions(node) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_waiting_for_the_prefetch_leaves_alone_what_has_become_ready() -> None:
    device = SimulatedDevice()
    source = Positions(on(device), ready=[False])
    node = DevicePrefetch(source, device, 2)
    next(node)
    node.wait_for_prefetch()
    assert source.pulls == 1
    node.prefetch()
    assert source.pulls == 3


def test_a_reset_lets_go_of_the_host_batch() -> None:
    node, _ = build(SimulatedDevice())
    next(node)
    node.reset()
    assert node.last_host_batch is None


class OneDict(BaseNode[int]):
    """Answers with the dict that it goes on changing, as sources outside this package may."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata has no types
        self.state: dict[str, Any] = {"at": {"position": 0}}

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.state["at"]["position"] = 0 if initial_state is None else initial_state["at"]["position"]

    def next(self) -> int:
        self.state["at"]["position"] += 1
        return int(self.state["at"]["position"])

    def get_state(self) -> dict[str, Any]:
        return self.state


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_state_stands_though_its_source_goes_on_changing_it(depth: int) -> None:
    node = DevicePrefetch(OneDict(), SimulatedDevice(), depth)
    node.prefetch()
    assert node.state_dict() == {"at": {"position": 0}}
    for position in (1, 2, 3):
        assert next(node) == position
        assert node.state_dict() == {"at": {"position": position}}


class Unmovable:
    def to(self, _: Any, **__: Any) -> Any:
        raise MemoryError("no room")


def test_what_a_failed_copy_has_begun_to_read_is_held() -> None:
    device = SimulatedDevice(bytes_per_second=10)
    node = DevicePrefetch(
        Positions(lambda at: {**on(device)(at), "y": Unmovable() if at[1] == 1 else None}), device
    )
    next(node)
    node.reset()  # drops the error, whose traceback has the batch
    device.check()
    device.synchronize()
    node.close()
    device.check()


def test_a_slot_comes_back_behind_the_stream_that_used_its_batch_last() -> None:
    device = SimulatedDevice(bytes_per_second=1e6)
    node, _ = build(device, 1)
    other = device.new_stream()
    batch = next(node)
    with device.on(other):  # from here on the loop runs on another stream
        arrived = device.new_event()
        arrived.record(device.streams[0])
        other.wait_event(arrived)
        device.compute(1.0, batch["x"])
        del batch
        for _ in range(3):
            next(node)
    device.check()


def test_close_lets_go_of_host_memory_only_when_it_is_read() -> None:
    device = SimulatedDevice(bytes_per_second=10)
    node, _ = build(device, 2)
    del_me = next(node)
    device.compute(1.0, del_me["x"])
    node.close()
    node.close()
    del node, del_me
    device.check()


class Vision(NamedTuple):
    pixels: Any
    name: str


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    count: int


class Fields(dict[str, Any]):
    pass


class Movable:
    """An object with the methods, and a tensor inside."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def pin_memory(self) -> Movable:
        return Movable(self.inner.pin_memory())

    def to(self, device: Any) -> Movable:
        return Movable(self.inner.to(device, non_blocking=True))


def test_types_are_kept_and_cpu_fields_stay_on_the_host() -> None:
    device = SimulatedDevice()

    def make(position: tuple[int, int]) -> Any:
        def tensor(name: str) -> SimulatedTensor:
            return SimulatedTensor(device, (name, position))

        return Fields(
            vision=Vision(tensor("pixels"), "v"),
            frozen=Frozen([tensor("x")], 3),
            movable=Movable(tensor("inner")),
            lengths=tensor("lengths"),
            deep={"on": tensor("on"), "off": tensor("off")},
        )

    fields = ("lengths", "deep.off")
    source = PinMemory(Positions(make), device, cpu_fields=fields)
    node = DevicePrefetch(source, device, cpu_fields=fields)
    batch, host = next(node), node.last_host_batch
    device.compute(0.1, batch["movable"].inner)
    assert [type(value) for value in batch.values()] == [Vision, Frozen, Movable, SimulatedTensor, dict]
    assert type(batch) is type(host) is Fields
    assert batch["vision"].pixels.is_on_device
    assert batch["frozen"].x[0].is_on_device
    assert batch["movable"].inner.is_on_device
    assert batch["deep"]["on"].is_on_device
    assert (batch["lengths"], batch["deep"]["off"]) == (host["lengths"], host["deep"]["off"])
    assert not host["lengths"].is_pinned()
    assert host["vision"].pixels.is_pinned()
    assert host["movable"].inner.is_pinned()
    next(node)
    assert node.last_host_batch is not host
    next(node)
    assert batch["movable"].inner._memory.recorded.keys() == {0}  # it is kept, so the allocator must know
    device.synchronize()
    device.check()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_it_conforms(depth: int) -> None:
    def node(**options: Any) -> BaseNode[Any]:
        device = SimulatedDevice()
        staged = DevicePrefetch(Positions(on(device), **options), device, depth)
        return Told(staged)

    assert_node_conforms(node, build_failing=lambda: node(fail_at=2))


class Told(Stage[Any, Any]):
    """Batches by what tells them apart."""

    def produce(self) -> Any:
        batch = next(self.source)
        return (batch["x"].value, batch["x"].is_on_device)
