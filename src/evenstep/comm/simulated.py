"""Ranks as threads of one process, behind the same communicator: for tests, notebooks and simulation."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from evenstep.comm.communicator import Abandoned, Launcher, launch_here
from evenstep.comm.introduction import share_memory
from evenstep.comm.shared_memory import SharedMemory
from evenstep.errors import RemoteRankError

__all__ = ["SimulatedCommunicator", "SimulatedGroup"]


@dataclass
class _Meeting:
    """One collective: what each position brought, and who has taken it away."""

    kind: str
    brought: dict[int, Any] = field(default_factory=dict)
    taken: int = 0


class SimulatedGroup:
    """The meeting place of one group of simulated ranks.

    Unlike gloo it notices when ranks call different collectives or disagree about sizes.

    Args:
        ranks: Global rank at each position.
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float = 60.0) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.collectives: int = 0
        self.bytes_moved = 0
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._dead: set[int] = set()

    def communicator(self, rank: int) -> SimulatedCommunicator:
        """The communicator of global ``rank``."""
        return SimulatedCommunicator(self, self.ranks.index(rank))

    def kill(self, rank: int) -> None:
        """``rank`` is gone, as if its process had died: whoever waits for it gets an error."""
        with self._changed:
            if rank in self.ranks:
                self._dead.add(self.ranks.index(rank))
            self._changed.notify_all()

    def bring(self, turn: int, position: int, kind: str, value: Any) -> None:
        """Come to the group's ``turn``-th collective with ``value``; waits for nobody."""
        with self._changed:
            meeting = self._meetings.setdefault(turn, _Meeting(kind))
            if meeting.kind != kind:
                raise AssertionError(f"collective {turn}: {kind} here, {meeting.kind} elsewhere")
            meeting.brought[position] = value
            self._changed.notify_all()

    def meet(self, turn: int, leaving: threading.Event) -> dict[int, Any]:
        """What everybody brought to the ``turn``-th collective, once all have."""
        deadline = time.monotonic() + self.timeout
        with self._changed:
            meeting = self._meetings[turn]
            while len(meeting.brought) < len(self.ranks):
                missing = self._dead - set(meeting.brought)
                if missing:
                    gone = sorted(self.ranks[p] for p in missing)
                    raise RemoteRankError(f"the connection to rank {gone[0]} broke: it is gone", rank=gone[0])
                if leaving.is_set():
                    raise Abandoned("this rank gave up waiting: it shuts down")
                if time.monotonic() > deadline:
                    here = sorted(self.ranks[p] for p in meeting.brought)
                    raise RemoteRankError(
                        f"no answer within {self.timeout:g} s; only the ranks {here} are here"
                    )
                self._changed.wait(0.05)
            meeting.taken += 1
            if meeting.taken == len(self.ranks):
                del self._meetings[turn]
                self.collectives += 1
            return meeting.brought


class SimulatedCommunicator:
    """One rank's end of a `SimulatedGroup`; see `Communicator`."""

    def __init__(self, group: SimulatedGroup, position: int) -> None:
        self.ranks: tuple[int, ...] = group.ranks
        self.position = position
        self.device: torch.device = torch.device("cpu")
        self.launcher: Launcher = launch_here
        self.memory: SharedMemory | None = None
        self._group = group
        self._turn = 0
        self._leaving = threading.Event()
        self._failure: Exception | None = None

    def _meet(self, kind: str, value: Any) -> dict[int, Any]:
        if self._failure is not None:
            raise copy.copy(self._failure)
        turn = self._turn = self._turn + 1
        try:
            start = lambda: self._group.bring(turn, self.position, kind, value)  # noqa: E731 - a thunk, not a function with a name
            self.launcher(kind.split("[")[0], start)
            return self._group.meet(turn, self._leaving)
        except Exception as error:
            self._failure = copy.copy(error)  # without the frames, and so the nodes, that it goes through
            raise

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        brought = self._meet(f"all_gather[{row.numel()}]", row.clone())
        return torch.stack([brought[p] for p in range(len(self.ranks))])

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See `Communicator.broadcast`."""
        mine = buffer.clone() if source == self.position else None
        brought = self._meet(f"broadcast[{buffer.numel()}] from {source}", mine)
        if mine is None:
            buffer.copy_(brought[source])

    def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        """See `Communicator.broadcast_all`."""
        if self.memory is None:
            self._broadcast_all(buffers, source)
        else:
            self.memory.broadcast_all(self._broadcast_all, buffers, source)

    def _broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        for buffer in buffers:
            if buffer is not None:
                self.broadcast(buffer, source)

    def all_to_all(
        self,
        send: torch.Tensor,
        send_splits: list[int],
        receive: torch.Tensor,
        receive_splits: list[int],
    ) -> None:
        """See `Communicator.all_to_all`."""
        if self.memory is None:
            self._all_to_all(send, send_splits, receive, receive_splits)
        else:
            self.memory.all_to_all(self._all_to_all, send, send_splits, receive, receive_splits)

    def _all_to_all(
        self,
        send: torch.Tensor,
        send_splits: list[int],
        receive: torch.Tensor,
        receive_splits: list[int],
    ) -> None:
        brought = self._meet("all_to_all", torch.split(send.clone(), send_splits))
        parts = [brought[p][self.position] for p in range(len(self.ranks))]
        sizes = [part.numel() for part in parts]
        if sizes != receive_splits:
            raise AssertionError(f"all_to_all: expected {receive_splits} bytes, the senders sent {sizes}")
        torch.cat(parts, out=receive)
        self._group.bytes_moved += sum(sizes) - sizes[self.position]

    def share_memory(self) -> None:
        """See `Communicator.share_memory`."""
        self.memory = share_memory(self)

    def abandon(self) -> None:
        """See `Communicator.abandon`."""
        self._leaving.set()
