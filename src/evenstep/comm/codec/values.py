"""Plain values as columns: numbers among the integers of a segment, text and bytes as runs of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from evenstep.comm.codec.frame import Bytes, Reader, Writer
from evenstep.errors import WireFormatError

__all__ = ["BLOBS", "big_int_bytes"]

_SMALL = 1024  # bytes a value, below which joining is faster than writing one by one


class ScalarNode:
    """NumPy scalars of one dtype."""

    columns = 1

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def spec(self) -> Any:
        return ["G", self.dtype.str]

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        def fill(_: Tensor, out: Bytes) -> None:
            out[:] = np.frombuffer(b"".join([value.tobytes() for value in values]), np.uint8)

        writer.raw(len(values) * self.dtype.itemsize, fill)

    def decode(self, n: int, reader: Reader) -> list[Any]:
        where = reader.raw(n * self.dtype.itemsize)
        return list(reader.array[where].view(self.dtype).copy()) if n else []


class BlobNode:
    """Values of one type that are a run of bytes each: text, bytes, integers beyond 64 bits, number lists."""

    columns = 1

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.to_bytes: Callable[[Any], bytes]
        self.from_bytes: Callable[[memoryview], Any]
        self.to_bytes, self.from_bytes = BLOBS[tag]

    def spec(self) -> Any:
        return [self.tag]

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        parts = [self.to_bytes(value) for value in values]
        lengths = [len(part) for part in parts]
        total = sum(lengths)
        writer.ints(lengths)

        def fill(_: Tensor, out: Bytes) -> None:
            if total < _SMALL * len(parts):
                out[:] = np.frombuffer(b"".join(parts), np.uint8)
                return
            place = out.data  # large ones, such as compressed images, are copied once
            for end, part in zip(accumulate(lengths), parts, strict=True):
                place[end - len(part) : end] = part

        writer.raw(total, fill)

    def decode(self, n: int, reader: Reader) -> list[Any]:
        lengths, total = reader.lengths(n)
        memory = reader.array[reader.raw(total)].data
        read = self.from_bytes
        try:
            return [read(memory[a:b]) for a, b in pairwise([0, *np.cumsum(lengths).tolist()])]
        except ValueError as error:
            raise WireFormatError(f"a value of kind {self.tag!r} cannot be read: {error}") from None


class IntNode:
    """Values that fit one int64 each: int, float (by its bits), bool, and None and empty containers (0).

    Even None takes 8 bytes: what is allocated on receipt is then bounded by what was received.
    """

    columns = 0

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def spec(self) -> Any:
        return [self.tag]

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        if self.tag == "f":
            writer.ints(np.array(values, np.float64).view(np.int64))
        elif self.tag in "ib":
            writer.ints(np.array(values, np.int64))
        else:
            writer.ints(np.zeros(len(values), np.int64))

    def decode(self, n: int, reader: Reader) -> list[Any]:
        column = reader.ints(n)
        if self.tag == "i":
            return list(column.tolist())
        if self.tag == "f":
            return list(column.view(np.float64).tolist())
        if self.tag == "b":
            if n and not 0 <= int(column.min()) <= int(column.max()) <= 1:
                raise WireFormatError("a bool is neither 0 nor 1")
            return list(column.astype(bool).tolist())
        _expect_zeros(column)
        make = EMPTY[self.tag]
        return [make() for _ in range(n)]


EMPTY: dict[str, Callable[[], Any]] = {"n": lambda: None, "[": list, "(": tuple, "{": dict}


def _expect_zeros(column: Any) -> None:
    if column.any():
        raise WireFormatError("a place holder of the segment is not zero")


def big_int_bytes(value: int) -> int:
    """Bytes of the two's complement of an integer."""
    return value.bit_length() // 8 + 1


def _numbers(dtype: Any, container: Any) -> tuple[Callable[[Any], bytes], Callable[[memoryview], Any]]:
    def read(data: memoryview) -> Any:
        values = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
        return container(values.tolist())

    return (lambda values: np.array(values, dtype).tobytes()), read


def _read_bools(container: Any) -> Callable[[memoryview], Any]:
    def read(data: memoryview) -> Any:
        values = np.frombuffer(data, np.uint8)
        if len(values) and int(values.max()) > 1:
            raise ValueError("a bool is neither 0 nor 1")
        return container(values.astype(bool).tolist())

    return read


BLOBS: dict[str, tuple[Callable[[Any], bytes], Callable[[memoryview], Any]]] = {
    "s": (lambda v: v.encode("utf-8", "surrogatepass"), lambda m: str(m, "utf-8", "surrogatepass")),
    "ns": (lambda v: v.encode("utf-8", "surrogatepass"), lambda m: np.str_(str(m, "utf-8", "surrogatepass"))),
    "y": (lambda v: v, bytes),
    "ny": (bytes, lambda m: np.bytes_(bytes(m))),
    "ya": (bytes, bytearray),
    "I": (
        lambda v: v.to_bytes(big_int_bytes(v), "little", signed=True),
        lambda m: int.from_bytes(m, "little", signed=True),
    ),
    "li": _numbers("<i8", list),
    "lf": _numbers("<f8", list),
    "lb": (bytes, _read_bools(list)),
    "ti": _numbers("<i8", tuple),
    "tf": _numbers("<f8", tuple),
    "tb": (bytes, _read_bools(tuple)),
}
