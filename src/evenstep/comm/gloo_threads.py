"""Lets gloo's threads finish before their group is destroyed, where torch would otherwise wait for ever.

Before torch 2.8 a group is destroyed under Python's lock (pytorch/pytorch#154976). A thread of gloo that still holds the
last tensor of a collective needs that lock to free it, and the group waits for its threads.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

__all__ = ["destroy_process_group", "let_go"]

_DESTROYS_UNDER_LOCK = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8)
_LONG_ENOUGH = 0.1  # seconds for a thread that has nothing left to do but to drop a reference


def let_go() -> None:
    """Give the threads the lock for a moment, if a group could be destroyed next."""
    if _DESTROYS_UNDER_LOCK and dist.is_available() and dist.is_initialized():
        time.sleep(_LONG_ENOUGH)


def destroy_process_group() -> None:
    """Destroy every process group, if there are any."""
    if dist.is_available() and dist.is_initialized():
        let_go()
        dist.destroy_process_group()
