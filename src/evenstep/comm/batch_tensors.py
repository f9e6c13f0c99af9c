"""The tensors of one batch to all peers in few broadcasts, of sizes that both sides derive from the same table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from evenstep.comm.batch_message import CONSTRUCTOR
from evenstep.comm.batch_structure import TensorKind
from evenstep.comm.buffers import BufferPool
from evenstep.comm.communicator import Communicator

__all__ = ["Layout", "TensorBroadcast"]

Shapes = Sequence[Sequence[int]]

DIRECT_BYTES = 1 << 21  # from here on one more broadcast costs less than copying into the packed buffer
_ALIGNMENT = 64


@dataclass(slots=True)
class _Group:
    """Tensors of one device type: those that share a buffer, and those large enough to travel alone."""

    device_type: str
    packed: list[tuple[int, int, int]] = field(default_factory=list)  # leaf, offset, bytes
    nbytes: int = 0
    direct: list[tuple[int, int]] = field(default_factory=list)  # leaf, bytes


class TensorBroadcast:
    """One packed buffer per device type, and one broadcast for each large tensor.

    The packed buffer of the host is the tail of the batch's message; `send` and `receive` move all else.

    Tensors on the communicator's own device are broadcast there, on the calling thread's current stream; those of
    another accelerator travel through the host. Received CPU tensors are writable views into pooled buffers that
    stay valid for as long as a view is kept. Strided tensors arrive contiguous.

    Args:
        communicator: The ranks of the replica.
        pool: Host memory for received tensors.
    """

    def __init__(self, communicator: Communicator, pool: BufferPool) -> None:
        self._communicator = communicator
        self._device = communicator.device
        self._pool = pool

    def send(self, tensors: Sequence[torch.Tensor], layout: Layout) -> None:
        """Broadcast ``tensors``, but for the packed ones on the host."""
        for group in layout.groups:
            through_host = group.device_type not in ("cpu", self._device.type)
            if group.nbytes and group.device_type != "cpu":
                buffer = torch.empty(
                    group.nbytes, dtype=torch.uint8, device=tensors[group.packed[0][0]].device
                )
                _pack(group, tensors, buffer)
                self._communicator.broadcast(buffer.cpu() if through_host else buffer, CONSTRUCTOR)
            for leaf, _ in group.direct:
                data = _bytes_of(tensors[leaf])
                self._communicator.broadcast(data.cpu() if through_host else data, CONSTRUCTOR)

    def receive(
        self, kinds: Sequence[TensorKind], shapes: Shapes, layout: Layout, host: torch.Tensor
    ) -> list[torch.Tensor]:
        """The tensors of ``kinds`` and ``shapes`` that the constructor sends; ``host`` are the packed ones."""
        tensors: dict[int, torch.Tensor] = {}
        for group in layout.groups:
            if group.nbytes:
                buffer = host
                if group.device_type != "cpu":
                    buffer = self._receive_bytes(group.nbytes, group.device_type)
                typed: dict[torch.dtype, torch.Tensor] = {}
                for leaf, offset, _ in group.packed:
                    dtype = kinds[leaf].dtype
                    if dtype not in typed:
                        typed[dtype] = buffer.view(dtype)
                    at = typed[dtype].storage_offset() + offset // dtype.itemsize
                    tensors[leaf] = typed[dtype].as_strided(shapes[leaf], _strides(shapes[leaf]), at)
            for leaf, nbytes in group.direct:
                data = self._receive_bytes(nbytes, group.device_type)
                tensors[leaf] = data.view(kinds[leaf].dtype).view(shapes[leaf])
        return [
            tensors[leaf]
            if leaf in tensors
            else torch.empty(shape, dtype=kind.dtype, device=self._device_of(kind.device_type))
            for leaf, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]

    def _receive_bytes(self, nbytes: int, device_type: str) -> torch.Tensor:
        device = self._device_of(device_type)
        through_host = device_type not in ("cpu", self._device.type)
        if through_host or device.type == "cpu":
            buffer = self._pool.take(nbytes)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._communicator.broadcast(buffer, CONSTRUCTOR)
        return buffer.to(device)

    def _device_of(self, device_type: str) -> torch.device:
        if device_type == self._device.type:
            return self._device
        if device_type == "cpu":
            return torch.device("cpu")
        return torch.device(device_type, torch.get_device_module(device_type).current_device())


class Layout:
    """Which tensor travels where: the same on both sides, from what both know.

    Args:
        kinds: Dtype and device type of each tensor.
        shapes: Its sizes.
    """

    __slots__ = ("groups", "host")

    def __init__(self, kinds: Sequence[TensorKind], shapes: Shapes) -> None:
        groups: dict[str, _Group] = {"cpu": _Group("cpu")}
        for leaf, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
            nbytes = kind.dtype.itemsize * math.prod(shape)
            if nbytes == 0:
                continue
            group = groups.setdefault(kind.device_type, _Group(kind.device_type))
            if nbytes >= DIRECT_BYTES:
                group.direct.append((leaf, nbytes))
                continue
            group.packed.append((leaf, group.nbytes, nbytes))
            group.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.host = groups["cpu"]
        self.groups = [groups[name] for name in sorted(groups)]

    def pack_host(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the packed tensors of the host into ``out`` (uint8 ``[host.nbytes]``)."""
        _pack(self.host, tensors, out)


def _pack(group: _Group, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=out.device)
    parts = []
    for leaf, _, nbytes in group.packed:
        parts.append(_bytes_of(tensors[leaf]))
        if nbytes % _ALIGNMENT:
            parts.append(padding[nbytes % _ALIGNMENT :])
    torch.cat(parts, out=out)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
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
