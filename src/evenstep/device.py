"""Move batches to an accelerator behind the training stream's back: the only file that knows streams.

One code path for every accelerator that `torch.get_device_module` knows (cuda, npu, xpu, ...). Whatever has the
methods of `Streams` can stand in for one, as `evenstep.testing.simulated_device` does.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from evenstep.tree import flatten, map_leaves

__all__ = [
    "DeviceLike",
    "DeviceMemory",
    "Event",
    "Stream",
    "Streams",
    "TorchStreams",
    "bind_thread",
    "is_accelerator",
    "pin_batch",
    "streams_of",
    "to_device",
]


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Any) -> None:
        """Put the mark behind everything ``stream`` was given so far."""

    def query(self) -> bool:
        """Whether the device has passed the mark; does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any) -> None:
        """Work given to this stream from now on starts after ``event``; the caller does not wait."""


class Streams(Protocol):
    """An accelerator, as far as moving batches needs one.

    Attributes:
        device: What ``.to(...)`` of a batch's leaves takes.
    """

    device: Any

    def new_stream(self) -> Stream:
        """A stream of its own."""

    def new_event(self) -> Event:
        """An event that nobody has recorded."""

    def current_stream(self) -> Stream:
        """The stream on which the calling thread launches work for the device."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` (and its device) current in the calling thread."""

    def bind(self) -> AbstractContextManager[Any]:
        """Make the device current in the calling thread."""


DeviceLike: TypeAlias = "torch.device | str | Streams"


class TorchStreams:
    """An accelerator of this process, through `torch.get_device_module`.

    Args:
        device: An accelerator; without an index, the one that is current in the calling thread.

    Raises:
        ValueError: This build of torch has no streams for the device.
    """

    def __init__(self, device: torch.device | str) -> None:
        wanted = torch.device(device)
        try:
            module = torch.get_device_module(wanted)
            self._stream, self._event = module.Stream, module.Event
            self._on, self._current, self._bind = module.stream, module.current_stream, module.device
        except (AttributeError, RuntimeError) as error:
            raise ValueError(
                f"device {str(wanted)!r} has no streams in this build of torch ({error}): batches cannot be copied "
                "ahead. Install the build (or extension, such as torch-npu) for it, or pass device='cpu' and "
                "move the batches in the training loop."
            ) from None
        index = module.current_device() if wanted.index is None else wanted.index
        self.device: torch.device = torch.device(wanted.type, index)

    def new_stream(self) -> Stream:
        """A stream on this device."""
        stream: Stream = self._stream(device=self.device)
        return stream

    def new_event(self) -> Event:
        """An event without timing, which is cheaper."""
        event: Event = self._event()
        return event

    def current_stream(self) -> Stream:
        """The calling thread's current stream of this device."""
        stream: Stream = self._current(self.device)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The device module's own stream context."""
        context: AbstractContextManager[Any] = self._on(stream)
        return context

    def bind(self) -> AbstractContextManager[Any]:
        """The device module's own device context."""
        context: AbstractContextManager[Any] = self._bind(self.device)
        return context


def is_accelerator(device: DeviceLike) -> bool:
    """Whether batches must be copied to get there (anything but ``"cpu"``)."""
    return not isinstance(device, (str, torch.device)) or torch.device(device).type != "cpu"


def streams_of(device: DeviceLike) -> Streams:
    """The streams of an accelerator; an object that already has the methods of `Streams` is returned itself."""
    return TorchStreams(device) if isinstance(device, (str, torch.device)) else device


def bind_thread(device: DeviceLike) -> None:
    """Make ``device`` current in the calling thread, for its life; nothing to do on the CPU."""
    if isinstance(device, (str, torch.device)) and is_accelerator(device):
        torch.get_device_module(torch.device(device)).set_device(TorchStreams(device).device)


def pin_batch(batch: Any, cpu_fields: Collection[str] = ()) -> Any:
    """``batch`` with every CPU tensor, and every object with ``pin_memory()``, in page-locked memory.

    Args:
        batch: Any nesting that `evenstep.tree` knows; it is not changed.
        cpu_fields: Paths (``"labels"``, ``"vision.grid"``) that stay on the host, so need no pinning.
    """

    def pin(path: str, leaf: Any) -> Any:
        if _is_under(path, cpu_fields):
            return leaf
        if isinstance(leaf, torch.Tensor):
            ordinary = leaf.device.type == "cpu" and leaf.layout == torch.strided
            return leaf.pin_memory() if ordinary and not leaf.is_pinned() else leaf
        return leaf.pin_memory() if _has(leaf, "pin_memory") else leaf

    return map_leaves(pin, batch, opaque=_does("pin_memory"))


