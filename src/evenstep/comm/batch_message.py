"""Messages of unknown length over a collective that needs to know it: from a constructor to its peers."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch

from evenstep.comm.communicator import Communicator
from evenstep.errors import RemoteRankError, WireFormatError

__all__ = ["BATCH", "CONSTRUCTOR", "END", "ERROR", "MessageChannel"]

BATCH, END, ERROR = 1, 2, 3

CONSTRUCTOR = 0  # its position in the group
_HEADER = struct.Struct(
    "<4sB3xIIQQ"
)  # magic, kind, stream, bytes of JSON, number, bytes of the whole message
_MAGIC = b"evmb"
_FIRST_CAPACITY = 2048
_LAST_CAPACITY = 1 << 16


class MessageChannel:
    """One rank's end of a channel from position 0 to all others.

    A message is a header (magic, kind, stream, number, lengths), a JSON document and opaque bytes. The first
    broadcast has a size that both sides know; a message that is longer goes on in a second one, and the next of
    its size will fit.

    Args:
        communicator: The ranks of the replica.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._capacity = _FIRST_CAPACITY
        self._number = 0
        self._stream = 0

    def restart(self) -> None:
        """The next message is the first of another stream (an epoch, a loaded state)."""
        self._stream = (self._stream + 1) & 0xFFFFFFFF

    def post(self, kind: int, document: bytes, extra: bytes = b"") -> None:
        """Send one message."""
        size = _HEADER.size + len(document) + len(extra)
        head = _HEADER.pack(_MAGIC, kind, self._stream, len(document), self._number, size)
        capacity = self._capacity
        self._number += 1
        message = torch.zeros(max(size, capacity), dtype=torch.uint8)
        message.numpy()[:size] = np.frombuffer(head + document + extra, np.uint8)
        self._communicator.broadcast(message[:capacity], CONSTRUCTOR)
        if size > capacity:
            self._communicator.broadcast(message[capacity:], CONSTRUCTOR)
        self._capacity = _next_capacity(capacity, size)

    def listen(self) -> tuple[int, dict[str, Any], bytes]:
        """Wait for the next message: its kind, document and opaque bytes.

        Raises:
            RemoteRankError: The constructor is in another stream, or is gone.
            WireFormatError: What came is no message, or not the next one.
        """
        capacity = self._capacity
        message = torch.empty(capacity, dtype=torch.uint8)
        self._communicator.broadcast(message, CONSTRUCTOR)
        sender = self._communicator.ranks[CONSTRUCTOR]
        head = message[: _HEADER.size].numpy().tobytes()
        magic, kind, stream, length, number, size = _HEADER.unpack(head)
        known = magic == _MAGIC and kind in (BATCH, END, ERROR)
        if not known or number != self._number or size < _HEADER.size + length:
            raise WireFormatError(
                f"rank {sender} sent no header of message {self._number}: its program does other collectives in the group "
                "of this data-parallel replica, which belongs to the loader alone"
            )
        if stream != self._stream:
            raise RemoteRankError(
                f"rank {sender} is in stream {stream} of its loader and this rank in stream {self._stream}: one of them "
                "began an epoch or loaded a state that the other did not, so they would train on different batches. "
                "Call iter(), load_state_dict() and set_epoch() on every rank.",
                rank=sender,
            )
        self._number += 1
        if size > capacity:
            rest = torch.empty(size - capacity, dtype=torch.uint8)
            self._communicator.broadcast(rest, CONSTRUCTOR)
            message = torch.cat([message, rest])
        self._capacity = _next_capacity(capacity, size)
        data = message.numpy()[_HEADER.size : size].tobytes()
        return kind, json.loads(data[:length]), data[length:]


def _next_capacity(capacity: int, size: int) -> int:
    while capacity < min(size, _LAST_CAPACITY):
        capacity *= 2
    return capacity
