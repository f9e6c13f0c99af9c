"""How a collective is started: by its group's own method, with everything that it needs at hand.

The functions of torch.distributed check what a communicator knows anyway. In a thread that comes from other work, as a
training thread does, that takes longer than the start itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["all_gather", "all_to_all", "broadcast"]

# torch 2.13 renamed them.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"


def all_gather(group: dist.ProcessGroup, out: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
    """Starts to gather ``source`` (``[n]``) into ``out`` (``[size * n]``); returns the work."""
    return partial(getattr(group, _ALL_GATHER), out, source, _options("AllgatherOptions"))


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, root: int) -> Callable[[], Any]:
    """Starts to fill ``buffer`` with that of torch's position ``root``; returns the work."""
    options = _options("BroadcastOptions")
    options.rootRank = root
    return partial(group.broadcast, [buffer], options)


def all_to_all(
    group: dist.ProcessGroup,
    receive: torch.Tensor,
    send: torch.Tensor,
    receive_splits: list[int],
    send_splits: list[int],
) -> Callable[[], Any]:
    """Starts to exchange the parts of ``send``; returns the work."""
    method = getattr(group, _ALL_TO_ALL)
    return partial(method, receive, send, receive_splits, send_splits, _options("AllToAllOptions"))


def _options(name: str) -> Any:
    options = getattr(distributed_c10d, name)()
    if hasattr(options, "asyncOp"):  # of an all-to-all torch 2.6 has none
        options.asyncOp = True
    return options
