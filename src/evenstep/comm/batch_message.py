"""Messages of unknown length over a collective that needs to know it: from a constructor to its peers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep.comm.buffers import BufferPool
from evenstep.comm.communicator import Communicator
from evenstep.errors import RemoteRankError, WireFormatError

__all__ = ["BATCH", "CONSTRUCTOR", "END", "ERROR", "Heard", "MessageChannel"]

BATCH, END, ERROR = 1, 2, 3

CONSTRUCTOR = 0  # its position in the group
_HEADER = struct.Struct(
    "<4sB3xIIIQQ"
)  # magic, kind, stream, bytes of JSON, of opaque data, number, bytes of the tail
_MAGIC = b"evmb"
_ALIGNMENT = 64
_SMALLEST = 2048
_LARGEST_INLINE = 1 << 19  # beyond, peers read the message while the tail is packed, and wait for it by then


@dataclass(slots=True)
class Heard:
    """One message as it came.

    Attributes:
        kind: BATCH, END or ERROR.
        told: Its document.
        extra: Its opaque bytes.
        tail_bytes: Size of its tail.
        tail: uint8 ``[tail_bytes]``, a view that stays valid for as long as it is kept; None: it did not fit, and is the
            next broadcast.
    """

    kind: int
    told: dict[str, Any]
    extra: bytes
    tail_bytes: int
    tail: torch.Tensor | None


class MessageChannel:
    """One rank's end of a channel from position 0 to all others.

    A message is a header (magic, kind, stream, number, lengths), a JSON document, opaque bytes and a tail of tensor
    bytes. The first broadcast has a size that both sides know from the message before. What does not fit goes on in
    further broadcasts, and the next message of that size will fit: one broadcast for a batch of small tensors.

    Args:
        communicator: The ranks of the replica.
        pool: Memory for messages; a tail is a view into it.
    """

    def __init__(self, communicator: Communicator, pool: BufferPool) -> None:
        self._communicator = communicator
        self._pool = pool
        self._capacity = _SMALLEST
        self._number = 0
        self._stream = 0

    def restart(self) -> None:
        """The next message is the first of another stream (an epoch, a loaded state)."""
        self._stream = (self._stream + 1) & 0xFFFFFFFF

    def compose(
        self,
        kind: int,
        document: bytes,
        extra: bytes = b"",
        tail: int = 0,
        fill: Callable[[torch.Tensor], object] | None = None,
    ) -> Iterator[torch.Tensor]:
        """The next message as what is to be broadcast, in order.

        ``fill`` writes its tail into the uint8 ``[tail]`` that it is given.
        """
        head = _HEADER.pack(_MAGIC, kind, self._stream, len(document), len(extra), self._number, tail)
        body = len(head) + len(document) + len(extra)
        sizes = self._sizes(body, tail)
        self._number += 1
        message = self._pool.take(max(sizes.first, body))
        message.numpy()[:body] = np.frombuffer(head + document + extra, np.uint8)
        if sizes.tail_at is not None and fill is not None:
            fill(message[sizes.tail_at : sizes.tail_at + tail])
        yield message[: sizes.first]
        if body > sizes.first:
            yield message[sizes.first :]
        if sizes.tail_at is None and fill is not None:
            alone = self._pool.take(tail)
            fill(alone)
            yield alone

    def listen(self) -> Heard:
        """Wait for the next message.

        Raises:
            RemoteRankError: The constructor is in another stream, or is gone.
            WireFormatError: What came is no message, or not the next one.
        """
        message = self._pool.take(self._capacity)
        self._communicator.broadcast(message, CONSTRUCTOR)
        sender = self._communicator.ranks[CONSTRUCTOR]
        head = message[: _HEADER.size].numpy().tobytes()
        magic, kind, stream, length, opaque, number, tail = _HEADER.unpack(head)
        if magic != _MAGIC or kind not in (BATCH, END, ERROR) or number != self._number:
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
        body = _HEADER.size + length + opaque
        sizes = self._sizes(body, tail)
        data = message[_HEADER.size : min(body, sizes.first)].numpy().tobytes()
        if body > sizes.first:
            data += self._receive(body - sizes.first).numpy().tobytes()
        inside = None if sizes.tail_at is None else message[sizes.tail_at : sizes.tail_at + tail]
        return Heard(kind, json.loads(data[:length]), data[length:], tail, inside)

    def _receive(self, nbytes: int) -> torch.Tensor:
        buffer = self._pool.take(nbytes)
        self._communicator.broadcast(buffer, CONSTRUCTOR)
        return buffer

    def _sizes(self, body: int, tail: int) -> _Sizes:
        """How a message is cut, and the capacity of the next one: the same on both sides."""
        first = self._capacity
        tail_at = -(-body // _ALIGNMENT) * _ALIGNMENT
        needed = tail_at + tail if tail <= _LARGEST_INLINE else body
        # Sizes that go up and down do not make every second message too long.
        self._capacity = max(_round_up(needed), _round_up(first - max(first // 8, _SMALLEST)))
        return _Sizes(first, tail_at if tail_at + tail <= first or not tail else None)


class _Sizes(NamedTuple):
    first: int  # bytes of the first broadcast
    tail_at: int | None  # where the tail begins in it; None if it travels alone


def _round_up(nbytes: int) -> int:
    """To one of 32 to 64 sizes between powers of two: at most a thirtieth is wasted."""
    step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 6, 0))
    return -(-nbytes // step) * step
