"""The data plane: who talks with whom, over which groups, and how a rank leaves."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenstep.comm.agreement import agree, dp_ranks_per_host
from evenstep.comm.communicator import Communicator, Launcher, SoloCommunicator
from evenstep.comm.gloo_threads import let_go
from evenstep.comm.groups import Groups, check_backend, check_device, create_groups, world_communicator
from evenstep.comm.leaving import abandon, leave, leave_gently, shut
from evenstep.comm.rounds import Rounds
from evenstep.shown import shown
from evenstep.topology import Topology

__all__ = ["CLOSE_GRACE", "DEFAULT_TIMEOUT", "DataPlane"]

DEFAULT_TIMEOUT = timedelta(minutes=5)
CLOSE_GRACE = 5.0  # seconds that a leaving rank waits for the others


class DataPlane:
    """Topology, groups and the conversation of one loader; every loader has its own.

    Build it with `from_mesh` on the main thread of every rank, in the same order.

    Attributes:
        topology: Roles of the ranks.
        world: All ranks; used while building only.
        balance: The ranks of this balance group that read, plan or construct; None on pure receivers.
        payload: The same ranks over the payload backend; None on pure receivers.
        model: This data-parallel replica, its constructor at position 0.
        rounds: The status-first conversation of the data plane; None on pure receivers.
        close_grace: Seconds that `close` waits for the other ranks before it gives up on them.
    """

    def __init__(self, topology: Topology, groups: Groups) -> None:
        self.topology = topology
        self.world: Communicator = groups.world
        self.balance: Communicator | None = groups.balance
        self.payload: Communicator | None = groups.payload
        self.model: Communicator = groups.model
        self.rounds: Rounds | None = None if groups.control is None else Rounds(groups.control)
        self.close_grace = CLOSE_GRACE
        everyone = (groups.control, groups.balance, groups.payload, groups.model)
        self._communicators = tuple(c for c in everyone if c is not None)
        # Runs once: at `close`, when the plane is collected, or at exit; then after the finalizers of the nodes
        # that were built on it, whose threads have ended by then.
        self._leave = weakref.finalize(self, leave_gently, self.rounds, self._communicators, self.close_grace)

    @classmethod
    def single(cls) -> DataPlane:
        """One process without torch.distributed."""
        solo = SoloCommunicator()
        return cls(Topology.single(), Groups(solo, solo, solo, solo, solo))

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh | None,
        *,
        dp_dims: Sequence[str] | None = None,
        reader_ranks: str | Sequence[int] | None = None,
        planner_rank: int | None = None,
        balance_group_size: int | str | None = None,
        backend: str = "gloo",
        payload_backend: str | None = None,
        device: torch.device | str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        shared_memory: bool = True,
    ) -> DataPlane:
        """Roles and process groups for ``mesh``, created in one order on every rank.

        Args:
            mesh: A device mesh that covers the world; None for one process.
            dp_dims: Data-parallel dimensions; default ``dp_replicate``, ``dp_shard``, ``dp``.
            reader_ranks: None (constructors), ``"all"``, or the global ranks that read.
            planner_rank: Global rank that plans; default: the first constructor of a balance group.
            balance_group_size: dp ranks balanced together; ``"node"``: those of one host.
            backend: Backend of control messages: "gloo", "nccl" or "hccl".
            payload_backend: Backend of payload; default: ``backend``.
            device: Device of accelerator backends and of the batches that model-parallel peers receive.
            timeout: Longest wait for another rank.
            shared_memory: Whether samples and batches go through memory between ranks that share a host, where all ranks of
                their group do; else everything goes through the backends.

        Raises:
            ValueError, TypeError: An argument does not fit; on the rank where it does not.
            RemoteRankError: The same, on the other ranks.
            ConfigMismatch: Ranks were given different arguments; on every rank.
        """
        if mesh is None:
            return cls.single()
        is_mesh = callable(getattr(mesh, "size", None))
        unfit = None if is_mesh else _no_mesh(mesh)
        if not dist.is_initialized():
            raise unfit or RuntimeError(
                f"the mesh has {mesh.size()} ranks but torch.distributed is not initialised, so they cannot talk; "
                "call torch.distributed.init_process_group() first"
            )
        where = torch.device("cpu") if device is None else torch.device(device)
        world = world_communicator(timeout)

        def roles(group: int | None) -> Topology:
            return Topology.from_mesh(
                mesh.mesh.cpu().numpy(),
                mesh.mesh_dim_names,
                rank=dist.get_rank(),
                dp_dims=dp_dims,
                reader_ranks=reader_ranks,
                planner_rank=planner_rank,
                balance_group_size=group,
            )

        topology, problem = None, None
        try:
            if unfit is not None:
                raise unfit
            check_device(where)
            check_backend(backend, where, "backend")
            check_backend(payload_backend or backend, where, "payload_backend")
            topology = roles(None if balance_group_size == "node" else balance_group_size)  # type: ignore[arg-type]  # refused there
        except Exception as error:
            problem = error
        told = {
            "mesh": f"{tuple(mesh.shape)} {mesh.mesh_dim_names}" if unfit is None else "",
            "roles": ""
            if topology is None
            else repr((topology.replicas, topology.readers, topology.planners)),
            "balance_group_size": str(balance_group_size),
            "backend": backend,
            "payload_backend": payload_backend or backend,
            "timeout": str(timeout),
            "shared_memory": str(bool(shared_memory)),
        }
        hosts = agree(world, told, problem)
        assert topology is not None  # else agree() has raised
        if balance_group_size == "node":
            topology = roles(dp_ranks_per_host(topology, hosts))
        groups = create_groups(topology, world, backend, payload_backend or backend, where, timeout)
        plane = cls(topology, groups)
        if shared_memory:
            plane.share_memory()
        return plane

    def share_memory(self) -> None:
        """Have payload and batches go through memory where all ranks of their group can; all ranks call it together."""
        for communicator in (self.payload, self.model):
            if communicator is not None:
                communicator.share_memory()

    @property
    def is_constructor(self) -> bool:
        """Whether this rank builds batches."""
        return self.topology.is_constructor

    @property
    def assists(self) -> bool:
        """Whether this rank reads or plans for others but builds no batches."""
        return self.rounds is not None and not self.topology.is_constructor

    @property
    def is_planner(self) -> bool:
        """Whether this rank plans for its balance group."""
        return self.topology.rank == self.topology.planner

    def agree(self, config: Mapping[str, str], problem: Exception | None = None) -> None:
        """Raise on every rank if one has a ``problem`` or another ``config``; see `from_mesh`.

        Raises:
            RuntimeError: The plane has been closed, with the loader that used it.
        """
        if len(self.world.ranks) > 1 and not self._leave.alive:
            raise RuntimeError(
                "this data plane has been closed, with the loader that used it: its groups are not used again. Pass the "
                "mesh, or make a plane for each loader with DataPlane.from_mesh(mesh)."
            )
        agree(self.world, config, problem)

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: its next header tells the others why."""
        if self.rounds is not None:
            self.rounds.fail(error)

    def shut(self) -> None:
        """Begin no more windows, and wait for a thread that is in one; for `close_grace` seconds, then it is abandoned."""
        if self.rounds is not None and self._leave.alive:
            shut(self.rounds, self._communicators, self.close_grace)

    def close(self) -> None:
        """Tell the others that this rank leaves, then use the groups no more.

        A thread that is in a window ends it first. Idempotent; never raises an error of the others.
        """
        if self._leave.detach() is not None:
            leave(self.rounds, self._communicators, self.close_grace)
            let_go()

    def launch_through(self, launcher: Launcher) -> None:
        """Have ``launcher`` start every collective of reading, planning and exchanging from now on.

        It must not hold the nodes of a graph: they could not be collected any more.
        """
        for communicator in self._communicators:
            if communicator is not self.model:
                communicator.launcher = launcher

    def abandon(self) -> None:
        """Stop waiting for anybody, in any thread, now and later."""
        abandon(self.rounds, self._communicators)


def _no_mesh(mesh: object) -> TypeError:
    return TypeError(
        "mesh must be a DeviceMesh over the whole world, a ready DataPlane, or None for one process, but is "
        f"{shown(mesh)} ({type(mesh).__name__}). Make one with init_device_mesh('cpu', (world_size,), "
        "mesh_dim_names=('dp',))."
    )
