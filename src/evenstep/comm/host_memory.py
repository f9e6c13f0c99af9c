"""Memory that other processes of this host can map: an anonymous file, gone with its last user, whatever kills them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["Extent", "HostMemory", "Memory", "PeerMemory"]

Memory: TypeAlias = npt.NDArray[np.uint8]
Extent: TypeAlias = tuple[int, int]  # where it begins in its file, and bytes

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_CLOSE_ON_EXEC = 0x01
_REMEMBERED = 32  # extents of one peer that stay mapped: to map one costs as much as to copy it


class HostMemory:
    """Memory of this process, in extents that are taken and freed one by one.

    An extent is freed when the last array or tensor over it is gone; its place in the file is never used again, so that
    what a peer still has mapped cannot become something else.

    Raises:
        OSError: This system has no such memory.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("anonymous files that other processes can open exist on Linux only")
        self._file = _File(_anonymous_file())
        self._lock = threading.Lock()
        self._end = 0
        self._extents: dict[int, Extent] = {}  # by address

    @property
    def descriptor(self) -> int:
        """By which a peer opens the file, while this process holds it open."""
        return self._file.descriptor

    def allocate(self, nbytes: int) -> Memory:
        """An extent of ``nbytes`` > 0 bytes: uint8 ``[nbytes]`` of zeros, page-aligned.

        Raises:
            OSError: There is not as much memory.
        """
        size = _whole_pages(nbytes)
        with self._lock:
            start, self._end = self._end, self._end + size
        # Not just a longer file: where memory is short, the first write to it would kill the process.
        os.posix_fallocate(self.descriptor, start, size)
        try:
            buffer = _map(self.descriptor, start, size)
        except OSError:
            _libc.fallocate(self.descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, start, size)
            raise
        address = ctypes.addressof(buffer)
        self._extents[address] = start, size
        weakref.finalize(buffer, _free, self._extents, address, self._file, os.getpid()).atexit = False
        return _array(buffer)[:nbytes]

    def find(self, tensor: Tensor) -> tuple[Extent, int] | None:
        """The extent that a contiguous tensor lies in, and at which of its bytes; None if it lies elsewhere."""
        at, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        # A copy, in one piece: the collector may free an extent at any time.
        for address, (start, size) in self._extents.copy().items():
            if address <= at and at + nbytes <= address + size:
                return (start, size), at - address
        return None

    def retire(self) -> None:
        """From now on freed extents keep their bytes, for peers that still read them; they go with the file."""
        self._file.keeps_all = True


class PeerMemory:
    """The memory of another process, or of this one, mapped piece by piece.

    Args:
        process: Its number.
        descriptor: Its `HostMemory.descriptor`.

    Raises:
        OSError: There is no such process here, or it does not let this one look.
    """

    def __init__(self, process: int, descriptor: int) -> None:
        self._file = _File(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        self._mapped: OrderedDict[Extent, Memory] = OrderedDict()

    def first(self, nbytes: int) -> Memory:
        """The first extent that was taken there, by its ``nbytes``.

        Raises:
            OSError: There is none of that size.
        """
        return self.view((0, _whole_pages(nbytes)))[:nbytes]

    def view(self, extent: Extent) -> Memory:
        """One extent of it, uint8 ``[size]``.

        Raises:
            OSError: The file has no such bytes.
        """
        found = self._mapped.pop(extent, None)
        if found is None:
            start, size = extent
            if start < 0 or size <= 0 or start + size > os.fstat(self._file.descriptor).st_size:
                raise OSError(f"{size} bytes at {start} lie outside a peer's memory")
            found = _array(_map(self._file.descriptor, start, size))
            while len(self._mapped) >= _REMEMBERED:
                self._mapped.popitem(last=False)
        self._mapped[extent] = found
        return found


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _File:
    """An open file, closed with the last who needs it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.keeps_all = False
        weakref.finalize(self, os.close, descriptor).atexit = False


if sys.platform.startswith("linux"):
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    _libc.memfd_create.argtypes = [ctypes.c_char_p, ctypes.c_uint]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _anonymous_file() -> int:
    """Its descriptor; by the C library's function, which some builds of Python leave out."""
    descriptor: int = _libc.memfd_create(b"evenstep", _CLOSE_ON_EXEC)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"there are no anonymous files here: {os.strerror(number)}")
    return descriptor


def _map(descriptor: int, start: int, size: int) -> ctypes.Array[ctypes.c_uint8]:
    """Map part of a file for as long as the buffer is referred to; `mmap.mmap` would hold a descriptor for each."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, start)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"{size} bytes of shared memory cannot be mapped: {os.strerror(number)}")
    buffer = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, size).atexit = False
    return buffer


def _array(buffer: ctypes.Array[ctypes.c_uint8]) -> Memory:
    return np.frombuffer(memoryview(buffer), np.uint8)


def _free(extents: dict[int, Extent], address: int, file: _File, process: int) -> None:
    start, size = extents.pop(address)
    # A forked child that drops its copy must not empty the file of its parent.
    if os.getpid() == process and not file.keeps_all:
        _libc.fallocate(file.descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, start, size)
