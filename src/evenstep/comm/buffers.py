"""Memory for segments, used again and again: fresh pages cost three times the copy into them."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["BufferPool", "MemorySource", "Pool", "PoolStatistics"]

ALIGNMENT = 64
Memory: TypeAlias = npt.NDArray[np.uint8]
_SMALLEST = 4096
_PATIENCE = 0.002  # seconds


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool did since it was made.

    Attributes:
        hits: Buffers handed out from the pool.
        misses: Buffers allocated.
        dropped: Buffers freed because the pool was full.
        idle_bytes: Bytes that wait in the pool now; never more than ``max_bytes``.
        used_bytes: Bytes of buffers of which a view is alive now.
        peak_bytes: The most of idle and used bytes together.
    """

    hits: int
    misses: int
    dropped: int
    idle_bytes: int
    used_bytes: int
    peak_bytes: int


class Pool(Protocol):
    """Where buffers come from."""

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer that nobody else can see."""


class MemorySource(Protocol):
    """Where a pool's memory comes from, if not from this process alone; see `evenstep.comm.shared_memory`."""

    def allocate(self, nbytes: int) -> Memory:
        """``nbytes`` bytes at a multiple of 64.

        Raises:
            OSError: There are none.
        """

    def reclaim(self, patience: float = 0.0) -> bool:
        """Let go of buffers that it kept for others who have finished with them.

        Args:
            patience: Seconds to wait for one, if it keeps any.

        Returns:
            Whether there was one.
        """


class BufferPool:
    """Hands out uint8 buffers and takes each back when the last view of it is gone.

    A buffer needs no release: slices, ``split``, ``.numpy()`` and whatever a pack function keeps of a sample keep
    its memory from being handed out again. Every storage that is handed out owns a NumPy view made for it alone;
    torch drops that view when it frees the storage, and its weak reference tells the pool.

    Args:
        max_bytes: The most memory that may wait idle in the pool; what is more is freed, longest idle first.
            Buffers in use are not limited: they belong to their users.
        source: Where memory comes from; default: this process.
    """

    def __init__(self, max_bytes: int = 1 << 30, source: MemorySource | None = None) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise ValueError(
                f"max_bytes is {max_bytes!r}; the pool needs a number of bytes >= 0; 0 keeps no buffer for reuse"
            )
        self.max_bytes = max_bytes
        self._source = source
        self._lock = threading.Lock()
        self._returned: deque[Memory] = deque()
        self._idle: list[tuple[int, int, Memory]] = []  # capacity, latest first, memory; sorted
        self._watched: dict[int, weakref.ref[object]] = {}
        self._serial = 0
        self._hits = self._misses = self._dropped = 0
        self._idle_bytes = self._used_bytes = self._peak_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """A buffer of ``nbytes`` bytes: uint8 ``[nbytes]``, contiguous, at a multiple of 64; contents arbitrary."""
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; a buffer cannot have less than 0 bytes")
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = self._find(nbytes)
        if memory is None:
            capacity = _capacity(nbytes)
            memory = _allocate(capacity) if self._source is None else self._source.allocate(capacity)
        return self._lend(memory, nbytes)

    def statistics(self) -> PoolStatistics:
        """What the pool did so far."""
        with self._lock:
            self._collect()
            return PoolStatistics(
                self._hits, self._misses, self._dropped, self._idle_bytes, self._used_bytes, self._peak_bytes
            )

    def clear(self) -> None:
        """Free the idle buffers; those in use come back as before."""
        with self._lock:
            self._collect()
            self._idle.clear()
            self._idle_bytes = 0

    def _find(self, nbytes: int) -> Memory | None:
        """An idle buffer for ``nbytes``, or None; counted."""
        source = self._source
        if source is not None:
            source.reclaim()
        memory = self._reuse(nbytes)
        # Others read what was sent last while this rank does: that one is back sooner than fresh memory is there.
        if memory is None and source is not None and source.reclaim(_PATIENCE):
            memory = self._reuse(nbytes)
        with self._lock:
            self._hits += memory is not None
            self._misses += memory is None
        return memory

    def _reuse(self, nbytes: int) -> Memory | None:
        with self._lock:
            self._collect()
            return self._pop(nbytes)

    def _pop(self, nbytes: int) -> Memory | None:
        at = bisect_left(self._idle, (nbytes,))
        # A much larger buffer is left for a larger request: else small segments would pin the large buffers.
        if at == len(self._idle) or self._idle[at][0] > max(2 * nbytes, _SMALLEST):
            return None
        capacity, _, memory = self._idle.pop(at)
        self._idle_bytes -= capacity
        return memory

    def _lend(self, memory: Memory, nbytes: int) -> Tensor:
        owner = memory[:nbytes]
        lent = torch.from_numpy(owner)
        with self._lock:
            self._serial += 1
            serial = self._serial
            self._used_bytes += len(memory)
            self._peak_bytes = max(self._peak_bytes, self._used_bytes + self._idle_bytes)

        # The callback may run on any thread, inside any allocation, even while this thread holds the lock:
        # it only appends (atomic) and tidies up if nobody is at it.
        watched, returned = self._watched, self._returned
        pool = weakref.ref(self)

        def give_back(_: object) -> None:
            watched.pop(serial, None)
            alive = pool()
            if alive is None:
                return
            returned.append(memory)
            if alive._lock.acquire(blocking=False):
                try:
                    alive._collect()
                finally:
                    alive._lock.release()

        watched[serial] = weakref.ref(owner, give_back)
        return lent

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            capacity = len(memory)
            self._used_bytes -= capacity
            self._serial += 1
            # Of like buffers the one used last is taken first: it is the most likely to be in the cache still.
            insort(self._idle, (capacity, -self._serial, memory))
            self._idle_bytes += capacity
        while self._idle_bytes > self.max_bytes:
            oldest = max(range(len(self._idle)), key=lambda at: self._idle[at][1])
            self._idle_bytes -= self._idle.pop(oldest)[0]
            self._dropped += 1


def _capacity(nbytes: int) -> int:
    """Round up to one of sixteen sizes per power of two, so that segments of like size share buffers."""
    step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 5, 0))
    return -(-nbytes // step) * step


def _allocate(capacity: int) -> Memory:
    # NumPy asks for huge pages from 4 MiB on, torch does not: less to fault in and to translate.
    memory = np.empty(capacity + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + capacity]
