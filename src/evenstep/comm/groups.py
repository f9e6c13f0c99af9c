"""Which process groups a data plane needs, created in one order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from evenstep.comm.communicator import Communicator, SoloCommunicator
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.topology import Topology

__all__ = ["Groups", "check_backend", "check_device", "create_groups", "world_communicator"]

_DEVICE_OF = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}


@dataclass(frozen=True, slots=True)
class Groups:
    """The communicators of one rank; ``control``, ``balance`` and ``payload`` are None where it has no part.

    One thread at a time uses ``control``, ``balance`` and ``payload``; the training thread uses ``model``.
    """

    world: Communicator
    control: Communicator | None
    balance: Communicator | None
    payload: Communicator | None
    model: Communicator


def check_backend(backend: str, device: torch.device, field: str) -> None:
    """Refuse a backend that cannot move tensors of ``device``.

    Raises:
        ValueError: Unknown backend, or the wrong device for it.
    """
    if backend not in _DEVICE_OF:
        raise ValueError(f"{field}={backend!r}, expected one of {sorted(_DEVICE_OF)}")
    needed = _DEVICE_OF[backend]
    if needed != "cpu" and device.type != needed:
        raise ValueError(
            f"{field}={backend!r} moves tensors of {needed!r} devices but device is {str(device)!r}: its collectives "
            f"would fail. Pass device={needed!r}, or {field}='gloo'."
        )


def check_device(device: torch.device) -> None:
    """Refuse an accelerator that this process has not.

    Raises:
        ValueError: torch finds no such device.
    """
    if device.type in ("cpu", "meta"):
        return
    try:
        found = torch.get_device_module(device).device_count()
    except (RuntimeError, AttributeError):  # this torch was built without it
        found = 0
    if (device.index or 0) >= found:
        raise ValueError(
            f"device={str(device)!r}, but torch finds {found} {device.type!r} devices in this process: no batch could "
            "be put there. Check the driver, the build of torch and the devices that are visible, or pass device='cpu'."
        )


def world_communicator(timeout: timedelta) -> Communicator:
    """All ranks over the default process group, for the few words exchanged while building."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_world_size() == 1:
        return SoloCommunicator(dist.get_rank())
    config = dist.get_backend_config(group)
    device = torch.device("cpu")
    if "gloo" not in config and "mpi" not in config:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return ProcessGroupCommunicator(group, timeout=timeout, device=device, name="default")


def create_groups(
    topology: Topology,
    world: Communicator,
    backend: str,
    payload_backend: str,
    device: torch.device,
    timeout: timedelta,
) -> Groups:
    """Create every group on every rank (torch requires it) and return this rank's.

    A gloo group costs a descriptor per peer, so groups of one are none, and one group serves all the duties that
    the same thread has over the same ranks.
    """
    builder = _Builder(topology.rank, timeout)
    control = builder.group([sorted(topology.data_plane())], backend, device, "control")
    number = topology.dp_size // topology.balance_group_size
    members = [sorted(topology.data_plane(g)) for g in range(number)]
    balance = control if number == 1 else builder.group(members, backend, device, "balance")
    payload = balance
    if payload_backend != backend:
        payload = builder.group(members, payload_backend, device, "payload")
    model_backend = {v: k for k, v in _DEVICE_OF.items()}.get(device.type, "gloo")
    model = builder.group(topology.replicas, model_backend, device, "model-parallel")
    return Groups(world, control, balance, payload, model or SoloCommunicator(topology.rank))


@dataclass(frozen=True, slots=True)
class _Builder:
    rank: int
    timeout: timedelta

    def group(
        self, members: Sequence[Sequence[int]], backend: str, device: torch.device, name: str
    ) -> Communicator | None:
        """This rank's group of ``members``, each of which becomes a group; None if it is in none."""
        mine: Communicator | None = None
        for ranks in members:
            if len(ranks) == 1:
                if ranks[0] == self.rank:
                    mine = SoloCommunicator(self.rank)
                continue
            created = dist.new_group(sorted(ranks), backend=backend, timeout=self.timeout)
            if self.rank in ranks:
                where = torch.device("cpu") if backend == "gloo" else device
                mine = ProcessGroupCommunicator(
                    created, timeout=self.timeout, device=where, name=name, ranks=ranks
                )
        return mine
