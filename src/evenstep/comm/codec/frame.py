"""Writes and reads the columns of a segment; reading checks every number before it is used."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evenstep.comm.codec.layout import (
    ALIGNMENT,
    ENTRY,
    HUGE,
    INDEX,
    LEAST,
    MOST,
    PREAMBLE,
    SUM,
    align,
    entry_bytes,
)
from evenstep.errors import WireFormatError

__all__ = ["Bytes", "Reader", "Writer"]

MAGIC = b"evnstep1"
_CRC_AT = 48
_INTS = np.dtype("<i8")

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def _aligned_view(buffer: Tensor, what: str) -> Tensor:
    """The same memory as a tensor with a storage of its own, so that dtype views never depend on an offset."""
    if (
        buffer.dtype is not torch.uint8
        or buffer.dim() != 1
        or not buffer.is_contiguous()
        or not buffer.is_cpu
    ):
        raise ValueError(
            f"{what} is a {buffer.dtype} tensor of shape {tuple(buffer.shape)} on {buffer.device}; a segment "
            "needs contiguous 1-d torch.uint8 on the CPU; take it from a BufferPool"
        )
    return torch.from_numpy(buffer.numpy())


class Writer:
    """Collects the columns of a segment, then writes all of it at once.

    Nothing is written before everything is known to fit.
    """

    def __init__(self) -> None:
        self._ints: list[bytes] = []
        self._raws: list[tuple[int, Callable[[Tensor, Bytes], None]]] = []

    def ints(self, column: npt.ArrayLike) -> None:
        """Append one column of int64."""
        self._ints.append(np.asarray(column, dtype=_INTS).tobytes())

    def raw(self, nbytes: int, fill: Callable[[Tensor, Bytes], None]) -> None:
        """Append a field column; ``fill`` gets its ``nbytes`` bytes as a tensor and as an array."""
        self._raws.append((nbytes, fill))

    def write(
        self,
        out: Tensor,
        index: bytes,
        structures: Sequence[tuple[int, bytes]],
    ) -> None:
        """Write the segment into ``out`` (uint8 ``[segment_bytes]``).

        Args:
            out: Where to.
            index: Structure number of each sample, as `INDEX`.
            structures: Samples and JSON of each structure.
        """
        out = _aligned_view(out, "out")
        flat: Bytes = out.numpy()
        # The control part is small: joined as bytes, it costs less than array operations on its pieces.
        parts = [_padded(index, align(len(index)))]
        for count, text in structures:
            parts.append(_padded(ENTRY.pack(count, len(text)) + text, entry_bytes(len(text))))
        ints_at = PREAMBLE.size + sum(map(len, parts))
        control = b"".join([*parts, *self._ints])
        at = PREAMBLE.size + len(control)
        end = align(at) + sum(align(nbytes) for nbytes, _ in self._raws)
        if end > len(flat):
            raise ValueError(
                f"the segment needs {end} bytes but out has {len(flat)}: a sample was changed after it was "
                "measured; measure it again, or do not change samples that the loader still holds"
            )
        samples = len(index) // INDEX.itemsize
        facts = (MAGIC, len(flat), samples, len(structures), ints_at, (at - ints_at) // _INTS.itemsize)
        crc = zlib.crc32(control, zlib.crc32(PREAMBLE.pack(*facts, 0)))
        flat.data[:at] = PREAMBLE.pack(*facts, crc) + control
        for nbytes, fill in self._raws:
            start = align(at)
            flat[at:start] = 0
            at = start + nbytes
            if nbytes:
                fill(out[start:at], flat[start:at])
        flat[at:] = 0


def _padded(data: bytes, size: int) -> bytes:
    return data.ljust(size, b"\0")


class Reader:
    """Hands out the columns of a received segment, checking each against what is there.

    Args:
        buffer: uint8 ``[n]``, one segment.
        count: Samples that the plan says are in it.

    Raises:
        WireFormatError: If the preamble, the CRC or a size is not what it must be.
    """

    def __init__(self, buffer: Tensor, count: int) -> None:
        buffer = _aligned_view(buffer, "buffer")
        if buffer.data_ptr() % 16:
            buffer = buffer.clone()  # a foreign buffer; ours are aligned
        self.tensor = buffer
        self.array: Bytes = buffer.numpy()
        size = len(self.array)
        if size < PREAMBLE.size:
            raise WireFormatError(f"segment of {size} bytes is shorter than its preamble ({PREAMBLE.size})")
        magic, total, samples, groups, ints_at, ints, crc = PREAMBLE.unpack_from(self.array.data)
        if magic != MAGIC:
            raise WireFormatError(f"segment starts with {magic!r} instead of {MAGIC!r}")
        if (total, samples) != (size, count):
            raise WireFormatError(
                f"segment says {samples} samples in {total} bytes; the plan says {count} samples in {size} bytes"
            )
        head = PREAMBLE.size + align(INDEX.itemsize * count)
        control = ints_at + ints * _INTS.itemsize
        if ints_at % ALIGNMENT or not head <= ints_at <= control <= size or groups > count:
            raise WireFormatError(
                f"segment of {size} bytes says {groups} structures and {ints} integers at byte {ints_at}"
            )
        data = self.array.data
        zeroed = zlib.crc32(b"\0\0\0\0", zlib.crc32(data[:_CRC_AT]))
        if zlib.crc32(data[_CRC_AT + 4 : control], zeroed) != crc:
            raise WireFormatError("checksum of the segment's control part does not match; it was corrupted")
        self._groups = int(groups)
        self._count = count
        self._entries = (head, int(ints_at))
        self._ints: Ints = self.array[ints_at:control].view(_INTS)
        self._at = int(control)

    def structures(self) -> tuple[npt.NDArray[np.uint32], list[tuple[bytes, int]]]:
        """Structure number of each sample, uint32 ``[count]``; JSON and samples of each structure."""
        index = self.array[PREAMBLE.size : PREAMBLE.size + INDEX.itemsize * self._count].view(INDEX)
        at, end = self._entries
        found: list[tuple[bytes, int]] = []
        for _ in range(self._groups):
            if end - at < ENTRY.size:
                raise WireFormatError(
                    f"structure {len(found)} of {self._groups} lies outside the control part"
                )
            count, length = ENTRY.unpack_from(self.array.data, at)
            if length > end - at - ENTRY.size:
                raise WireFormatError(
                    f"structure {len(found)} says {length} bytes of JSON, {end - at} are left"
                )
            found.append((self.array[at + ENTRY.size : at + ENTRY.size + length].tobytes(), int(count)))
            at += entry_bytes(int(length))
        if len(index) and (most := int(MOST(index))) >= self._groups:
            raise WireFormatError(f"a sample has structure {most} of {self._groups}")
        # One structure is the usual case, and then all numbers are 0 here.
        counts = [len(index)] if self._groups == 1 else np.bincount(index, minlength=self._groups).tolist()
        if [count for _, count in found] != counts:
            raise WireFormatError("samples per structure do not match the structure numbers of the samples")
        return index, found

    def ints(self, n: int) -> Ints:
        """The next ``n`` integers, int64 ``[n]``."""
        if not 0 <= n <= len(self._ints):
            raise WireFormatError(f"a column of {n} integers was expected, {len(self._ints)} are left")
        column, self._ints = self._ints[:n], self._ints[n:]
        return column

    def lengths(self, n: int) -> tuple[Ints, int]:
        """The next ``n`` integers, none negative nor larger than the segment, and their sum, which is no larger either."""
        column = self.ints(n)
        total = float(SUM(column, dtype=np.float64))  # never wraps round
        if total > len(self.array) or (n and int(LEAST(column)) < 0):
            raise WireFormatError(f"lengths {column[:8].tolist()}... do not fit {len(self.array)} bytes")
        return column, int(total)

    def numels(self, shapes: Ints) -> Ints:
        """Elements of each shape of int64 ``[ndim, n]``: int64 ``[n]``."""
        if shapes.size and int(shapes.min()) < 0:
            raise WireFormatError("a dimension is negative")
        with np.errstate(all="ignore"):  # infinity times zero is not a number; the integers then say zero
            products = shapes.prod(axis=0, dtype=np.float64)
        if float(np.nansum(products)) >= HUGE:
            raise WireFormatError("shapes have more elements than any segment")
        numels: Ints = shapes.prod(axis=0, dtype=np.int64)
        return numels

    def raw(self, nbytes: int) -> slice:
        """Where the next field column of ``nbytes`` bytes lies."""
        start = align(self._at)
        if not 0 <= nbytes <= len(self.array) - start:
            if nbytes == 0:
                return slice(0, 0)
            raise WireFormatError(
                f"a field column of {nbytes} bytes at byte {start} leaves a segment of {len(self.array)} bytes"
            )
        self._at = start + nbytes
        return slice(start, self._at)

    def close(self) -> None:
        """Check that every integer was used and that nothing but padding is left."""
        if len(self._ints):
            raise WireFormatError(f"{len(self._ints)} integers of the segment belong to no field")
        if MOST(self.array[self._at :], initial=0):
            raise WireFormatError(f"bytes from {self._at} to the end of the segment belong to no field")
