"""Messages of unknown length over a collective that needs to know it: from a constructor to its peers."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from evenstep.comm.buffers import Pool
from evenstep.comm.communicator import Communicator
from evenstep.errors import RemoteRankError, WireFormatError

__all__ = ["BATCH", "CONSTRUCTOR", "END", "ERROR", "Heard", "MessageChannel"]

BATCH, END, ERROR = 1, 2, 3

CONSTRUCTOR = 0  # its position in the group
_FIRST = 1 << 20  # bytes that are on their way first, while the rest is packed
_HEADER = struct.Struct(
    "<4sB3xIIIQQ"
)  # magic, kind, stream, bytes of JSON, of opaque data, number, bytes of the tail
_MAGIC = b"evmb"
_ALIGNMENT = 256
_SMALLEST = 2048
_GENEROUS = 1 << 19  # up to here it costs little to broadcast more than there is to say
_MEMORY = 3  # messages


@dataclass(slots=True)
class Heard:
    """One message as it came.

    Attributes:
        kind: BATCH, END or ERROR.
        document: Its JSON.
        extra: Its opaque bytes.
        tail: uint8 ``[n]``, a view that stays valid for as long as it is kept.
        guessed: Whether the tail lies where ``meanwhile`` was told.
    """

    kind: int
    document: bytes
    extra: bytes
    tail: torch.Tensor
    guessed: bool = False


class MessageChannel:
    """One rank's end of a channel from position 0 to all others.

    A message is a header (magic, kind, stream, number, lengths), a JSON document, opaque bytes and a tail of tensor
    bytes. Both sides know from the messages before how much is broadcast at once, in two pieces if it is much. What is
    more follows in one further broadcast, and the next message of that size will fit. Where messages are large and their
    sizes differ, the least of the last ones counts, so that few bytes travel for nothing.

    Args:
        communicator: The ranks of the replica.
        pool: Memory for messages; a tail is a view into it.
        largest_tail: No tail has more bytes.
    """

    def __init__(self, communicator: Communicator, pool: Pool, largest_tail: int) -> None:
        self._ranks = communicator.ranks
        self._pool = pool
        self._largest_tail = largest_tail
        self._capacity = _SMALLEST
        self._tail_at = _ALIGNMENT
        self._sizes: deque[int] = deque(maxlen=_MEMORY)
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
        fill: Callable[[torch.Tensor], Iterator[int]] | None = None,
    ) -> Iterator[torch.Tensor | None]:
        """The next message as what is to be broadcast, in order.

        ``fill`` writes its tail into the uint8 ``[tail]`` that it is given, step by step, and yields up to where.
        """
        head = _HEADER.pack(_MAGIC, kind, self._stream, len(document), len(extra), self._number, tail)
        body = len(head) + len(document) + len(extra)
        first = self._capacity
        tail_at, whole = self._measure(kind, body, tail)
        self._number += 1
        message = self._pool.take(max(first, whole))
        message.numpy()[:body] = np.frombuffer(head + document + extra, np.uint8)
        steps = fill(message[tail_at:whole]) if fill is not None and tail else iter(())
        begin, written = 0, whole - tail
        for end in [*_pieces(first), whole]:
            while written < min(end, whole):
                written = tail_at + next(steps)
            if begin < end:
                yield message[begin:end]
            begin = end

    def listen(
        self, meanwhile: Callable[[torch.Tensor], object]
    ) -> Generator[torch.Tensor | None, None, Heard]:
        """What the next message is to be received into, in order; returns it when all but its tail has arrived.

        Args:
            meanwhile: Called while it is on its way with where its tail will be, if it is like the one before.

        Raises:
            RemoteRankError: The constructor is in another stream.
            WireFormatError: What came is no message, or not the next one.
        """
        first, guess = self._capacity, self._tail_at
        message = self._pool.take(first)
        pieces = _pieces(first)
        begin = 0
        for end in pieces:
            yield message[begin:end]
            begin = end
        meanwhile(message[guess:])
        yield None
        sender = self._ranks[CONSTRUCTOR]
        magic, kind, stream, length, opaque, number, tail = _HEADER.unpack(
            message[: _HEADER.size].numpy().tobytes()
        )
        known = magic == _MAGIC and kind in (BATCH, END, ERROR) and tail <= self._largest_tail
        if not known or number != self._number:
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
        tail_at, whole = self._measure(kind, _HEADER.size + length + opaque, tail)
        if whole > first:
            yield from [None] * len(pieces)
            beginning, message = message, self._pool.take(whole)
            message[:first] = beginning
            yield message[first:]
        body = _HEADER.size + length + opaque
        if body > pieces[0]:
            yield from [None] * len(pieces)
        data = message[_HEADER.size : body].numpy().tobytes()
        guessed = whole <= first and tail_at == guess
        return Heard(kind, data[:length], data[length:], message[tail_at : tail_at + tail], guessed)

    def _measure(self, kind: int, body: int, tail: int) -> tuple[int, int]:
        """Where the tail of a message begins, and where it ends; takes note for the next, alike on both sides."""
        if not body <= self._tail_at <= body + _SMALLEST:  # else numbers of more digits do not move it
            self._tail_at = -(-body // _ALIGNMENT) * _ALIGNMENT
        tail_at = self._tail_at
        whole = tail_at + tail if tail else body
        if kind == BATCH:
            self._sizes.append(_round_up(whole))
            # Sizes that go up and down do not make every second message too long.
            lately = _round_up(self._capacity - max(self._capacity // 8, _SMALLEST))
            most = max(self._sizes[-1], lately)
            self._capacity = most if most <= _GENEROUS else max(_GENEROUS, min(self._sizes))
        return tail_at, whole


def _pieces(nbytes: int) -> list[int]:
    """Where the broadcasts of the first ``nbytes`` bytes of a message end."""
    return [nbytes] if nbytes < 2 * _FIRST else [_FIRST, nbytes]


def _round_up(nbytes: int) -> int:
    """To one of 32 to 64 sizes between powers of two, up to 16 KiB apart: at most a thirtieth is wasted."""
    step = max(_SMALLEST, 1 << max(min(nbytes.bit_length() - 6, 14), 0))
    return -(-nbytes // step) * step
