from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torchdata.nodes import IterableWrapper

from evenstep.nodes.pin_memory import PinMemory
from evenstep.testing.simulated_device import SimulatedDevice, SimulatedTensor


class Pair(NamedTuple):
    x: Any
    note: str


def test_on_the_cpu_batches_pass_through_untouched() -> None:
    batches = [{"x": torch.ones(2)}, [torch.zeros(1)]]
    node = PinMemory(IterableWrapper(batches), "cpu")
    assert all(out is batch for out, batch in zip(node, batches, strict=True))


def test_tensors_are_pinned_types_kept_and_cpu_fields_left() -> None:
    device = SimulatedDevice()

    def tensor() -> SimulatedTensor:
        return SimulatedTensor(device, 1)

    batch: OrderedDict[str, Any] = OrderedDict(
        pair=Pair(tensor(), "n"), many=[tensor(), tensor()], host=tensor(), n=3
    )
    out = next(PinMemory(IterableWrapper([batch]), device, cpu_fields=["host", "many.1"]))
    assert (type(out), type(out["pair"])) == (OrderedDict, Pair)
    assert out["pair"].x.is_pinned()
    assert [inner.is_pinned() for inner in out["many"]] == [True, False]
    assert (out["host"], out["n"]) == (batch["host"], 3)
    assert not batch["pair"].x.is_pinned()


def test_what_is_pinned_already_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    batch = [torch.ones(2)]
    assert next(PinMemory(IterableWrapper([batch]), SimulatedDevice())) is batch


@pytest.mark.usefixtures("pins_without_device")
def test_tensors_of_any_strides_are_pinned() -> None:
    batch = {
        "position_ids": torch.arange(5).expand(3, 5),
        "transposed": torch.arange(12).view(3, 4).T,
        "empty": torch.empty(0, 4),
        "kept": torch.arange(5).expand(2, 5),
    }
    out = next(PinMemory(IterableWrapper([batch]), SimulatedDevice(), cpu_fields=["kept"]))
    assert all(torch.equal(out[name], batch[name]) for name in batch)
    assert [out[name].is_pinned() for name in batch] == [True, True, False, False]
    assert out["transposed"].stride() == (1, 4)
    assert out["kept"] is batch["kept"]


def test_its_state_is_its_sources() -> None:
    source = IterableWrapper(range(3))
    node = PinMemory(source, "cpu")
    node.reset()
    next(node)
    assert node.state_dict() == source.state_dict()


def test_the_device_is_the_one_that_is_current_where_the_node_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [5]
    bound: list[torch.device] = []

    class Module:
        Stream = Event = stream = current_stream = None

        @staticmethod
        def current_device() -> int:
            return current[0]

        @staticmethod
        def device(device: torch.device) -> nullcontext[None]:
            bound.append(device)
            return nullcontext()

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    node = PinMemory(IterableWrapper([torch.ones(1)]), "xpu")
    current[0] = 0  # as in another thread
    next(node)
    assert bound == [torch.device("xpu", 5)]
