"""A whole training job in one process: every rank a thread, with the real data plane over simulated groups."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from evenstep.comm.communicator import Communicator, SoloCommunicator
from evenstep.comm.groups import Groups
from evenstep.comm.plane import DataPlane
from evenstep.comm.simulated import SimulatedGroup
from evenstep.topology import Topology

__all__ = ["SimulatedWorld"]


class SimulatedWorld:
    """Ranks of a mesh as threads.

    Every call of `planes` is a data plane of its own, as every loader has; `run` gives each rank one.

    Args:
        mesh: Size of each dimension by name, slowest first, or a number of data-parallel ranks.
        timeout: Seconds that a rank waits for the others in a collective.
        dp_dims, reader_ranks, planner_rank, balance_group_size: As in `DataPlane.from_mesh`.
        shared_memory: The same, for the planes of `run`.
    """

    def __init__(
        self,
        mesh: int | Mapping[str, int],
        *,
        timeout: float = 30.0,
        dp_dims: Sequence[str] | None = None,
        reader_ranks: str | Sequence[int] | None = None,
        planner_rank: int | None = None,
        balance_group_size: int | None = None,
        shared_memory: bool = False,
    ) -> None:
        shape = {"dp": mesh} if isinstance(mesh, int) else dict(mesh)
        self.size: int = int(np.prod(list(shape.values())))
        self._timeout = timeout
        self._shared_memory = shared_memory
        ranks = np.arange(self.size).reshape(tuple(shape.values()))
        self.topologies: list[Topology] = [
            Topology.from_mesh(
                ranks,
                list(shape),
                rank=rank,
                dp_dims=dp_dims,
                reader_ranks=reader_ranks,
                planner_rank=planner_rank,
                balance_group_size=balance_group_size,
            )
            for rank in range(self.size)
        ]
        self.groups: list[SimulatedGroup] = []

    def planes(self) -> list[DataPlane]:
        """One data plane per rank, over fresh groups."""
        first = self.topologies[0]
        number = first.dp_size // first.balance_group_size
        world = self._group([range(self.size)])
        control = self._group([first.data_plane()])
        balance = control if number == 1 else self._group([first.data_plane(g) for g in range(number)])
        model = self._group(first.replicas)
        return [
            DataPlane(
                topology,
                # One thread uses control, balance and payload, so one communicator serves all three.
                Groups(world[rank], control.get(rank), balance.get(rank), balance.get(rank), model[rank]),
            )
            for rank, topology in enumerate(self.topologies)
        ]

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = 120.0) -> list[Any]:
        """Call ``function(plane, *args)`` on every rank; the results by rank.

        Raises:
            BaseException: What the first rank to fail raised.
            TimeoutError: A rank did not end within ``deadline`` seconds.
        """
        outcomes, failed = self._run(function, args, deadline)
        if failed:
            raise outcomes[failed[0]]
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, deadline: float = 120.0) -> list[Any]:
        """As `run`, but an error is returned in its rank's place."""
        return self._run(function, args, deadline)[0]

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], deadline: float
    ) -> tuple[list[Any], list[int]]:
        """Results by rank, and the ranks that failed, first failure first."""
        planes = self.planes()
        failed: list[int] = []
        results: list[Any] = [
            TimeoutError(f"rank {r} did not end within {deadline} s") for r in range(self.size)
        ]

        def main(rank: int) -> None:
            try:
                if self._shared_memory:
                    planes[rank].share_memory()
                results[rank] = function(planes[rank], *args)
                planes[rank].close()
            except BaseException as error:
                results[rank] = error
                failed.append(rank)
                # As at the exit of a process: loaders go, their threads end, the others are told why, and only
                # then is the rank gone.
                traceback.clear_frames(error.__traceback__)
                planes[rank].close()
                for group in self.groups:
                    group.kill(rank)

        threads = [
            threading.Thread(target=main, args=(rank,), name=f"rank{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline)
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        return results, failed + [rank for rank in hung if rank not in failed]

    def _group(self, members: Sequence[Sequence[int]]) -> dict[int, Communicator]:
        """Each member's end of its group."""
        ends: dict[int, Communicator] = {}
        for ranks in members:
            if len(ranks) == 1:
                ends[ranks[0]] = SoloCommunicator(ranks[0])
                continue
            group = SimulatedGroup(tuple(ranks), self._timeout)
            self.groups.append(group)
            ends.update({rank: group.communicator(rank) for rank in ranks})
        return ends
