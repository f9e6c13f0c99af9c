from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.device import (
    DeviceMemory,
    TorchStreams,
    bind_thread,
    is_accelerator,
    pin_batch,
    streams_of,
    to_device,
)
from evenstep.testing.simulated_device import SimulatedDevice


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", False),
        (torch.device("cpu"), False),
        ("cuda", True),
        ("cuda:1", True),
        (torch.device("xpu", 0), True),
        (SimulatedDevice(), True),
    ],
)
def test_everything_but_the_cpu_is_an_accelerator(device: Any, expected: bool) -> None:
    assert is_accelerator(device) is expected


def test_a_device_without_streams_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=re.escape("device 'meta' has no streams in this build of torch (")
    ) as caught:
        streams_of("meta")
    assert str(caught.value).endswith(
        "): batches cannot be copied ahead. Install the build (or extension, such as torch-npu) for it, or pass "
        "device='cpu' and move the batches in the training loop."
    )


class FakeModule:
    """What `torch.get_device_module` returns for any accelerator."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def current_device(self) -> int:
        return 3

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(device=device)

    def Event(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace()

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(current=device)

    def stream(self, stream: Any) -> Any:
        self.calls.append(("stream", stream))
        return nullcontext()

    def device(self, device: torch.device) -> Any:
        self.calls.append(("device", device))
        return nullcontext()

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    found = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    return found


def test_one_code_path_serves_every_device_module(fake: FakeModule) -> None:
    streams = TorchStreams("xpu")
    here = torch.device("xpu", 3)
    assert streams.device == here
    assert TorchStreams("xpu:1").device == torch.device("xpu", 1)
    stream: Any = streams.new_stream()
    assert stream.device == here
    assert streams.current_stream() == SimpleNamespace(current=here)
    assert streams.new_event() == SimpleNamespace()
    with streams.on(stream), streams.bind():
        pass
    bind_thread("xpu")
    bind_thread("cpu")
    assert fake.calls == [("stream", stream), ("device", here), ("set_device", here)]


def test_to_device_moves_tensors_and_leaves_the_rest_alone() -> None:
    batch: dict[str, Any] = {
        "x": torch.ones(2),
        "n": 3,
        "keep": torch.ones(1),
        "deep": [torch.zeros(1, dtype=torch.int8)],
    }
    moved = to_device(batch, "meta", ("keep",))
    assert moved["x"].is_meta
    assert moved["deep"][0].is_meta
    assert moved["deep"][0].dtype is torch.int8
    assert moved["keep"] is batch["keep"]
    assert moved["n"] == 3
    assert not batch["x"].is_meta


def test_a_field_name_is_a_path_not_a_prefix() -> None:
    moved = to_device(
        {"x": torch.ones(1), "xs": torch.ones(1), "y": {"x": torch.ones(1)}}, "meta", ("x", "y.x")
    )
    assert (moved["x"].is_meta, moved["xs"].is_meta, moved["y"]["x"].is_meta) == (False, True, False)


def test_the_host_waits_for_no_copy_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    real, told = torch.Tensor.to, []

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        told.append((*args, options))
        return real(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device({"x": torch.ones(2), "deep": [torch.zeros(1)]}, "meta")
    assert told == [("meta", {"non_blocking": True})] * 2


class OnlyTo:
    """An object of the ecosystem whose to() takes the device alone, and which says nothing of its tensors."""

    __slots__ = ("device", "inner")

    def __init__(self, inner: Any, device: Any = "cpu") -> None:
        self.inner, self.device = inner, device

    def to(self, device: Any) -> OnlyTo:
        return OnlyTo([leaf.to(device) for leaf in self.inner], device)


class Failing:
    def to(self, *_: Any, **__: Any) -> Any:
        raise TypeError("inside")


def test_objects_move_themselves() -> None:
    moved = to_device([OnlyTo([torch.ones(1)])], "meta")[0]
    assert moved.inner[0].is_meta
    with pytest.raises(TypeError, match="inside"):
        to_device(Failing(), "meta")


def test_pinning_leaves_alone_what_has_no_bytes_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self)
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    batch = {
        "x": torch.ones(2),
        "meta": torch.ones(1, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "host": torch.ones(1),
        "s": "text",
    }
    out = pin_batch(batch, ("host",))
    assert [id(tensor) for tensor in pinned] == [id(batch["x"])]
    assert out["x"] is not batch["x"]
    assert all(out[name] is batch[name] for name in ("meta", "sparse", "host", "s"))


@pytest.mark.usefixtures("pins_without_device")
class TestPinningOfTensors:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(5).expand(3, 5),
            torch.arange(3).view(3, 1).expand(3, 5),
            torch.arange(1).expand(4),
            torch.arange(12).view(3, 4)[:, ::2],
            torch.arange(5).unfold(0, 3, 1),
            torch.empty(0, 4),
            torch.empty(4, 0).expand(2, 4, 0),
            torch.arange(3)[1],
        ],
        ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
    )
    def test_any_strides_are_pinned_as_one_stretch(self, tensor: torch.Tensor) -> None:
        pinned = pin_batch({"x": tensor})["x"]
        assert torch.equal(pinned, tensor)
        assert pinned.dtype is tensor.dtype
        assert pinned.is_contiguous()
        assert pinned.is_pinned() == (tensor.numel() > 0)

    @pytest.mark.parametrize(
        "tensor", [torch.arange(12).view(3, 4).T, torch.arange(24).view(2, 3, 4).permute(2, 0, 1)]
    )
    def test_dense_tensors_keep_their_strides(self, tensor: torch.Tensor) -> None:
        pinned = pin_batch(tensor)
        assert torch.equal(pinned, tensor)
        assert pinned.stride() == tensor.stride()
        assert pinned.is_pinned()

    def test_a_view_of_pinned_memory_that_repeats_it_is_pinned_anew(self) -> None:
        pinned = pin_batch(torch.arange(5))
        assert pin_batch(pinned) is pinned
        assert pin_batch(pinned.expand(3, 5)).is_contiguous()


class TestDeviceMemory:
    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda self, stream: found.append((self.numel(), stream)),
            raising=False,
        )
        return found

    def test_memory_that_nobody_else_holds_is_kept(self, recorded: list[tuple[int, Any]]) -> None:
        batch: Any = {"a": torch.empty(1, device="meta"), "b": [torch.empty(2, device="meta")]}
        memory = DeviceMemory(batch)
        del batch
        memory.give_up_shared("s")
        assert recorded == []
        memory.give_up("s")
        memory.give_up("s")
        assert recorded == [(1, "s"), (2, "s")]

    def test_memory_that_somebody_holds_is_told_to_the_allocator(
        self, recorded: list[tuple[int, Any]]
    ) -> None:
        a, b, c, d = (torch.empty(n, device="meta") for n in (1, 2, 3, 4))
        batch: Any = {"a": a, "b": b, "c": c, "d": OnlyTo({"deep": d}), "host": torch.ones(5)}
        memory = DeviceMemory(batch)
        view, weight = b[1:], torch.ones(3, device="meta", requires_grad=True)
        product = weight * c  # autograd holds c
        del batch, b, c, d
        memory.give_up_shared("s")
        assert recorded == [(1, "s"), (2, "s"), (3, "s")]
        del a, view, product
        memory.give_up("t")
        assert recorded[3:] == [(4, "t")]

    def test_fields_that_stay_on_the_host_are_none_of_its_business(
        self, recorded: list[tuple[int, Any]]
    ) -> None:
        x, kept = torch.empty(1, device="meta"), torch.empty(2, device="meta")
        DeviceMemory({"x": x, "deep": {"kept": kept}}, ("deep.kept",)).give_up("s")
        assert recorded == [(1, "s")]

    def test_without_a_way_to_count_all_memory_counts_as_held(
        self, recorded: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("evenstep.device.memory._use_count", None)
        memory = DeviceMemory([torch.empty(1, device="meta")])
        memory.give_up_shared("s")
        assert recorded == [(1, "s")]
