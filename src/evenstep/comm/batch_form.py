"""What a batch mostly has in common with the one before it: worked out, told and checked only where it changed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.comm.batch_layout import Layout, Shapes
from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.batch_structure import (
    DATACLASS,
    DICT,
    DTYPES,
    LIST,
    NAMED,
    ORDERED,
    SCALAR,
    SCALAR_TYPES,
    SCALARS,
    TENSOR,
    TUPLE,
    Leaves,
    TensorKind,
    describe,
    digest_of,
    dump,
    parse,
    tensor_kinds,
)
from evenstep.comm.codec.classes import is_reachable, record_fields
from evenstep.errors import ConfigMismatch, WireFormatError

__all__ = ["Form", "FormReader", "FormWriter", "collect"]


@dataclass(slots=True)
class Form:
    """Structure and sizes of a batch, and how it travels.

    Attributes:
        structure: What tells it from others (with a specification: the device type).
        node: The structure.
        kinds: Its tensors.
        shapes: Their sizes.
        digest: Of structure and sizes.
        layout: Which tensor travels in which buffer.
    """

    structure: bytes
    node: list[Any]
    kinds: list[TensorKind]
    shapes: Shapes
    digest: int
    layout: Layout


class FormWriter:
    """The constructor's side.

    Args:
        spec: What every batch looks like; None to tell it.

    Attributes:
        last: What the peers were told last.
    """

    def __init__(self, spec: BatchSpec | None) -> None:
        self._spec = spec
        self.last: Form | None = None

    def write(self, batch: Any, told: dict[str, Any]) -> tuple[Form, Leaves]:
        """The form of a batch, and its leaves; into ``told`` goes what the peers cannot know of the form.

        Raises:
            TypeError: The batch holds what cannot be told.
            ValueError: It is not what the specification says.
        """
        last, leaves = self.last, Leaves()
        if last is not None and collect(last.node, batch, leaves):
            node, structure = last.node, last.structure
        else:
            leaves = Leaves()
            node, structure = describe(batch, leaves), b""
        shapes = [tensor.shape for tensor in leaves.tensors]
        if self._spec is not None:
            told["device"] = self._spec.check(node, leaves.tensors)
            told["dims"] = self._spec.dims_to_tell(leaves.tensors)
            told["spec"] = self._spec.digest
            return _form(told["device"].encode(), node, shapes, last), leaves
        structure = structure or dump(node)
        form = _form(structure, node, shapes, last)
        told["digest"] = form.digest
        if form is not last:
            told["shapes"] = shapes
        if last is None or last.structure != structure:
            told["structure"] = node
        return form, leaves


class FormReader:
    """A peer's side.

    Args:
        spec: What every batch looks like; None to be told it.
        sender: Global rank of the constructor.

    Attributes:
        last: What this rank was told last.
    """

    def __init__(self, spec: BatchSpec | None, sender: int) -> None:
        self._spec = spec
        self._sender = sender
        self.last: Form | None = None

    def read(self, told: dict[str, Any], tail_bytes: int) -> Form:
        """The form of the batch of which the constructor has told ``told``, with a tail of that size.

        Raises:
            ConfigMismatch: The constructor has another specification.
            WireFormatError: What it told does not go together.
        """
        form = self._told(told) if self._spec is None else self._declared(told, self._spec)
        packs = form.layout.host.packs
        first = packs[0].nbytes if packs else 0
        if first != tail_bytes:
            raise WireFormatError(
                f"rank {self._sender} sent {tail_bytes} bytes of small tensors, its own table of sizes says {first}"
            )
        if self._spec is None and told.get("digest") != form.digest:
            raise self._never_told()
        self.last = form
        return form

    def _told(self, told: dict[str, Any]) -> Form:
        last = self.last
        if "structure" in told:
            structure = dump(told["structure"])
            node = parse(structure)
        elif last is None:
            raise self._never_told()
        elif "shapes" not in told:
            return last
        else:
            structure, node = last.structure, last.node
        return _form(structure, node, told["shapes"], last)

    def _declared(self, told: dict[str, Any], spec: BatchSpec) -> Form:
        if told.get("spec") != spec.digest:
            raise ConfigMismatch(
                f"rank {self._sender} sends batches by another batch specification than this rank's: its bytes would be "
                "misread; give every rank of a data-parallel replica the same batch_spec"
            )
        return _form(
            told["device"].encode(), spec.structure(told["device"]), spec.shapes(told["dims"]), self.last
        )

    def _never_told(self) -> WireFormatError:
        return WireFormatError(
            f"rank {self._sender} sent a batch of a structure that this rank was never told; give every rank of a "
            "data-parallel replica the same batch_spec"
        )


def _form(structure: bytes, node: list[Any], shapes: Shapes, last: Form | None) -> Form:
    """``last`` if it is the same."""
    alike = last is not None and last.structure == structure
    if last is not None and alike and last.shapes == shapes:
        return last
    kinds = last.kinds if last is not None and alike else tensor_kinds(node)
    if [len(shape) for shape in shapes] != [kind.ndim for kind in kinds] or any(
        type(n) is not int or n < 0 for shape in shapes for n in shape
    ):
        raise WireFormatError(f"sizes {shapes} do not fit the structure of the batch")
    return Form(structure, node, kinds, shapes, digest_of(structure + dump([shapes])), Layout(kinds, shapes))


def collect(node: list[Any], value: Any, leaves: Leaves) -> bool:
    """Whether ``describe`` would return ``node``, in a third of its time; only then is ``leaves`` complete.

    May be False where it would.
    """
    code = node[0]
    kind: type = type(value)
    if code == TENSOR:
        _, dtype, ndim, device = node
        if kind is not torch.Tensor or value.dtype is not DTYPES[dtype] or value.layout is not torch.strided:
            return False
        leaves.tensors.append(value.detach() if value.requires_grad else value)
        return bool(value.dim() == ndim and value.device.type == device)
    if code == SCALAR:
        leaves.scalars.append(value)
        return kind in SCALAR_TYPES
    if code == SCALARS:
        leaves.scalars.append(value)
        return kind is (list if node[1] else tuple) and all(type(item) in SCALAR_TYPES for item in value)
    if code in (DICT, ORDERED):
        if kind is not (dict if code == DICT else OrderedDict) or any(type(key) is not str for key in value):
            return False
        names, items = node[1], value.values()
        same = names == list(value)
    elif code in (NAMED, DATACLASS):
        _, module, qualname, names, _ = node
        same = kind.__module__ == module and kind.__qualname__ == qualname and is_reachable(kind)
        same = same and record_fields(kind) == tuple(names)
        items = [getattr(value, name) for name in names] if same else ()
    elif code in (LIST, TUPLE):
        same, items = kind is (list if code == LIST else tuple) and len(node[1]) == len(value), value
    else:
        return False
    return same and all(collect(child, item, leaves) for child, item in zip(node[-1], items, strict=True))
