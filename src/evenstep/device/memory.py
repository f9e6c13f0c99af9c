"""Keeps the device memory of a batch until all who used it are ordered before its next use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

from evenstep.device.batches import does, has, is_under
from evenstep.tree import flatten

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """All that a batch holds in device memory (also inside objects that moved themselves), kept from being freed.

    Memory is freed into the pool of the stream that it was allocated on, for the next allocation there to use at once.
    So its other users must be ordered before that: by an event, which `DevicePrefetch` sees to, as long as nobody
    but this object holds it; by ``record_stream`` where others do, since nobody knows for how long.
    """

    def __init__(self, batch: Any, cpu_fields: Collection[str] = ()) -> None:
        found: list[Any] = []
        for path, leaf in flatten(batch, opaque=does("to")):
            if not is_under(path, cpu_fields):
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
    elif has(leaf, "record_stream"):
        found.append(leaf)
    elif has(leaf, "to") and depth < _MAX_OBJECT_DEPTH:
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
