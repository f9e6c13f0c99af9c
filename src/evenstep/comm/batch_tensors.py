"""The tensors of one batch to all peers in few broadcasts, of sizes that both sides derive from the same table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from evenstep.comm.batch_message import CONSTRUCTOR
from evenstep.comm.batch_structure import TensorKind
from evenstep.comm.buffers import BufferPool
from evenstep.comm.communicator import Communicator

__all__ = ["TensorBroadcast"]

Shapes = Sequence[Sequence[int]]

DIRECT_BYTES = 1 << 20  # from here on one more broadcast costs less than copying into the packed buffer
_ALIGNMENT = 64
_POOL_BYTES = 1 << 28


@dataclass(slots=True)
class _Group:
    """Tensors of one device type: those that share a buffer, and those large enough to travel alone."""

    device_type: str
    packed: list[tuple[int, int, int]] = field(default_factory=list)  # leaf, offset, bytes
    nbytes: int = 0
    direct: list[tuple[int, int]] = field(default_factory=list)  # leaf, bytes


class TensorBroadcast:
    """One packed buffer per device type, and one broadcast for each large tensor.

    Tensors on the communicator's own device are broadcast there, on the calling thread's current stream; those of
    another accelerator travel through the host. Received CPU tensors are writable views into pooled buffers that
    stay valid for as long as a view is kept. Strided tensors arrive contiguous.

    Args:
        communicator: The ranks of the replica.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._device = communicator.device
        self._pool = BufferPool(max_bytes=_POOL_BYTES)

    def send(self, tensors: Sequence[torch.Tensor], kinds: Sequence[TensorKind]) -> None:
        """Broadcast ``tensors``, which are of ``kinds``."""
        for group in _layout(kinds, [tensor.shape for tensor in tensors]):
            through_host = group.device_type not in ("cpu", self._device.type)
            if group.nbytes:
                buffer = self._pack(group, tensors)
                self._communicator.broadcast(buffer.cpu() if through_host else buffer, CONSTRUCTOR)
            for leaf, _ in group.direct:
                data = _bytes_of(tensors[leaf])
                self._communicator.broadcast(data.cpu() if through_host else data, CONSTRUCTOR)

    def receive(self, kinds: Sequence[TensorKind], shapes: Shapes) -> list[torch.Tensor]:
        """The tensors of ``kinds`` and ``shapes`` that the constructor sends."""
        tensors: dict[int, torch.Tensor] = {}
        for group in _layout(kinds, shapes):
            if group.nbytes:
                buffer = self._receive_bytes(group.nbytes, group.device_type)
                for leaf, offset, nbytes in group.packed:
                    tensors[leaf] = buffer[offset : offset + nbytes]
            for leaf, nbytes in group.direct:
                tensors[leaf] = self._receive_bytes(nbytes, group.device_type)
        return [
            tensors[leaf].view(kind.dtype).view(list(shape))
            if leaf in tensors
            else torch.empty(list(shape), dtype=kind.dtype, device=self._device_of(kind.device_type))
            for leaf, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]

    def _pack(self, group: _Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        device = tensors[group.packed[0][0]].device
        buffer = self._buffer(group.nbytes, device)
        parts, end = [], 0
        for leaf, offset, nbytes in group.packed:
            if offset != end:
                parts.append(torch.zeros(offset - end, dtype=torch.uint8, device=device))
            parts.append(_bytes_of(tensors[leaf]))
            end = offset + nbytes
        return torch.cat(parts, out=buffer)

    def _receive_bytes(self, nbytes: int, device_type: str) -> torch.Tensor:
        device = self._device_of(device_type)
        through_host = device_type not in ("cpu", self._device.type)
        buffer = self._pool.take(nbytes) if through_host else self._buffer(nbytes, device)
        self._communicator.broadcast(buffer, CONSTRUCTOR)
        return buffer.to(device)

    def _buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return self._pool.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _device_of(self, device_type: str) -> torch.device:
        if device_type == self._device.type:
            return self._device
        if device_type == "cpu":
            return torch.device("cpu")
        return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _layout(kinds: Sequence[TensorKind], shapes: Shapes) -> list[_Group]:
    """Which tensor travels where: the same on both sides, from what both know."""
    groups: dict[str, _Group] = {}
    for leaf, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        nbytes = kind.dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes == 0:
            continue
        group = groups.setdefault(kind.device_type, _Group(kind.device_type))
        if nbytes >= DIRECT_BYTES:
            group.direct.append((leaf, nbytes))
            continue
        offset = -(-group.nbytes // _ALIGNMENT) * _ALIGNMENT
        group.packed.append((leaf, offset, nbytes))
        group.nbytes = offset + nbytes
    return [groups[name] for name in sorted(groups)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1): it keeps odd strides of one-element and expanded tensors, which refuse another dtype.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
