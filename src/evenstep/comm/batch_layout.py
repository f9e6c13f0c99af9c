"""Which tensor of a batch travels in which buffer: the same on both sides, from what both know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from evenstep.comm.batch_structure import TensorKind

__all__ = ["Group", "Layout", "Pack", "Shapes", "bytes_of"]

Shapes = Sequence[Sequence[int]]

DIRECT_BYTES = 1 << 22  # from here on a broadcast of its own costs less than copying into a packed buffer
PACK_BYTES = 1 << 23  # of host tensors: one pack is filled while the one before it travels
LARGEST_PACK = PACK_BYTES * 3 // 2 + DIRECT_BYTES  # of the host, at most
_ALIGNMENT = 64


@dataclass(slots=True)
class Pack:
    """Tensors that share a buffer.

    Attributes:
        leaves: Number of the tensor, offset and bytes of each.
        nbytes: Size of the buffer.
    """

    leaves: list[tuple[int, int, int]] = field(default_factory=list)
    nbytes: int = 0

    def fill(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the tensors into ``out`` (uint8 ``[nbytes]``)."""
        padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=out.device)
        parts = []
        for leaf, _, nbytes in self.leaves:
            parts.append(bytes_of(tensors[leaf]))
            if nbytes % _ALIGNMENT:
                parts.append(padding[nbytes % _ALIGNMENT :])
        torch.cat(parts, out=out)

    def filling(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> Iterator[int]:
        """Write the tensors of the host into ``out``, one after the other; yields up to where."""
        target = out.numpy()
        for leaf, offset, nbytes in self.leaves:
            target[offset : offset + nbytes] = bytes_of(tensors[leaf]).numpy()
            yield offset + nbytes
        yield self.nbytes

    def views(
        self, kinds: Sequence[TensorKind], shapes: Shapes, buffer: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """The tensors that lie in ``buffer``, as views, by their number."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = {}
        for leaf, offset, _ in self.leaves:
            dtype = kinds[leaf].dtype
            if dtype not in typed:
                typed[dtype] = buffer.view(dtype)
            at = typed[dtype].storage_offset() + offset // dtype.itemsize
            found[leaf] = typed[dtype].as_strided(shapes[leaf], _strides(shapes[leaf]), at)
        return found


@dataclass(slots=True)
class Group:
    """The tensors of one device type.

    Attributes:
        device_type: Where they come from and where they go.
        packs: Those that share buffers.
        direct: Those large enough to travel alone: number and bytes of each.
    """

    device_type: str
    packs: list[Pack] = field(default_factory=list)
    direct: list[tuple[int, int]] = field(default_factory=list)


class Layout:
    """How the tensors of one batch travel.

    Tensors of an accelerator that are not large share one buffer; those of the host share one for every 8 MiB or so.

    Args:
        kinds: Dtype and device type of each tensor.
        shapes: Its sizes.

    Attributes:
        host: The tensors of the host.
        groups: All of them, by device type in alphabetical order, so that the host is among them.
    """

    __slots__ = ("groups", "host")

    def __init__(self, kinds: Sequence[TensorKind], shapes: Shapes) -> None:
        groups: dict[str, Group] = {"cpu": Group("cpu")}
        small: dict[str, list[tuple[int, int]]] = {}
        for leaf, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
            nbytes = kind.dtype.itemsize * math.prod(shape)
            if nbytes == 0:
                continue
            group = groups.setdefault(kind.device_type, Group(kind.device_type))
            if nbytes >= DIRECT_BYTES:
                group.direct.append((leaf, nbytes))
            else:
                small.setdefault(kind.device_type, []).append((leaf, nbytes))
        for name, leaves in small.items():
            groups[name].packs = _packs(leaves, PACK_BYTES if name == "cpu" else None)
        self.host: Group = groups["cpu"]
        self.groups: list[Group] = [groups[name] for name in sorted(groups)]


def _packs(leaves: list[tuple[int, int]], size: int | None) -> list[Pack]:
    """Packs of about ``size`` bytes each, as equal as whole tensors allow; None: one for all."""
    whole = sum(map(_padded, (nbytes for _, nbytes in leaves)))
    wanted = whole / max(1, round(whole / size)) if size else whole
    packs = [Pack()]
    before = 0
    for leaf, nbytes in leaves:
        padded = _padded(nbytes)
        if packs[-1].leaves and before + padded / 2 > wanted * len(packs):
            packs.append(Pack())
        packs[-1].leaves.append((leaf, packs[-1].nbytes, nbytes))
        packs[-1].nbytes += padded
        before += padded
    return packs


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, uint8 ``[n]``: a view where it is contiguous."""
    if tensor.stride() == (1,) and not tensor.is_complex():
        return tensor.view(torch.uint8)
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1): it keeps odd strides of one-element and expanded tensors, which refuse another dtype.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous tensor; no size is zero."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides
