"""The large bytes of a group whose ranks share a host: copied once from memory that both have mapped, not through a socket.

The collective stays, and with it its order, its time limits and its faults; what it carries is a letter that says where in
the sender's memory the bytes lie. A receiver copies them out and then notes in the sender's first extent that it has, so that
the sender knows when it may write there again.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from evenstep.comm.buffers import BufferPool, PoolStatistics
from evenstep.comm.communicator import INHERITED, Abandoned
from evenstep.comm.host_memory import HostMemory, Memory, PeerMemory
from evenstep.errors import RemoteRankError, WireFormatError

__all__ = ["WORTH_SHARING", "Notes", "SharedMemory"]

WORTH_SHARING = 1 << 17  # bytes of a broadcast; fewer travel as fast as the letter about them
_MAGIC = 0x6C65_7474_6572_2031  # "letter 1"
# Magic, collective, position of the sender, where the extent begins and ends in its memory, where the bytes begin in that,
# how many they are (-1: it has no memory to share), and one that is left.
_LETTER = struct.Struct("<8q")
_IDLE_BYTES = 1 << 30
_GLANCE = 5e-5  # seconds between two looks at what readers note

AllToAll: TypeAlias = Callable[[torch.Tensor, list[int], torch.Tensor, list[int]], None]
BroadcastAll: TypeAlias = Callable[[Iterable[torch.Tensor | None], int], None]
Notes: TypeAlias = npt.NDArray[np.int64]


class SharedMemory:
    """One rank's end of the shared memory of a group; made by `evenstep.comm.introduction.share_memory`.

    Args:
        ranks: Global rank at each position.
        position: This rank's.
        own: Memory that the others have opened.
        finished: In ``own``: by position, the last collective whose bytes that rank has copied out.
        peers: Everybody's memory, by position, and what this rank notes there.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        position: int,
        own: HostMemory,
        finished: Notes,
        peers: Sequence[tuple[PeerMemory, Notes]],
    ) -> None:
        self._ranks = ranks
        self._position = position
        self._own = own
        self._finished = finished
        self._peers = peers
        self._turn = 0
        self._lent: deque[tuple[int, list[int], torch.Tensor]] = deque()  # until its readers have finished
        # Others may still read what was sent last when this rank has left.
        weakref.finalize(self, own.retire).atexit = False
        self._process = os.getpid()
        self._pool = BufferPool(_IDLE_BYTES, weakref.proxy(self))

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer to send from without a copy, as `BufferPool.take`'s.

        It is private memory where there is none to share; sending from that tells the others so.
        """
        try:
            return self._pool.take(nbytes)
        except OSError:
            return torch.empty(nbytes, dtype=torch.uint8)

    def statistics(self) -> PoolStatistics:
        """What the pool of shared buffers did so far."""
        return self._pool.statistics()

    def allocate(self, nbytes: int) -> Memory:
        """See `MemorySource.allocate`."""
        return self._own.allocate(nbytes)

    def reclaim(self, patience: float = 0.0) -> bool:
        """Let go of what all its readers have copied out, and say whether there was any; see `MemorySource.reclaim`."""
        if os.getpid() != self._process:
            raise Abandoned(INHERITED)
        deadline = time.monotonic() + patience
        before = len(self._lent)
        while self._lent:
            turn, readers, _ = self._lent[0]
            if all(self._finished[reader] >= turn for reader in readers):
                self._lent.popleft()
            elif len(self._lent) < before or time.monotonic() >= deadline:
                break
            else:
                time.sleep(_GLANCE)
        return len(self._lent) < before

    def all_to_all(
        self,
        wire: AllToAll,
        send: torch.Tensor,
        send_splits: list[int],
        receive: torch.Tensor,
        receive_splits: list[int],
    ) -> None:
        """`Communicator.all_to_all`, with ``wire`` for the letters."""
        me, turn = self._position, self._next_turn()
        readers = [p for p, nbytes in enumerate(send_splits) if nbytes and p != me]
        senders = [p for p, nbytes in enumerate(receive_splits) if nbytes and p != me]
        place = self._lend(send, readers, turn) if readers else None
        begins = [end - size for end, size in zip(accumulate(send_splits), send_splits, strict=True)]
        out = b"".join(self._letter(turn, place, begins[p], send_splits[p]) for p in readers)
        answers = torch.empty(len(senders) * _LETTER.size, dtype=torch.uint8)
        wire(_tensor(out), self._splits(readers), answers, self._splits(senders))
        if readers and place is None:
            raise MemoryError(f"there is no memory for {send.numel()} bytes that other ranks wait for")
        parts = [
            receive[end - n : end] for end, n in zip(accumulate(receive_splits), receive_splits, strict=True)
        ]
        if send_splits[me]:
            parts[me].copy_(send[begins[me] : begins[me] + send_splits[me]])
        for letter, sender in zip(answers.view(-1, _LETTER.size), senders, strict=True):
            self._fetch(letter, sender, turn, parts[sender])

    def broadcast_all(self, wire: BroadcastAll, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        """`Communicator.broadcast_all`, with ``wire`` for the letters and for what is small."""
        if source == self._position:
            wire(self._outgoing(buffers), source)
            return
        awaited: deque[tuple[torch.Tensor, torch.Tensor, int] | None] = deque()
        wire(self._incoming(buffers, awaited, source), source)
        while awaited:
            self._arrived(awaited.popleft(), source)

    def _outgoing(self, buffers: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        readers = [p for p in range(len(self._ranks)) if p != self._position]
        for buffer in buffers:
            if buffer is None or buffer.numel() < WORTH_SHARING:
                yield buffer
                continue
            turn = self._next_turn()
            place = self._lend(buffer, readers, turn)
            yield _tensor(self._letter(turn, place, 0, buffer.numel()))
            if place is None:
                raise MemoryError(f"there is no memory for {buffer.numel()} bytes that other ranks wait for")

    def _incoming(
        self,
        buffers: Iterable[torch.Tensor | None],
        awaited: deque[tuple[torch.Tensor, torch.Tensor, int] | None],
        source: int,
    ) -> Iterator[torch.Tensor | None]:
        for buffer in buffers:
            if buffer is None:
                yield None  # the first of those on their way has arrived
                if awaited:
                    self._arrived(awaited.popleft(), source)
            elif buffer.numel() < WORTH_SHARING:
                awaited.append(None)
                yield buffer
            else:
                letter = torch.empty(_LETTER.size, dtype=torch.uint8)
                awaited.append((letter, buffer, self._next_turn()))
                yield letter

    def _arrived(self, found: tuple[torch.Tensor, torch.Tensor, int] | None, source: int) -> None:
        if found is not None:
            letter, buffer, turn = found
            self._fetch(letter, source, turn, buffer)

    def _next_turn(self) -> int:
        self._turn += 1  # alike on all ranks, which call the same collectives
        self.reclaim()
        return self._turn

    def _lend(self, data: torch.Tensor, readers: list[int], turn: int) -> tuple[int, int, int] | None:
        """Where its readers find ``data``: an extent, and where in it; None if there is no memory to share.

        What lies in memory of ours comes from a pool, and is not written again for as long as it is referred to.
        """
        found = self._own.find(data)
        if found is None:
            copied = self.take(data.numel())
            found = self._own.find(copied)
            if found is None:
                return None
            data = copied.copy_(data)
        self._lent.append((turn, readers, data))
        (start, size), at = found
        return start, size, at

    def _letter(self, turn: int, place: tuple[int, int, int] | None, begin: int, nbytes: int) -> bytes:
        if place is None:
            return _LETTER.pack(_MAGIC, turn, self._position, 0, 0, 0, -1, 0)
        start, size, at = place
        return _LETTER.pack(_MAGIC, turn, self._position, start, size, at + begin, nbytes, 0)

    def _splits(self, positions: list[int]) -> list[int]:
        splits = [0] * len(self._ranks)
        for position in positions:
            splits[position] = _LETTER.size
        return splits

    def _fetch(self, letter: torch.Tensor, sender: int, turn: int, into: torch.Tensor) -> None:
        memory, notes = self._peers[sender]
        try:
            magic, told, position, start, size, at, nbytes, _ = _LETTER.unpack(letter.numpy().tobytes())
            if (magic, told, position, nbytes) == (_MAGIC, turn, sender, -1):
                raise RemoteRankError(
                    f"rank {self._ranks[sender]} has no memory left to share {into.numel()} bytes from; look at its own "
                    "error, or build the loader with shared_memory=False",
                    rank=self._ranks[sender],
                )
            if (magic, told, position, nbytes) != (_MAGIC, turn, sender, into.numel()) or not (
                0 <= at <= size - nbytes
            ):
                raise WireFormatError(
                    f"a letter of rank {self._ranks[sender]} is of {nbytes} bytes at {at} of {size} in its collective "
                    f"{told}, the plan says {into.numel()} bytes in collective {turn}: it belongs to another exchange, "
                    "and nothing of it is used"
                )
            into.copy_(torch.from_numpy(memory.view((start, size))[at : at + nbytes]))
        except OSError as error:
            raise WireFormatError(
                f"a letter of rank {self._ranks[sender]} tells of {size} bytes at {start} of its memory, which are not "
                f"there: {error}"
            ) from None
        finally:
            notes[self._position] = turn


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
