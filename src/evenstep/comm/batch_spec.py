"""A batch's structure declared in advance, so that none of it is told from rank to rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.comm.batch_structure import (
    DATACLASS,
    DICT,
    LIST,
    NAMED,
    ORDERED,
    SCALAR,
    SCALAR_TYPES,
    SCALARS,
    TENSOR,
    TUPLE,
    digest_of,
    dtype_name,
    dump,
)
from evenstep.comm.codec.classes import is_dataclass_type, is_named_tuple_type, record_fields
from evenstep.comm.codec.leaves import TENSOR_DTYPES
from evenstep.samples import BatchInfo

__all__ = ["BatchSpec", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a batch.

    Attributes:
        dtype: Its dtype.
        shape: Its size in every dimension; None where it changes from batch to batch.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in TENSOR_DTYPES:
            raise TypeError(f"dtype is {self.dtype!r}: its bytes cannot be sent; give a dense torch.dtype")
        object.__setattr__(self, "shape", tuple(self.shape))
        for size in self.shape:
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise ValueError(
                    f"shape is {self.shape!r}: each dimension is an int >= 0, or None if it changes"
                )


class BatchSpec:
    """What every batch of a loader looks like.

    ::

        BatchSpec(
            {
                "input_ids": TensorSpec(torch.int64, (1, 4096)),
                "cu_seqlens": TensorSpec(torch.int32, (None,)),
                "max_seqlen": int,
                "info": BatchInfo,
            },
            cpu_fields=("cu_seqlens",),
        )

    Args:
        fields: Nested dicts, lists, tuples and NamedTuples of `TensorSpec`; a scalar type (int, float, bool, str; it
            also allows None) for one number or string; ``list`` or ``tuple`` for a run of scalars; a dataclass
            or NamedTuple type for one whose fields are all scalars.
            In `evenstep.build_loader` ``"info"`` may be left out: every mapping batch gets it.
        cpu_fields: Paths of tensors that stay on the host (``"cu_seqlens"``, ``"vision.grid"``). All others are on
            one device.

    Raises:
        TypeError: ``fields`` holds anything else.
        ValueError: A path of ``cpu_fields`` is not in ``fields``.
    """

    def __init__(self, fields: Any, *, cpu_fields: Collection[str] = ()) -> None:
        self._fields = fields
        self.tensors: list[TensorSpec] = []
        self.paths: list[str] = []
        self.cpu_fields: frozenset[str] = frozenset(cpu_fields)
        self._matched: set[str] = set()
        self._tree = self._read(fields, "")
        unknown = sorted(self.cpu_fields - self._matched)
        if unknown:
            raise ValueError(
                f"cpu_fields names {unknown}, which the batch specification does not have: they would go to the device; "
                f"its tensors are {self.paths}"
            )
        shapes = [list(spec.shape) for spec in self.tensors]
        self.digest: int = digest_of(dump([self._tree, shapes]))
        self.dynamic: list[tuple[int, int]] = [
            (tensor, dim)
            for tensor, spec in enumerate(self.tensors)
            for dim, n in enumerate(spec.shape)
            if n is None
        ]

    def __repr__(self) -> str:
        """The same in every process, and different for different specifications: ranks compare it."""
        tensors = zip(self.paths, self.tensors, strict=True)
        told = ", ".join(f"{path}: {dtype_name(spec.dtype)}{list(spec.shape)}" for path, spec in tensors)
        return f"BatchSpec({told}; {self.digest:#x})"

    def with_info(self) -> BatchSpec:
        """This specification and the `evenstep.BatchInfo` that a mapping batch gets under ``"info"``, if it has none."""
        if not isinstance(self._fields, Mapping) or "info" in self._fields:
            return self
        fields = {**self._fields, "info": BatchInfo}
        kind = OrderedDict if type(self._fields) is OrderedDict else dict
        return BatchSpec(kind(fields), cpu_fields=self.cpu_fields)

    def structure(self, device_type: str) -> list[Any]:
        """The structure (as `describe` returns it) of batches whose tensors are on ``device_type``."""
        node: list[Any] = _with_device(self._tree, device_type)
        return node

    def dims_to_tell(self, tensors: list[torch.Tensor]) -> list[int]:
        """Sizes of the dynamic dimensions of a batch's tensors, in order.

        Raises:
            ValueError: A static dimension is not what was declared.
        """
        for path, spec, tensor in zip(self.paths, self.tensors, tensors, strict=True):
            if any(n is not None and n != got for n, got in zip(spec.shape, tensor.shape, strict=True)):
                raise ValueError(
                    f"batch field {path!r} has shape {tuple(tensor.shape)}, the batch specification says {spec.shape}: "
                    "peers would read other bytes; declare the dimension that changes as None"
                )
        return [tensors[tensor].shape[dim] for tensor, dim in self.dynamic]

    def shapes(self, told: list[int]) -> list[list[int]]:
        """Shapes of all tensors, from what `dims_to_tell` returned."""
        shapes = [[0 if n is None else n for n in spec.shape] for spec in self.tensors]
        for (tensor, dim), size in zip(self.dynamic, told, strict=True):
            shapes[tensor][dim] = size
        return shapes

    def check(self, structure: list[Any], tensors: list[torch.Tensor]) -> str:
        """Compare a batch's structure with this specification; returns the device type of its device tensors.

        Raises:
            ValueError: They differ; the message says where.
        """
        device_type = next((t.device.type for t in tensors if t.device.type != "cpu"), "cpu")
        if told := _difference(self.structure(device_type), structure, "batch"):
            raise ValueError(f"{told}: peers would read other bytes; make collate and batch_spec agree")
        return device_type

    def _read(self, node: Any, path: str) -> list[Any]:
        kind: type = type(node)
        if isinstance(node, TensorSpec):
            self.tensors.append(node)
            self.paths.append(path)
            above = {path[:end] for end in (*(i for i, c in enumerate(path) if c == "."), len(path))}
            self._matched |= above & self.cpu_fields
            return [
                TENSOR,
                dtype_name(node.dtype),
                len(node.shape),
                "cpu" if above & self.cpu_fields else None,
            ]
        if node is None or (isinstance(node, type) and node in SCALAR_TYPES):
            return [SCALAR]
        if node is list or node is tuple or node == [] or node == ():
            return [SCALARS, node is list or kind is list]
        if isinstance(node, type) and (names := record_fields(node)) is not None:
            code = NAMED if is_named_tuple_type(node) else DATACLASS
            return [code, node.__module__, node.__qualname__, list(names), [[SCALAR] for _ in names]]
        if isinstance(node, Mapping):
            code = ORDERED if kind is OrderedDict else DICT
            return [code, list(node), [self._read(child, _join(path, key)) for key, child in node.items()]]
        if kind is list or kind is tuple:
            return [
                LIST if kind is list else TUPLE,
                [self._read(child, _join(path, i)) for i, child in enumerate(node)],
            ]
        names = record_fields(kind)
        if names is not None:
            code = DATACLASS if is_dataclass_type(kind) else NAMED
            children = [self._read(getattr(node, name), _join(path, name)) for name in names]
            return [code, kind.__module__, kind.__qualname__, list(names), children]
        raise TypeError(
            f"the batch specification has {node!r} at {path!r}: give a TensorSpec, a scalar type, a dataclass or "
            "NamedTuple type, or a container of those"
        )


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _with_device(node: Any, device_type: str) -> Any:
    if node[0] == TENSOR:
        return [*node[:3], node[3] or device_type]
    if node[0] in (SCALAR, SCALARS):
        return node
    return [*node[:-1], [_with_device(child, device_type) for child in node[-1]]]


def _difference(declared: list[Any], found: list[Any], path: str) -> str:
    if declared == found:
        return ""
    if declared[0] != found[0] or declared[0] in (TENSOR, SCALARS) or declared[:-1] != found[:-1]:
        return f"{path} is {_words(found)}, the batch specification says {_words(declared)}"
    names = declared[1] if declared[0] in (DICT, ORDERED) else declared[3] if len(declared) > 3 else None
    if len(declared[-1]) != len(found[-1]):
        return f"{path} has {len(found[-1])} items, the batch specification says {len(declared[-1])}"
    for i, (a, b) in enumerate(zip(declared[-1], found[-1], strict=True)):
        if told := _difference(a, b, f"{path}[{i if names is None else names[i]!r}]"):
            return told
    return ""


def _words(node: list[Any]) -> str:
    if node[0] == TENSOR:
        return f"a {node[2]}-d {node[1]} tensor on {node[3]}"
    if node[0] == SCALAR:
        return "a scalar"
    if node[0] == SCALARS:
        return f"a {'list' if node[1] else 'tuple'} of scalars"
    if node[0] in (DICT, ORDERED):
        return f"a mapping with keys {node[1]}"
    if node[0] in (NAMED, DATACLASS):
        return f"a {node[2]} with fields {node[3]}"
    return {LIST: "a list", TUPLE: "a tuple"}.get(node[0], "a value of another kind")
