"""What a sample is made of: a signature for the fast path, a node tree when a signature is new."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.comm.codec.classes import is_reachable, record_fields
from evenstep.comm.codec.containers import MAX_DEPTH, DictNode, RaggedNode, RecordNode, SequenceNode
from evenstep.comm.codec.leaves import (
    ARRAY_KINDS,
    TENSOR_DTYPES,
    ArrayNode,
    BlobNode,
    IntNode,
    Node,
    ScalarNode,
    TensorNode,
    big_int_bytes,
)

__all__ = ["Unsupported", "describe", "scan"]

_SUPPORTED = (
    "supported are tensors, NumPy arrays and scalars, bytes, bytearray, str, int, float, bool, None, and dict, "
    "list, tuple, NamedTuple and dataclass of these; convert it in the dataset or pass a codec such as PickleCodec"
)
_VECTORS = {int: "i", float: "f", bool: "b"}
_PLAIN_KEYS = {str}
_KEY_TYPES = {str, int, bool, float, bytes, type(None)}
_LOW, _HIGH = -(1 << 63), 1 << 63


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


def _scan_tensor(value: Tensor, signature: list[Any]) -> int:
    dtype = value.dtype
    itemsize = TENSOR_DTYPES.get(dtype)
    if itemsize is None or value.layout is not torch.strided or value.is_meta or value.is_nested:
        raise Unsupported
    ndim = value.ndim
    signature += (Tensor, dtype, ndim)
    nbytes: int = value.numel() * itemsize + 8 * ndim
    return nbytes


def _scan_dict(value: dict[Any, Any], signature: list[Any]) -> int:
    if not value:
        signature += (dict, 0)
        return 8
    keys: tuple[Any, ...] = tuple(value)
    kinds = set(map(type, keys))
    if kinds != _PLAIN_KEYS:
        if not kinds <= _KEY_TYPES:
            raise Unsupported
        keys = tuple((type(key), repr(key)) for key in keys)  # 1, True and 1.0 are equal, and NaN is not
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
        if only in _VECTORS and (only is not int or (min(value) >= _LOW and max(value) < _HIGH)):
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
    if _LOW <= value < _HIGH:
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
    return 8 + int(dtype.itemsize)


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
_TAGS = {
    float: "f",
    bool: "b",
    type(None): "n",
    str: "s",
    np.str_: "ns",
    bytes: "y",
    np.bytes_: "ny",
    bytearray: "ya",
}


def describe(value: Any, path: str = "sample", depth: int = 0) -> Node:
    """The node tree of ``value``: what `scan` signs, as objects that encode and decode.

    Raises:
        TypeError: If something in it cannot be sent; the message names the path.
    """
    kind: Any = type(value)
    if depth > MAX_DEPTH:
        raise TypeError(
            f"{path}: nested deeper than {MAX_DEPTH} levels, or it contains itself; flatten the sample"
        )
    if kind in _TAGS:
        tag = _TAGS[kind]
        return IntNode(tag) if tag in "fbn" else BlobNode(tag)
    if kind is int:
        return IntNode("i") if _LOW <= value < _HIGH else BlobNode("I")
    if kind in (Tensor, torch.nn.Parameter):
        return _describe_tensor(value, path)
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        return _describe_array(value, path)
    if kind is dict:
        return _describe_dict(value, path, depth)
    if kind in (list, tuple):
        return _describe_sequence(value, path, depth)
    names = record_fields(kind)
    if names is None:
        raise TypeError(f"{path}: unsupported type {_name(kind)}; {_SUPPORTED}")
    if not is_reachable(kind):
        raise TypeError(
            f"{path}: other ranks cannot find {kind.__module__}.{kind.__qualname__} by its name; define the class at "
            "the top level of a module, or use a dict"
        )
    missing = [] if issubclass(kind, tuple) else [name for name in names if not hasattr(value, name)]
    if missing:
        raise TypeError(f"{path}.{missing[0]}: the field has no value; set it before the sample is returned")
    items = tuple(value) if issubclass(kind, tuple) else [getattr(value, name) for name in names]
    children = [describe(v, f"{path}.{name}", depth + 1) for name, v in zip(names, items, strict=True)]
    return RecordNode(kind, names, children)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _describe_tensor(value: Tensor, path: str) -> Node:
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(
            f"{path}: a tensor of layout {value.layout} cannot be sent; convert it to a strided one"
        )
    if value.is_meta:
        raise TypeError(f"{path}: a tensor on the meta device has no data to send")
    if value.dtype not in TENSOR_DTYPES:
        raise TypeError(f"{path}: a tensor of dtype {value.dtype} cannot be sent; view or convert it first")
    return TensorNode(value.dtype, value.ndim)


def _describe_array(value: Any, path: str) -> Node:
    dtype = value.dtype
    if dtype.kind not in ARRAY_KINDS or not dtype.itemsize:
        raise TypeError(
            f"{path}: a NumPy value of dtype {dtype} cannot be sent; use one array per field, or a plain dtype"
        )
    return ScalarNode(dtype) if isinstance(value, np.generic) else ArrayNode(dtype, value.ndim)


def _describe_dict(value: dict[Any, Any], path: str, depth: int) -> Node:
    if not value:
        return IntNode("{")
    for key in value:
        if type(key) not in _KEY_TYPES:
            raise TypeError(
                f"{path}: unsupported key {key!r} of type {_name(type(key))}; keys are str, int, float, bool, "
                "bytes or None"
            )
    return DictNode(tuple(value), [describe(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()])


def _describe_sequence(value: Any, path: str, depth: int) -> Node:
    prefix = "l" if type(value) is list else "t"
    if not value:
        return IntNode("[" if prefix == "l" else "(")
    kinds = set(map(type, value))
    children = None
    if len(kinds) == 1:
        (only,) = kinds
        if only in _VECTORS and (only is not int or (min(value) >= _LOW and max(value) < _HIGH)):
            return BlobNode(prefix + _VECTORS[only])
    children = [describe(v, f"{path}[{at}]", depth + 1) for at, v in enumerate(value)]
    if len(kinds) == 1 and all(child.spec() == children[0].spec() for child in children[1:]):
        return RaggedNode(prefix + "r", children[0])
    return SequenceNode(prefix, children)
