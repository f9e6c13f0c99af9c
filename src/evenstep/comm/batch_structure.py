"""The shape of a batch as JSON: what stays the same from batch to batch, so that peers are told it once."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import torch

from evenstep.comm.codec.classes import (
    is_dataclass_type,
    is_named_tuple_type,
    is_reachable,
    lookup,
    record_fields,
)
from evenstep.comm.codec.leaves import TENSOR_DTYPES
from evenstep.errors import WireFormatError

__all__ = [
    "DTYPES",
    "Leaves",
    "TensorKind",
    "describe",
    "digest_of",
    "dtype_name",
    "dump",
    "parse",
    "rebuild",
    "tensor_kinds",
]

# Nodes are JSON lists. Leaves: tensor, one scalar, a list or tuple of scalars, anything that the codec knows.
TENSOR, SCALAR, SCALARS, OTHER = "T", "S", "A", "X"
DICT, ORDERED, LIST, TUPLE, NAMED, DATACLASS = "d", "o", "l", "t", "n", "c"
SCALAR_TYPES = frozenset({type(None), bool, int, float, str})

DTYPES = {str(dtype)[6:]: dtype for dtype in TENSOR_DTYPES}
_MAX_NDIM = 64


class Leaves:
    """The leaves of one batch, by how they travel.

    Attributes:
        tensors: Tensors, detached.
        scalars: JSON values: numbers, strings, None, and lists of them.
        others: What goes through the payload codec.
        paths: Where each of ``others`` was found.
    """

    __slots__ = ("others", "paths", "scalars", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.scalars: list[Any] = []
        self.others: list[Any] = []
        self.paths: list[str] = []


class TensorKind(NamedTuple):
    """What the structure says of one tensor leaf."""

    dtype: torch.dtype
    ndim: int
    device_type: str


def dtype_name(dtype: torch.dtype) -> str:
    """``"int64"`` for `torch.int64`."""
    return str(dtype)[6:]


def describe(value: Any, leaves: Leaves, path: str = "") -> list[Any]:
    """The structure of ``value``; its leaves are appended to ``leaves`` in order.

    Raises:
        TypeError: A value cannot be told to other ranks; the message names its path.
    """
    kind: type = type(value)
    if kind in SCALAR_TYPES:
        leaves.scalars.append(value)
        return [SCALAR]
    if kind is dict or kind is OrderedDict:
        return [
            DICT if kind is dict else ORDERED,
            [_key(key, path) for key in value],
            [describe(item, leaves, f"{path}[{key!r}]") for key, item in value.items()],
        ]
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, leaves, path)
    if kind is list or kind is tuple:
        if all(type(item) in SCALAR_TYPES for item in value):
            leaves.scalars.append(value)
            return [SCALARS, kind is list]
        children = [describe(item, leaves, f"{path}[{i}]") for i, item in enumerate(value)]
        return [LIST if kind is list else TUPLE, children]
    names = record_fields(kind)
    if names is None:
        if isinstance(value, (dict, list, tuple)) or hasattr(value, "keys"):
            raise TypeError(
                f"batch{path} is a {kind.__module__}.{kind.__qualname__}: model-parallel peers cannot rebuild it. Return a "
                "dict, OrderedDict, list, tuple, NamedTuple or dataclass from collate, for example dict(batch)."
            )
        leaves.others.append(value)
        leaves.paths.append(path)
        return [OTHER]
    if not is_reachable(kind):
        raise TypeError(
            f"batch{path} is a {kind.__module__}.{kind.__qualname__}, which other ranks cannot find by that name; define "
            "the class at the top level of a module that every rank imports"
        )
    children = [describe(getattr(value, name), leaves, f"{path}.{name}") for name in names]
    return [
        NAMED if is_named_tuple_type(kind) else DATACLASS,
        kind.__module__,
        kind.__qualname__,
        list(names),
        children,
    ]


def _key(key: Any, path: str) -> Any:
    if type(key) not in SCALAR_TYPES:
        raise TypeError(
            f"batch{path} has the key {key!r} ({type(key).__name__}): peers can be told only str, int, float, bool and "
            "None keys; rename it in collate"
        )
    return key


def _describe_tensor(value: torch.Tensor, leaves: Leaves, path: str) -> list[Any]:
    plain = type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter)
    ordinary = value.layout is torch.strided and value.dtype in TENSOR_DTYPES and not value.is_meta
    if not plain or not ordinary:
        raise TypeError(
            f"batch{path} is a {type(value).__name__} of {value.dtype}, {value.layout} on {value.device}: its bytes cannot "
            "be told to model-parallel peers; make it a dense torch.Tensor in collate"
        )
    leaves.tensors.append(value.detach() if value.requires_grad else value)
    return [TENSOR, dtype_name(value.dtype), value.dim(), value.device.type]


def dump(node: list[Any]) -> bytes:
    """The structure as bytes: equal for equal structures."""
    return json.dumps(node, separators=(",", ":")).encode()


def digest_of(structure: bytes) -> int:
    """8-byte digest of what `dump` wrote."""
    return int.from_bytes(blake2b(structure, digest_size=8).digest(), "little")


def parse(structure: bytes) -> list[Any]:
    """Read what `dump` wrote, and check that every class in it exists here.

    Raises:
        WireFormatError: The bytes are no structure, or name a class that this rank does not have.
    """
    try:
        node = json.loads(structure)
        _check(node)
    except WireFormatError:
        raise
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        RuntimeError,
    ) as error:  # of torch.device, or too deep
        raise WireFormatError(f"the structure of a batch cannot be read: {error!r}") from None
    return node  # type: ignore[no-any-return]  # checked above


def _check(node: Any) -> None:
    code = node[0]
    if code == TENSOR:
        _, dtype, ndim, device = node
        if dtype not in DTYPES or not 0 <= ndim <= _MAX_NDIM:
            raise WireFormatError(f"a tensor of dtype {dtype!r} and {ndim!r} dimensions is unknown here")
        torch.device(device)
    elif code in (NAMED, DATACLASS):
        _, module, qualname, names, children = node
        kind = lookup(module, qualname, tuple(names))
        if is_dataclass_type(kind) != (code == DATACLASS) or len(children) != len(names):
            raise WireFormatError(f"{module}.{qualname} with {len(children)} values is not what it is here")
        for child in children:
            _check(child)
    elif code in (DICT, ORDERED, LIST, TUPLE):
        children = node[-1]
        if code in (DICT, ORDERED) and len(node[1]) != len(children):
            raise WireFormatError(f"a mapping has {len(node[1])} keys and {len(children)} values")
        for child in children:
            _check(child)
    elif code not in (SCALAR, SCALARS, OTHER):
        raise WireFormatError(f"a batch has a node of kind {code!r}, which is unknown here")


def tensor_kinds(node: list[Any]) -> list[TensorKind]:
    """The tensors of a structure, in the order of its leaves."""
    if node[0] == TENSOR:
        _, dtype, ndim, device_type = node
        return [TensorKind(DTYPES[dtype], ndim, device_type)]
    if node[0] in (SCALAR, SCALARS, OTHER):
        return []
    return [kind for child in node[-1] for kind in tensor_kinds(child)]


def rebuild(node: list[Any], leaves: Leaves) -> Any:
    """The batch of which ``describe`` returned ``node`` and ``leaves``.

    Raises:
        WireFormatError: There are not as many leaves as the structure has.
    """
    iterators = iter(leaves.tensors), iter(leaves.scalars), iter(leaves.others)
    try:
        batch = _rebuild(node, *iterators)
    except StopIteration:
        raise WireFormatError("a batch has fewer leaves than its structure") from None
    if any(list(islice(rest, 1)) for rest in iterators):
        raise WireFormatError("a batch has more leaves than its structure")
    return batch


def _rebuild(node: list[Any], tensors: Iterator[Any], scalars: Iterator[Any], others: Iterator[Any]) -> Any:
    code = node[0]
    if code == TENSOR:
        return next(tensors)
    if code == SCALAR:
        return next(scalars)
    if code == SCALARS:
        values = next(scalars)
        return list(values) if node[1] else tuple(values)
    if code == OTHER:
        return next(others)
    children = []
    for child in node[-1]:  # no comprehension: StopIteration must come out as itself
        children.append(_rebuild(child, tensors, scalars, others))
    if code == DICT:
        return dict(zip(node[1], children, strict=True))
    if code == ORDERED:
        return OrderedDict(zip(node[1], children, strict=True))
    if code == LIST:
        return children
    if code == TUPLE:
        return tuple(children)
    _, module, qualname, names, _ = node
    kind: Any = lookup(module, qualname, tuple(names))
    if code == NAMED:
        return tuple.__new__(kind, children)
    record = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(record, name, child)  # no constructor runs, and frozen dataclasses refuse setattr
    return record
