"""Slices are cut where the fields are, and the host waits for no device, wherever the boundaries are."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torchdata.nodes import IterableWrapper

from evenstep import DataPlane, Shard
from evenstep.device.uploads import Uploads
from evenstep.nodes.context_shard import ContextShard
from evenstep.packing.sharding import Sharding
from evenstep.testing.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream

META, CPU = torch.device("meta"), torch.device("cpu")
SHARD = {"input_ids": Shard("cp", mode="zigzag", unit="document")}
BOUNDS = torch.tensor([0, 4, 12], dtype=torch.int32)
SECOND = torch.tensor([1, 2, 6, 7, 8, 9])  # what the second of two ranks gets


class Module:
    """What `torch.get_device_module` returns for a device whose work is simulated."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self.simulated = simulated

    def Stream(self, **_: Any) -> SimulatedStream:  # noqa: N802 - torch's name
        return self.simulated.new_stream()

    def Event(self) -> SimulatedEvent:  # noqa: N802 - torch's name
        return self.simulated.new_event()

    def stream(self, stream: SimulatedStream) -> AbstractContextManager[None]:
        return self.simulated.on(stream)

    def device(self, _: torch.device) -> AbstractContextManager[None]:
        return self.simulated.bind()

    def current_stream(self, _: torch.device) -> SimulatedStream:
        return self.simulated.current_stream()

    def current_device(self) -> None:
        return None  # the device "meta" has no index


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, pins_without_device: None) -> SimulatedDevice:
    simulated = SimulatedDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module(simulated))
    return simulated


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors that were copied between the devices, whether the host waited, and whether they were pinned."""
    real, found = torch.Tensor.to, []

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = real(tensor, *args, **options)
        if out.device != tensor.device:
            waits = not (options.get("non_blocking", False) and tensor.is_pinned())
            found.append((tensor.tolist(), "the host waits" if waits else "nobody waits"))
        return out

    monkeypatch.setattr(torch.Tensor, "to", to)
    return found


def batch(ids: torch.device = META, labels: torch.device = META) -> dict[str, Any]:
    tokens = torch.arange(12).view(1, 12)
    return {"input_ids": tokens.to(ids), "labels": tokens.to(labels), "cu_seqlens_padded": BOUNDS.clone()}


def node(*batches: Any) -> ContextShard:
    plane = SimpleNamespace(topology=SimpleNamespace(model_coordinate=lambda _: (1, 2)))
    return ContextShard(IterableWrapper(batches), cast("DataPlane", plane), SHARD)


@pytest.mark.usefixtures("device")
def test_boundaries_on_the_host_reach_the_device_once_and_nobody_waits(copies: list[Any]) -> None:
    whole = batch()
    copies.clear()
    part = next(node(whole))
    assert copies == [([0, 4, 12], "nobody waits")]
    assert [part[name].device for name in part] == [META, META, CPU]
    assert part["input_ids"].shape == part["labels"].shape == (1, 6)


@pytest.mark.usefixtures("device")
def test_each_field_is_cut_where_it_is(copies: list[Any]) -> None:
    whole = batch(labels=CPU)
    copies.clear()
    part = next(node(whole))
    assert copies == [([0, 4, 12], "nobody waits")]
    assert part["input_ids"].is_meta
    assert torch.equal(part["labels"][0], SECOND)


def test_boundaries_that_are_elsewhere_are_brought() -> None:
    sharding = Sharding.of(SHARD, lambda _: (1, 2))
    whole = batch(CPU, CPU) | {"cu_seqlens_padded": BOUNDS.to(META)}
    brought = []

    def bring(bounds: torch.Tensor, to: torch.device) -> torch.Tensor:
        brought.append((bounds.device, to))
        return BOUNDS

    part = sharding.slice(whole, bring)
    assert brought == [(META, CPU)]
    assert torch.equal(part["input_ids"][0], SECOND)
    assert torch.equal(part["labels"][0], SECOND)


@pytest.fixture
def pinned(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever was pinned, as long as somebody holds it."""
    real, found = torch.Tensor.pin_memory, []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        twin = real(tensor)
        found.append(weakref.ref(twin))
        return twin

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return found


def test_pinned_boundaries_are_held_until_the_device_has_read_them(
    device: SimulatedDevice, pinned: list[Any]
) -> None:
    batches = node(*[batch() for _ in range(3)])
    device.compute(1.0)  # the training step, behind which the copy waits
    next(batches)
    next(batches)
    gc.collect()
    assert [ref() is not None for ref in pinned] == [True, True]
    assert device.host_waits == 0
    device.sleep(2.0)
    device.compute(1.0)
    next(batches)
    gc.collect()
    assert [ref() is not None for ref in pinned] == [False, False, True]
    assert device.host_waits == 0
    del batches
    gc.collect()
    assert device.now == 3.0  # memory is not let go of before it was read
    assert [ref() for ref in pinned] == [None] * 3


def test_what_stays_on_the_host_needs_no_device() -> None:
    assert Uploads()(BOUNDS, CPU) is BOUNDS
