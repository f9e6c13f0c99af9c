"""The tensors of one batch to all peers in few broadcasts, of sizes that both sides derive from the same table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from evenstep.comm.batch_form import Form
from evenstep.comm.batch_layout import Group, Pack, bytes_of
from evenstep.comm.batch_message import CONSTRUCTOR
from evenstep.comm.buffers import Pool
from evenstep.comm.communicator import Communicator

__all__ = ["TensorBroadcast"]


class TensorBroadcast:
    """Packed buffers of small tensors, and one broadcast for each large one.

    The first packed buffer of the host is the tail of the batch's message, sent with it; all else moves here.

    Tensors on the communicator's own device are broadcast there, on the calling thread's current stream; those of
    another accelerator travel through the host. Received CPU tensors are writable views into pooled buffers that
    stay valid for as long as a view is kept. Strided tensors arrive contiguous.

    Args:
        communicator: The ranks of the replica.
        pool: Host memory for tensors on their way.
    """

    def __init__(self, communicator: Communicator, pool: Pool) -> None:
        self._communicator = communicator
        self._device = communicator.device
        self._pool = pool

    def host_buffers(self, form: Form, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """What is to be broadcast of the host's ``tensors`` behind the first pack; packed when asked for."""
        for pack in form.layout.host.packs[1:]:
            buffer = self._pool.take(pack.nbytes)
            pack.fill(tensors, buffer)
            yield buffer
        for leaf, _ in form.layout.host.direct:
            yield bytes_of(tensors[leaf])

    def send_from_device(self, form: Form, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the ``tensors`` that are not on the host."""
        for group in form.layout.groups:
            if group is not form.layout.host:
                self._broadcast(self._device_buffers(tensors, group))

    def in_message(self, form: Form, tail: torch.Tensor) -> dict[int, torch.Tensor]:
        """The tensors of the first pack by number, if ``tail`` begins with it."""
        packs = form.layout.host.packs[:1]
        if not packs or packs[0].nbytes > tail.numel():
            return {}
        return packs[0].views(form.kinds, form.shapes, tail[: packs[0].nbytes])

    def receive_on_host(self, form: Form, found: dict[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the host's tensors behind the first pack are to be received into; they go into ``found`` by number."""
        host = form.layout.host
        if len(host.packs) <= 1 and not host.direct:
            return
        packs = host.packs[1:]
        buffers = [self._pool.take(pack.nbytes) for pack in packs]
        alone = [self._pool.take(nbytes) for _, nbytes in host.direct]
        yield from buffers
        yield from alone
        found.update(_tensors(form, host, packs, buffers, alone))

    def receive_on_device(self, form: Form) -> dict[int, torch.Tensor]:
        """All other tensors by number."""
        found: dict[int, torch.Tensor] = {}
        for group in form.layout.groups:
            if group is form.layout.host:
                continue
            sizes = [pack.nbytes for pack in group.packs] + [nbytes for _, nbytes in group.direct]
            device = self.device_of(group.device_type)
            if group.device_type == self._device.type:
                buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
                self._broadcast(iter(buffers))
            else:
                staged = [self._pool.take(nbytes) for nbytes in sizes]
                self._broadcast(iter(staged))
                buffers = [buffer.to(device) for buffer in staged]
            packed = len(group.packs)
            found.update(_tensors(form, group, group.packs, buffers[:packed], buffers[packed:]))
        return found

    def device_of(self, device_type: str) -> torch.device:
        """Where tensors of ``device_type`` belong on this rank."""
        if device_type == self._device.type:
            return self._device
        if device_type == "cpu":
            return torch.device("cpu")
        return torch.device(device_type, torch.get_device_module(device_type).current_device())

    def _broadcast(self, buffers: Iterator[torch.Tensor]) -> None:
        self._communicator.broadcast_all(buffers, CONSTRUCTOR)

    def _device_buffers(self, tensors: Sequence[torch.Tensor], group: Group) -> Iterator[torch.Tensor]:
        through_host = group.device_type != self._device.type
        for pack in group.packs:
            device = tensors[pack.leaves[0][0]].device
            buffer = torch.empty(pack.nbytes, dtype=torch.uint8, device=device)
            pack.fill(tensors, buffer)
            yield buffer.cpu() if through_host else buffer
        for leaf, _ in group.direct:
            data = bytes_of(tensors[leaf])
            yield data.cpu() if through_host else data


def _tensors(
    form: Form,
    group: Group,
    packs: Sequence[Pack],
    buffers: Sequence[torch.Tensor],
    alone: Sequence[torch.Tensor],
) -> dict[int, torch.Tensor]:
    found = {}
    for pack, buffer in zip(packs, buffers, strict=True):
        found.update(pack.views(form.kinds, form.shapes, buffer))
    for (leaf, _), buffer in zip(group.direct, alone, strict=True):
        found[leaf] = buffer.view(form.kinds[leaf].dtype).view(form.shapes[leaf])
    return found
