"""Pins batches and copies them, whatever they are made of, and keeps their types."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection
from typing import Any

import torch

from evenstep.tree import map_leaves

__all__ = ["does", "has", "is_under", "pin_batch", "to_device"]


def pin_batch(batch: Any, cpu_fields: Collection[str] = ()) -> Any:
    """``batch`` with every CPU tensor, and every object with ``pin_memory()``, in page-locked memory.

    Args:
        batch: Any nesting that `evenstep.tree` knows; it is not changed.
        cpu_fields: Paths (``"labels"``, ``"vision.grid"``) that stay on the host, so need no pinning.
    """

    def pin(path: str, leaf: Any) -> Any:
        if is_under(path, cpu_fields):
            return leaf
        if isinstance(leaf, torch.Tensor):
            return _pin_tensor(leaf) if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        return leaf.pin_memory() if has(leaf, "pin_memory") else leaf

    return map_leaves(pin, batch, opaque=does("pin_memory"))


def _pin_tensor(leaf: torch.Tensor) -> torch.Tensor:
    # pin_memory() keeps strides, so it fails where elements share memory (expand()). From memory with gaps the copy to
    # the device would go through a pageable one, for which the host waits.
    packed = leaf if _is_dense(leaf) else leaf.contiguous()
    return packed if packed.is_pinned() else packed.pin_memory()


def _is_dense(leaf: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each its own place, in any order of the dimensions."""
    # Of such tensors alone, empty_like keeps the strides.
    return leaf.is_contiguous() or torch.empty_like(leaf, device="meta").stride() == leaf.stride()


def to_device(batch: Any, device: Any, cpu_fields: Collection[str] = ()) -> Any:
    """``batch`` with every tensor, and every object with ``to()``, copied to ``device`` without waiting.

    Args:
        batch: Any nesting that `evenstep.tree` knows; it is not changed.
        device: What ``to()`` of the leaves takes.
        cpu_fields: Paths (``"labels"``, ``"vision.grid"``) that stay where they are.
    """

    def move(path: str, leaf: Any) -> Any:
        if is_under(path, cpu_fields):
            return leaf
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return _move_object(leaf, device) if has(leaf, "to") else leaf

    return map_leaves(move, batch, opaque=does("to"))


def _move_object(value: Any, device: Any) -> Any:
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # a to() of the ecosystem that takes the device alone
        return value.to(device)


def has(value: Any, method: str) -> bool:
    """Whether ``value`` is an object with ``method``."""
    return not isinstance(value, type) and callable(getattr(value, method, None))


def does(method: str) -> Callable[[Any], bool]:
    """Containers that do it themselves; dict-likes excepted, whose ``to()`` is known to change them in place."""
    return lambda value: not isinstance(value, (dict, UserDict)) and has(value, method)


def is_under(path: str, fields: Collection[str]) -> bool:
    """Whether ``path`` is one of ``fields`` or inside one."""
    return any(path == name or path.startswith(f"{name}.") for name in fields)
