"""The signature and the size of a sample, found when it is read: the fast path of `PayloadCodec.measure`."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.comm.codec.classes import is_reachable, record_fields
from evenstep.comm.codec.leaves import ARRAY_KINDS, TENSOR_DTYPES
from evenstep.comm.codec.values import big_int_bytes

__all__ = ["KEY_TYPES", "VECTORS", "Unsupported", "alike_columns", "all_fit_int64", "fits_int64", "scan"]

VECTORS: dict[type, str] = {int: "i", float: "f", bool: "b"}
_PLAIN_KEYS = {str}
KEY_TYPES: set[type] = {str, int, bool, float, bytes, type(None)}
_LOW, _HIGH = -(1 << 63), 1 << 63


def fits_int64(value: int) -> bool:
    """Whether an integer travels as one int64; others travel as bytes."""
    return _LOW <= value < _HIGH


def all_fit_int64(values: Sequence[int]) -> bool:
    """Whether every integer of a list does; in one pass, because token lists are long."""
    try:
        array("q", values)
    except OverflowError:
        return False
    return True


class Unsupported(Exception):  # noqa: N818 - never leaves the codec
    """A value that cannot be sent; `describe` then says where it is."""


# Markers in signatures. Every value's part of a signature starts with its type, so that no two kinds of
# sample have equal signatures.
class _Big: ...


class _Vector: ...


class _Ragged: ...


def scan(value: Any, signature: list[Any]) -> int:
    """Append the signature of ``value`` and return the bytes of its variable part in a segment."""
    return _SCANNERS[type(value)](value, signature)


_SAME_WHATEVER_VALUE = (float, bool, str, bytes)
_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


def alike_columns(samples: Sequence[Any]) -> list[list[Any]] | None:
    """The values of all samples, field by field, if all have the signature of the first; None also if only `scan` can tell.

    Thousands of plain dictionaries with the same keys are the usual case: field by field, not sample by sample,
    this takes a fifth of the time of scanning each. It does not look for tensors without plain memory (sparse,
    nested, meta), which cannot be sent: `scan` refuses one that comes first, and copying refuses any other.
    """
    first = samples[0]
    if type(first) is not dict or not first or set(map(type, samples)) != {dict}:
        return None
    keys = tuple(first)
    if set(map(type, keys)) != _PLAIN_KEYS or list(map(tuple, samples)).count(keys) < len(samples):
        return None
    columns = [list(map(itemgetter(key), samples)) for key in keys]
    return columns if all(map(_is_alike, columns)) else None


def _is_alike(column: list[Any]) -> bool:
    kinds = set(map(type, column))
    if len(kinds) > 1:
        return False
    (kind,) = kinds
    if kind is Tensor or kind is np.ndarray:
        return len(set(map(_DTYPE, column))) == len(set(map(_NDIM, column))) == 1
    return kind in _SAME_WHATEVER_VALUE or (kind is int and all_fit_int64(column))


def _scan_tensor(value: Tensor, signature: list[Any]) -> int:
    dtype = value.dtype
    itemsize = TENSOR_DTYPES.get(dtype)
    if itemsize is None or value.layout is not torch.strided or value.is_meta or value.is_nested:
        raise Unsupported
    ndim = value.ndim
    signature += (Tensor, dtype, ndim)
    nbytes: int = value.numel() * itemsize + 8 * ndim
    return nbytes


def _key_identity(key: Any) -> tuple[type, Any]:
    """Equal only for keys that arrive as the same: 1, True and 1.0 are equal, and NaN is not even itself."""
    return type(key), struct.pack("<d", key) if type(key) is float else key


def _scan_dict(value: dict[Any, Any], signature: list[Any]) -> int:
    if not value:
        signature += (dict, 0)
        return 8
    keys: tuple[Any, ...] = tuple(value)
    kinds = set(map(type, keys))
    if kinds != _PLAIN_KEYS:
        if not kinds <= KEY_TYPES:
            raise Unsupported
        keys = tuple(map(_key_identity, keys))
    signature += (dict, keys)
    nbytes = 0
    scanners = _SCANNERS
    for item in value.values():
        nbytes += scanners[type(item)](item, signature)
    return nbytes


def _scan_sequence(kind: type, value: Any, signature: list[Any]) -> int:
    if not value:
        signature += (kind, 0)
        return 8
    kinds = set(map(type, value))
    if len(kinds) == 1:
        (only,) = kinds
        if only in VECTORS and (only is not int or all_fit_int64(value)):
            signature += (kind, _Vector, only)
            return 8 + len(value) * (1 if only is bool else 8)
        first: list[Any] = []
        nbytes = 8 + scan(value[0], first)
        rest: list[list[Any]] = [[] for _ in value[1:]]
        nbytes += sum(map(scan, value[1:], rest))
        if all(other == first for other in rest):
            signature += (kind, _Ragged, *first)
            return nbytes
    signature += (kind, len(value))
    return sum(scan(item, signature) for item in value)


def _scan_int(value: int, signature: list[Any]) -> int:
    if fits_int64(value):
        signature.append(int)
        return 8
    signature += (int, _Big)
    return 8 + big_int_bytes(value)


def _scan_str(kind: type, value: str, signature: list[Any]) -> int:
    signature.append(kind)
    return 8 + (len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass")))


def _scan_sized(kind: type, value: Any, signature: list[Any]) -> int:
    signature.append(kind)
    return 8 + len(value)


def _scan_one(kind: type, _: Any, signature: list[Any]) -> int:
    signature.append(kind)
    return 8


def _scan_array(value: np.ndarray[Any, Any], signature: list[Any]) -> int:
    dtype = value.dtype
    if dtype.kind not in ARRAY_KINDS or not dtype.itemsize:
        raise Unsupported
    signature += (np.ndarray, dtype, value.ndim)
    return value.nbytes + 8 * value.ndim


def _scan_scalar(kind: type, value: Any, signature: list[Any]) -> int:
    dtype = value.dtype
    if dtype.kind not in ARRAY_KINDS:
        raise Unsupported
    signature += (kind, dtype)
    return int(dtype.itemsize)


def _scan_record(kind: type, names: tuple[str, ...], value: Any, signature: list[Any]) -> int:
    signature.append(kind)
    try:
        items = tuple(value) if issubclass(kind, tuple) else [getattr(value, name) for name in names]
    except AttributeError:
        raise Unsupported from None
    return sum(scan(item, signature) for item in items) if items else 8


class _Scanners(dict[type, Callable[[Any, list[Any]], int]]):
    """The scan function of each type; functions of record classes and NumPy scalars are made when first met."""

    def __missing__(self, kind: Any) -> Callable[[Any, list[Any]], int]:
        if issubclass(kind, np.generic):
            scanner = partial(_scan_scalar, kind)
        else:
            names = record_fields(kind)
            if names is None or not is_reachable(kind):
                raise Unsupported
            scanner = partial(_scan_record, kind, names)
        self[kind] = scanner
        return scanner


_SCANNERS = _Scanners(
    {
        Tensor: _scan_tensor,
        torch.nn.Parameter: _scan_tensor,
        dict: _scan_dict,
        list: partial(_scan_sequence, list),
        tuple: partial(_scan_sequence, tuple),
        int: _scan_int,
        float: partial(_scan_one, float),
        bool: partial(_scan_one, bool),
        type(None): partial(_scan_one, type(None)),
        str: partial(_scan_str, str),
        np.str_: partial(_scan_str, np.str_),
        bytes: partial(_scan_sized, bytes),
        np.bytes_: partial(_scan_sized, np.bytes_),
        bytearray: partial(_scan_sized, bytearray),
        np.ndarray: _scan_array,
        np.memmap: _scan_array,
    }
)
