"""How ranks find out whether they share a host: each shows its memory, and all must be able to look into all of it."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from evenstep.comm.host_memory import HostMemory, Memory, PeerMemory
from evenstep.comm.shared_memory import Notes, SharedMemory

__all__ = ["share_memory"]

log: logging.Logger = logging.getLogger("evenstep")

_WORD = 8
_TOKEN = 16
_INTRODUCTION = struct.Struct(f"<qq{_TOKEN}s")  # process, descriptor, what its first extent begins with


class _Gathers(Protocol):
    ranks: tuple[int, ...]
    position: int

    def all_gather(self, row: torch.Tensor) -> torch.Tensor: ...


def share_memory(communicator: _Gathers) -> SharedMemory | None:
    """The shared memory of a group, or None if not every rank can look into the memory of every other.

    All ranks of the group call it together. It is None across hosts, across containers with processes of their own, and
    where the system has no anonymous files.
    """
    own, token = None, os.urandom(_TOKEN)
    words = len(communicator.ranks)
    introduction = bytes(_INTRODUCTION.size)
    try:
        own = HostMemory()
        first = own.allocate(_TOKEN + _WORD * words)
        first[:_TOKEN] = np.frombuffer(token, np.uint8)
        introduction = _INTRODUCTION.pack(os.getpid(), own.descriptor, token)
    except OSError as error:
        log.debug("this rank has no memory to share: %s", error)
    told = communicator.all_gather(torch.frombuffer(bytearray(introduction), dtype=torch.uint8))
    peers = _open([bytes(row.numpy()) for row in told], words) if own is not None else None
    verdicts = communicator.all_gather(torch.tensor([peers is not None], dtype=torch.uint8))
    if own is None or peers is None or not verdicts.all():
        return None
    return SharedMemory(communicator.ranks, communicator.position, own, _notes(first, words), peers)


def _open(introductions: Sequence[bytes], words: int) -> list[tuple[PeerMemory, Notes]] | None:
    """The memory of every rank; None if one cannot be opened, or is of somebody else of that number."""
    peers = []
    for introduction in introductions:
        process, descriptor, token = _INTRODUCTION.unpack(introduction)
        if not process:
            return None
        try:
            memory = PeerMemory(process, descriptor)
            first = memory.first(_TOKEN + _WORD * words)
        except OSError:
            return None
        if first[:_TOKEN].tobytes() != token:
            return None
        peers.append((memory, _notes(first, words)))
    return peers


def _notes(first: Memory, words: int) -> Notes:
    return first[_TOKEN : _TOKEN + _WORD * words].view(np.int64)
