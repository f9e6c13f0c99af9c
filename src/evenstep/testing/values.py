"""Shows values to people, and writes over them to find who else holds their storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["overwrite", "show", "show_samples"]


def overwrite(tree: Any) -> None:
    """Writes over every tensor and array of ``tree``, to see who else looks at their storage."""
    if isinstance(tree, torch.Tensor):
        if tree.numel():
            tree.copy_(tree == 0 if tree.dtype == torch.bool else torch.full_like(tree, 77))
    elif isinstance(tree, np.ndarray):
        if tree.flags.writeable:
            tree[...] = 77
    elif isinstance(tree, Mapping):
        for value in tree.values():
            overwrite(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            overwrite(value)


def show(value: Any) -> str:
    """``value`` in a line, tensors as lists."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.tolist())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return repr(value)


def show_samples(samples: Sequence[Any]) -> str:
    """One line per sample."""
    return "\n".join(f"    {show(sample)}" for sample in samples)
