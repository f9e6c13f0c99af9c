"""Leaves of a sample as field columns: how each kind of value is written and read for many samples at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from evenstep.comm.codec.frame import Bytes, Reader, Writer
from evenstep.errors import WireFormatError

__all__ = ["ARRAY_KINDS", "TENSOR_DTYPES", "Node"]

# Itemsize by dtype; quantised and sub-byte types have no bytes of their own.
_NAMES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
TENSOR_DTYPES: dict[torch.dtype, int] = {
    dtype: dtype.itemsize for name in _NAMES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
ARRAY_KINDS = "biufcmMSU"
_DTYPE = re.compile(rf"[<>|=][{ARRAY_KINDS}]\d{{1,9}}(\[\d{{0,9}}\w{{1,7}}\])?")
_BY_NAME = {str(dtype)[6:]: dtype for dtype in TENSOR_DTYPES}
# Not every kernel knows these types in every supported torch; their bytes travel as integers of the same size.
_CARRIER = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    for dtype, size in TENSOR_DTYPES.items()
    if str(dtype)[6:].startswith(("uint16", "uint32", "uint64", "float8", "complex32"))
}


class Node(Protocol):
    """One place in the structure of a sample.

    ``columns`` counts the field columns that it and its children add to a segment.
    """

    columns: int

    def spec(self) -> Any:
        """The node as JSON-able lists."""

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        """Write this place of every sample."""

    def decode(self, n: int, reader: Reader) -> list[Any]:
        """Read this place of ``n`` samples."""


class TensorNode:
    """Tensors of one dtype and number of dimensions; shapes may differ."""

    columns = 1

    def __init__(self, dtype: torch.dtype, ndim: int) -> None:
        self.dtype = dtype
        self.ndim = ndim
        self.itemsize = TENSOR_DTYPES[dtype]

    @classmethod
    def parse(cls, name: str, ndim: int) -> TensorNode:
        if name not in _BY_NAME or type(ndim) is not int or not 0 <= ndim <= 64:
            raise WireFormatError(f"a tensor of dtype {name!r} and {ndim} dimensions is unknown here")
        return cls(_BY_NAME[name], ndim)

    def spec(self) -> Any:
        return ["T", str(self.dtype)[6:], self.ndim]

    def encode(self, values: Sequence[Tensor], writer: Writer) -> None:
        if self.ndim == 1:
            numels = [t.numel() for t in values]
            writer.ints(numels)
        else:
            shapes = np.array([t.shape for t in values], dtype=np.int64).reshape(len(values), self.ndim)
            writer.ints(shapes.T.reshape(-1))
            numels = shapes.prod(axis=1).tolist()
        writer.raw(sum(numels) * self.itemsize, lambda out, _: self._fill(values, numels, out))

    def _fill(self, values: Sequence[Tensor], numels: list[int], out: Tensor) -> None:
        flats = self._flat(values)
        with torch.no_grad():
            if flats is not None:
                torch.cat(flats, out=out.view(flats[0].dtype))
                return
            # Straight into place, one by one: a flat view does not exist, or the data is on a device.
            places = torch.unsafe_split_with_sizes(out.view(self.dtype), numels)
            for place, tensor in zip(places, values, strict=True):
                place.view(tensor.shape).copy_(tensor)

    def _flat(self, values: Sequence[Tensor]) -> list[Tensor] | None:
        """1-d views that `torch.cat` can gather, or None."""
        if not all(tensor.is_cpu for tensor in values):
            return None
        carrier = _CARRIER.get(self.dtype)
        if self.ndim == 1 and carrier is None:
            return list(values)
        if not all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in values):
            return None
        flats = values if self.ndim == 1 else [tensor.view(-1) for tensor in values]
        return list(flats) if carrier is None else [tensor.view(carrier) for tensor in flats]

    def decode(self, n: int, reader: Reader) -> list[Any]:
        if not self.ndim:
            return list(reader.tensor[reader.raw(n * self.itemsize)].view(self.dtype).unbind(0))
        if self.ndim == 1:
            sizes = reader.lengths(n)
            shapes = sizes[None]
        else:
            shapes = reader.ints(n * self.ndim).reshape(self.ndim, n)
            sizes = reader.numels(shapes)
        where = reader.raw(int(sizes.sum()) * self.itemsize)
        flat = reader.tensor[where].view(self.dtype)
        if not len(flat):
            return [torch.empty(shape, dtype=self.dtype) for shape in shapes.T.tolist()]
        if (shapes == shapes[:, :1]).all():
            return list(flat.view(n, *shapes[:, 0].tolist()).unbind(0))
        parts = torch.unsafe_split_with_sizes(flat, sizes.tolist())
        if self.ndim == 1:
            return list(parts)
        return [part.view(shape) for part, shape in zip(parts, shapes.T.tolist(), strict=True)]


class ArrayNode:
    """NumPy arrays of one dtype and number of dimensions; shapes may differ."""

    columns = 1

    def __init__(self, dtype: np.dtype[Any], ndim: int) -> None:
        self.dtype = dtype
        self.ndim = ndim

    @classmethod
    def parse(cls, name: str, ndim: int) -> ArrayNode:
        if type(ndim) is not int or not 0 <= ndim <= 64:
            raise WireFormatError(f"an array of {ndim!r} dimensions is unknown here")
        return cls(parse_dtype(name), ndim)

    def spec(self) -> Any:
        return ["N", self.dtype.str, self.ndim]

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        if self.ndim == 1:
            numels = [len(a) for a in values]
            writer.ints(numels)
        else:
            shapes = np.array([a.shape for a in values], dtype=np.int64).reshape(len(values), self.ndim)
            writer.ints(shapes.T.reshape(-1))
            numels = shapes.prod(axis=1).tolist()
        writer.raw(sum(numels) * self.dtype.itemsize, lambda _, out: self._fill(values, numels, out))

    def _fill(self, values: Sequence[Any], numels: list[int], out: Bytes) -> None:
        whole = out.view(self.dtype)
        if self.ndim == 1:
            np.concatenate(values, out=whole)
            return
        for (start, end), a in zip(pairwise([0, *accumulate(numels)]), values, strict=True):
            whole[start:end].reshape(a.shape)[...] = a

    def decode(self, n: int, reader: Reader) -> list[Any]:
        if not self.ndim:
            column = reader.array[reader.raw(n * self.dtype.itemsize)].view(self.dtype)
            return [column[at, ...] for at in range(n)]
        shapes = reader.ints(n * self.ndim).reshape(self.ndim, n)
        numels = reader.numels(shapes)
        where = reader.raw(int(numels.sum()) * self.dtype.itemsize)
        if where.start == where.stop:
            return [np.empty(shape, self.dtype) for shape in shapes.T.tolist()]
        flat = reader.array[where].view(self.dtype)
        parts = [flat[start:end] for start, end in pairwise([0, *np.cumsum(numels).tolist()])]
        if self.ndim == 1:
            return parts
        return [part.reshape(shape) for part, shape in zip(parts, shapes.T.tolist(), strict=True)]


def parse_dtype(name: str) -> np.dtype[Any]:
    """The dtype whose ``.str`` is ``name``; only types whose values are their bytes."""
    if _DTYPE.fullmatch(name):
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError):
            pass
        else:
            if dtype.str == name and dtype.itemsize:
                return dtype
    raise WireFormatError(f"NumPy dtype {name!r} is unknown here")


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

        writer.ints(np.zeros(len(values), np.int64))
        writer.raw(len(values) * self.dtype.itemsize, fill)

    def decode(self, n: int, reader: Reader) -> list[Any]:
        _expect_zeros(reader.ints(n))
        where = reader.raw(n * self.dtype.itemsize)
        return list(reader.array[where].view(self.dtype).copy()) if n else []


class BlobNode:
    """Values of one type that are a run of bytes each: text, bytes, integers beyond 64 bits, number lists."""

    columns = 1

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.to_bytes, self.from_bytes = BLOBS[tag]

    def spec(self) -> Any:
        return [self.tag]

    def encode(self, values: Sequence[Any], writer: Writer) -> None:
        parts = [self.to_bytes(value) for value in values]
        writer.ints([len(part) for part in parts])

        def fill(_: Tensor, out: Bytes) -> None:
            out[:] = np.frombuffer(b"".join(parts), np.uint8)

        writer.raw(sum(map(len, parts)), fill)

    def decode(self, n: int, reader: Reader) -> list[Any]:
        lengths = reader.lengths(n)
        memory = reader.array[reader.raw(int(lengths.sum()))].data
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
