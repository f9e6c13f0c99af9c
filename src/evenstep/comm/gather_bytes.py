"""Gathers bytes of which every rank has its own number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from evenstep.comm.communicator import Communicator

__all__ = ["gather_bytes", "gather_padded"]


def gather_bytes(communicator: Communicator, data: bytes) -> list[bytes]:
    """Every rank's bytes by position: the lengths first, then one padded gather."""
    size = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    sizes = communicator.all_gather(size).view(torch.int64).flatten().tolist()
    return gather_padded(communicator, data, sizes)


def gather_padded(communicator: Communicator, data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The same where the ``sizes`` by position are known already."""
    row = torch.zeros(max(max(sizes), 1), dtype=torch.uint8)
    row.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    rows = communicator.all_gather(row).numpy()
    return [rows[p, :size].tobytes() for p, size in enumerate(sizes)]
