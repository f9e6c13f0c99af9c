"""The node tree of a sample, built when its signature is new, and the errors that say what cannot be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.comm.codec.classes import is_reachable, record_fields
from evenstep.comm.codec.containers import MAX_DEPTH, DictNode, RaggedNode, RecordNode, SequenceNode
from evenstep.comm.codec.leaves import ARRAY_KINDS, TENSOR_DTYPES, ArrayNode, TensorNode
from evenstep.comm.codec.nodes import Node
from evenstep.comm.codec.scan import KEY_TYPES, VECTORS, all_fit_int64, fits_int64
from evenstep.comm.codec.values import BlobNode, IntNode, ScalarNode

__all__ = ["describe"]

_SUPPORTED = (
    "supported are tensors, NumPy arrays and scalars, bytes, bytearray, str, int, float, bool, None, and dict, "
    "list, tuple, NamedTuple and dataclass of these; convert it in the dataset or pass a codec such as PickleCodec"
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
        return IntNode("i") if fits_int64(value) else BlobNode("I")
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
        if type(key) not in KEY_TYPES:
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
    if len(kinds) == 1:
        (only,) = kinds
        if only in VECTORS and (only is not int or all_fit_int64(value)):
            return BlobNode(prefix + VECTORS[only])
    children = [describe(v, f"{path}[{at}]", depth + 1) for at, v in enumerate(value)]
    if len(kinds) == 1 and all(child.spec() == children[0].spec() for child in children[1:]):
        return RaggedNode(prefix + "r", children[0])
    return SequenceNode(prefix, children)
