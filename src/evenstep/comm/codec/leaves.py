"""Tensors and NumPy arrays as field columns: one gather to write, one split to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evenstep.comm.codec.frame import Bytes, Reader, Writer
from evenstep.errors import WireFormatError

__all__ = ["ARRAY_KINDS", "TENSOR_DTYPES", "parse_dtype"]

# Itemsize by dtype; quantised and sub-byte types have no bytes of their own.
_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
TENSOR_DTYPES: dict[torch.dtype, int] = {
    dtype: dtype.itemsize
    for dtype in (getattr(torch, name, None) for name in _NAMES.split())
    if isinstance(dtype, torch.dtype)
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


def _shape_columns(values: Sequence[Any], ndim: int) -> npt.NDArray[np.int64]:
    """All first dimensions, then all second ones, ...: int64 ``[ndim, n]``."""
    shapes = np.fromiter(chain.from_iterable([value.shape for value in values]), np.int64, len(values) * ndim)
    return shapes.reshape(len(values), ndim).T


def _common_tail(shapes: npt.NDArray[np.int64]) -> list[int] | None:
    """The dimensions behind the first if all values have the same, so that they lie like one array; else None."""
    tails = shapes[1:]
    return tails[:, 0].tolist() if tails.size and (tails == tails[:, :1]).all() else None


class TensorNode:
    """Tensors of one dtype and number of dimensions; shapes may differ."""

    columns = 1

    def __init__(self, dtype: torch.dtype, ndim: int) -> None:
        self.dtype = dtype
        self.ndim = ndim
        self.itemsize: int = TENSOR_DTYPES[dtype]
        self.carrier: torch.dtype | None = _CARRIER.get(dtype)

    @classmethod
    def parse(cls, name: str, ndim: int) -> TensorNode:
        if name not in _BY_NAME or type(ndim) is not int or not 0 <= ndim <= 64:
            raise WireFormatError(f"a tensor of dtype {name!r} and {ndim} dimensions is unknown here")
        return cls(_BY_NAME[name], ndim)

    def spec(self) -> Any:
        return ["T", str(self.dtype)[6:], self.ndim]

    def encode(self, values: Sequence[Tensor], writer: Writer) -> None:
        numels = list(map(Tensor.numel, values))
        tail: list[int] | None = None
        if self.ndim == 1:
            writer.ints(numels)
        else:
            shapes = _shape_columns(values, self.ndim)
            writer.ints(shapes.reshape(-1))
            tail = _common_tail(shapes)
        writer.raw(sum(numels) * self.itemsize, lambda out, _: self._fill(values, numels, tail, out))

    def _fill(self, values: Sequence[Tensor], numels: list[int], tail: list[int] | None, out: Tensor) -> None:
        with torch.no_grad():
            on_cpu = False not in [tensor.is_cpu for tensor in values]
            if on_cpu and self.carrier is None and (self.ndim == 1 or tail is not None):
                torch.cat(list(values), out=out.view(self.dtype).view([-1, *(tail or ())]))
                return
            flats = self._flat(values) if on_cpu else None
            if flats is not None:
                torch.cat(flats, out=out.view(flats[0].dtype))
                return
            # Straight into place, one by one: a flat view does not exist, or the data is on a device.
            places = torch.unsafe_split_with_sizes(out.view(self.dtype), numels)
            for place, tensor in zip(places, values, strict=True):
                place.view(tensor.shape).copy_(tensor)

    def _flat(self, values: Sequence[Tensor]) -> list[Tensor] | None:
        """1-d views that `torch.cat` can gather, or None."""
        if not all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in values):
            return None
        flats = values if self.ndim == 1 else [tensor.view(-1) for tensor in values]
        return list(flats) if self.carrier is None else [tensor.view(self.carrier) for tensor in flats]

    def decode(self, n: int, reader: Reader) -> list[Any]:
        # Autograd does not relate parts of an unsafe split: samples can be changed in place one by one.
        if self.ndim == 1:
            sizes, total = reader.lengths(n)
            flat = self._read(total, reader)
            return list(torch.unsafe_split_with_sizes(flat, sizes.tolist()))
        if not self.ndim:
            flat = self._read(n, reader)  # before anything is allocated for n samples
            return [part.view(()) for part in torch.unsafe_split_with_sizes(flat, [1] * n)]
        shapes = reader.ints(n * self.ndim).reshape(self.ndim, n)
        sizes = reader.numels(shapes)
        flat = self._read(int(sizes.sum()), reader)
        tail = _common_tail(shapes)
        if tail is not None and flat.numel():
            return list(torch.unsafe_split_with_sizes(flat.view([-1, *tail]), shapes[0].tolist()))
        parts = torch.unsafe_split_with_sizes(flat, sizes.tolist())
        return [part.view(shape) for part, shape in zip(parts, shapes.T.tolist(), strict=True)]

    def _read(self, elements: int, reader: Reader) -> Tensor:
        return reader.tensor[reader.raw(elements * self.itemsize)].view(self.dtype)


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
        numels = [a.size for a in values]
        writer.ints(numels if self.ndim == 1 else _shape_columns(values, self.ndim).reshape(-1))
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
        flat = reader.array[reader.raw(int(numels.sum()) * self.dtype.itemsize)].view(self.dtype)
        parts = [flat[start:end] for start, end in pairwise([0, *np.cumsum(numels).tolist()])]
        if self.ndim == 1:
            return parts
        return [part.reshape(shape) for part, shape in zip(parts, shapes.T.tolist(), strict=True)]