def to_device(batch: Any, device: Any, cpu_fields: Collection[str] = ()) -> Any:
    """``batch`` with every tensor, and every object with ``to()``, copied to ``device`` without waiting.

    Args:
        batch: Any nesting that `evenstep.tree` knows; it is not changed.
        device: What ``to()`` of the leaves takes.
        cpu_fields: Paths (``"labels"``, ``"vision.grid"``) that stay where they are.
    """

    def move(path: str, leaf: Any) -> Any:
        if _is_under(path, cpu_fields):
            return leaf
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return _move_object(leaf, device) if _has(leaf, "to") else leaf

    return map_leaves(move, batch, opaque=_does("to"))


class DeviceMemory:
    """All that a batch holds in device memory (also inside objects that moved themselves), kept from being freed.

    Memory is freed into the pool of the stream that it was allocated on, for the next allocation there to use at once.
    So its other users must be ordered before that: by an event, which `DevicePrefetch` sees to, as long as nobody
    but this object holds it; by ``record_stream`` where others do, since nobody knows for how long.
    """

    def __init__(self, batch: Any, cpu_fields: Collection[str] = ()) -> None:
        found: list[Any] = []
        for path, leaf in flatten(batch, opaque=_does("to")):
            if not _is_under(path, cpu_fields):
                _collect(leaf, found, depth=0)
        self._held = [_own(leaf) for leaf in found]

    def give_up_shared(self, stream: Any) -> None:
        """Keep only what nobody else holds; the rest, once freed, waits for what ``stream`` was given by then."""
        alone = []
        for at in range(len(self._held)):
            if _holders(self._held, at) > _holders_of_one(self._held[at]):
                self._held[at].record_stream(stream)
            else:
                alone.append(at)
        self._held = [self._held[at] for at in alone]

    def give_up(self, stream: Any) -> None:
        """Keep nothing; all of it, once freed, waits for what ``stream`` was given by then."""
        for leaf in self._held:
            leaf.record_stream(stream)
        self._held = []


def _own(leaf: Any) -> Any:
    """An alias that nobody else has, so that the other holders of the same memory can be counted."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


# As torch's CUDA graph trees do: views and autograd hold the storage, not the tensor.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _holders(held: list[Any], at: int) -> int:
    if not isinstance(held[at], torch.Tensor):
        return sys.getrefcount(held[at])
    # Without the count, everything counts as shared: memory then grows while the host runs ahead.
    return sys.maxsize if _use_count is None else _use_count(held[at].untyped_storage()._cdata)


def _holders_of_one(leaf: Any) -> int:
    return _TENSOR_HOLDERS if isinstance(leaf, torch.Tensor) else _OBJECT_HOLDERS


_TENSOR_HOLDERS = _holders([torch.empty(1)], 0) if _use_count is not None else 0
_OBJECT_HOLDERS = _holders([object()], 0)


def _collect(leaf: Any, found: list[Any], depth: int) -> None:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu":
            found.append(leaf)
    elif _has(leaf, "record_stream"):
        found.append(leaf)
    elif _has(leaf, "to") and depth < _MAX_OBJECT_DEPTH:
        # An object that moves itself says nothing of its tensors: they are among its attributes.
        for value in _attributes(leaf):
            for _, inner in flatten(value):
                _collect(inner, found, depth + 1)


_MAX_OBJECT_DEPTH = 4


def _attributes(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = [getattr(value, name) for name in slots if hasattr(value, name)]
    found.extend(getattr(value, "__dict__", {}).values())
    return found


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _move_object(value: Any, device: Any) -> Any:
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # a to() of the ecosystem that takes the device alone
        return value.to(device)


def _has(value: Any, method: str) -> bool:
    return not isinstance(value, type) and callable(getattr(value, method, None))


def _does(method: str) -> Callable[[Any], bool]:
    """Containers that do it themselves; dict-likes excepted, whose ``to()`` is known to change them in place."""
    return lambda value: not isinstance(value, (dict, UserDict)) and _has(value, method)


def _is_under(path: str, fields: Collection[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in fields)
