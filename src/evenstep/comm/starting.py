"""Starts a collective by its group's own method, at a third of what the functions of torch.distributed take for it.

They check what a communicator knows anyway. In a thread that comes from other work, such as a training thread, that is
as much again as the start itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["all_gather", "all_to_all", "broadcast"]

# torch 2.13 renamed them.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"


def all_gather(group: dist.ProcessGroup, out: torch.Tensor, source: torch.Tensor) -> Any:
    """Start to gather ``source`` (``[n]``) into ``out`` (``[size * n]``); returns the work."""
    return getattr(group, _ALL_GATHER)(out, source, _options("AllgatherOptions"))


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, root: int) -> Any:
    """Start to fill ``buffer`` with that of position ``root`` of torch's; returns the work."""
    options = _options("BroadcastOptions")
    options.rootRank = root
    return group.broadcast([buffer], options)


def all_to_all(
    group: dist.ProcessGroup,
    receive: torch.Tensor,
    send: torch.Tensor,
    receive_splits: list[int],
    send_splits: list[int],
) -> Any:
    """Start to exchange the parts of ``send``; returns the work."""
    start = getattr(group, _ALL_TO_ALL)
    return start(receive, send, receive_splits, send_splits, _options("AllToAllOptions"))


def _options(name: str) -> Any:
    if not dist.is_initialized():
        raise RuntimeError("the process groups have been destroyed")
    options = getattr(distributed_c10d, name)()
    options.asyncOp = True
    return options
