"""A communicator over a torch.distributed process group, whose waits always end."""

from __future__ import annotations

import copy
import ctypes
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenstep.comm import starting
from evenstep.comm.communicator import INHERITED, Abandoned, Launcher, launch_here
from evenstep.comm.goodbye import Goodbye
from evenstep.comm.introduction import share_memory
from evenstep.comm.shared_memory import SharedMemory
from evenstep.errors import RemoteRankError

__all__ = ["ProcessGroupCommunicator"]

POLL = timedelta(milliseconds=200)  # how soon a waiting thread hears that its rank shuts down
_DEVICE_POLL = 0.0005  # seconds between two looks at a collective that an accelerator runs
_IN_FLIGHT = (
    4  # broadcasts of one batch: gloo has two threads to a group, and each should find the next waiting
)


class ProcessGroupCommunicator:
    """Collectives of one process group, used by one thread at a time.

    Args:
        group: The process group.
        timeout: Longest wait for the other ranks in one collective.
        device: Where the group's backend wants its tensors: CPU for gloo, the accelerator for NCCL and HCCL;
            CPU buffers then travel through it.
        name: What the group is for, in error messages.
        ranks: Global ranks in the order of our positions; torch keeps its own, ascending.

    Attributes:
        calls: Collectives so far, by name.
        sent_bytes: Bytes that this rank gave to them for others, once per receiver, by name, however they travel.
        memory: What the ranks share since `share_memory`; None: every byte goes through the backend.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: timedelta,
        device: torch.device,
        name: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        inner = list(dist.get_process_group_ranks(group))
        self.ranks: tuple[int, ...] = tuple(inner if ranks is None else ranks)
        self.position: int = self.ranks.index(dist.get_rank())
        at = {rank: position for position, rank in enumerate(inner)}
        self._inner = [at[rank] for rank in self.ranks]  # torch's position at each of ours
        self._in_order = self._inner == sorted(self._inner)
        self.device = device
        self.launcher: Launcher = launch_here
        self.memory: SharedMemory | None = None
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self._group = group
        self._process = os.getpid()
        self._timeout = timeout
        self._name = name
        self._leaving = threading.Event()
        self._failure: Exception | None = None
        self._in_flight: deque[tuple[Any, list[torch.Tensor]]] = deque()  # work, and what it reads or writes
        self._finished = 0
        self._goodbye = Goodbye(group)

    def share_memory(self) -> None:
        """See `Communicator.share_memory`; an accelerator's backend has ways of its own."""
        if self.device.type == "cpu":
            self.memory = share_memory(self)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        source = row.to(self.device)
        self.sent_bytes["all_gather"] += row.numel() * (len(self.ranks) - 1)
        out = torch.empty(len(self.ranks) * row.numel(), dtype=torch.uint8, device=self.device)
        self._run("all_gather", starting.all_gather(self._group, out, source), [out, source])
        rows = out.cpu().view(len(self.ranks), row.numel())
        return rows if self._in_order else rows[self._inner]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See `Communicator.broadcast`; a buffer that already lies on the group's device is used in place."""
        staged = buffer.to(self.device)
        self.sent_bytes["broadcast"] += buffer.numel() * (len(self.ranks) - 1) * (source == self.position)
        start = starting.broadcast(self._group, staged, self._inner[source])
        # A batch on its way to the training stream: the stream waits, not the host.
        self._run("broadcast", start, [staged], by_stream=staged is buffer and self.device.type != "cpu")
        if staged is not buffer and source != self.position:
            buffer.copy_(staged)

    def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        """See `Communicator.broadcast_all`."""
        if self.device.type != "cpu":
            for buffer in buffers:
                if buffer is not None:
                    self.broadcast(buffer, source)
            return
        if self.memory is None:
            self._broadcast_all(self._counted(buffers, source), source)
        else:
            self.memory.broadcast_all(self._broadcast_all, self._counted(buffers, source), source)

    def _counted(self, buffers: Iterable[torch.Tensor | None], source: int) -> Iterator[torch.Tensor | None]:
        for buffer in buffers:
            if buffer is not None and source == self.position:
                self.sent_bytes["broadcast"] += buffer.numel() * (len(self.ranks) - 1)
            yield buffer

    def _broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        before = self.calls["broadcast"]
        try:
            for buffer in buffers:
                if self._in_flight and (buffer is None or len(self._in_flight) == _IN_FLIGHT):
                    self._finish_first(may_leave=True)
                if buffer is None:
                    continue
                start = starting.broadcast(self._group, buffer, self._inner[source])
                self._start("broadcast", start, [buffer])
            while self._in_flight:
                self._finish_first(may_leave=True)
        except BaseException:  # of what makes the buffers: the others wait for those that do not come
            if self._failure is None and self.calls["broadcast"] > before:
                self._give_up([], self._interrupted())
            raise

    def all_to_all(
        self,
        send: torch.Tensor,
        send_splits: list[int],
        receive: torch.Tensor,
        receive_splits: list[int],
    ) -> None:
        """See `Communicator.all_to_all`."""
        assert self._in_order, "groups that exchange payload keep torch's order"
        self.sent_bytes["all_to_all"] += send.numel() - send_splits[self.position]
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
        outgoing, incoming = send.to(self.device), receive
        if self.device.type != "cpu":
            incoming = torch.empty(receive.numel(), dtype=torch.uint8, device=self.device)
        self._run(
            "all_to_all",
            starting.all_to_all(self._group, incoming, outgoing, receive_splits, send_splits),
            [incoming, outgoing],
        )
        if incoming is not receive:
            receive.copy_(incoming)

    def say_goodbye(self) -> None:
        """Have those who will wait for this rank's next collective here hear that it does not come; posts nothing.

        See `Goodbye`.
        """
        if self._failure is None or isinstance(self._failure, Abandoned):  # else another rank was the first
            self._goodbye.say(self._finished, self.ranks[self.position])

    def abandon(self) -> None:
        """See `Communicator.abandon`."""
        self._leaving.set()

    def _run(
        self, name: str, start: Callable[[], Any], buffers: list[torch.Tensor], *, by_stream: bool = False
    ) -> None:
        self._start(name, start, buffers)
        self._finish_first(may_leave=name == "broadcast", by_stream=by_stream)

    def _start(self, name: str, start: Callable[[], Any], buffers: list[torch.Tensor]) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)
        if os.getpid() != self._process:
            raise Abandoned(INHERITED)
        if self._leaving.is_set():
            raise self._give_up(buffers, self._left())
        if not dist.is_initialized():
            raise self._give_up(buffers, self._lost(RuntimeError("the process groups have been destroyed")))
        self.calls[name] += 1
        try:
            self._in_flight.append((self.launcher(name, start), buffers))
        except (RuntimeError, ValueError) as error:  # the group is gone, or a peer is
            raise self._give_up(buffers, self._lost(error)) from error

    def _finish_first(self, *, may_leave: bool, by_stream: bool = False) -> None:
        work, _ = self._in_flight[0]
        try:
            if by_stream:
                work.wait()
            else:
                self._wait(work, may_leave=may_leave)
        except RuntimeError as error:
            failure = error if isinstance(error, (Abandoned, RemoteRankError)) else self._lost(error)
            raise self._give_up([], failure) from error.__cause__
        except BaseException:  # Ctrl-C: the collective stays posted, so the next one would meet its answer
            self._give_up([], self._interrupted())
            raise
        self._in_flight.popleft()
        self._finished += 1

    def _wait(self, work: Any, *, may_leave: bool) -> None:
        """Wait for ``work``, and for a goodbye where no header says who leaves (``may_leave``)."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        ear = self._goodbye.listen() if may_leave else None
        while not work.is_completed():
            if self._leaving.is_set():
                raise self._left()
            if time.monotonic() > deadline:
                raise self._late()
            if ear is not None:
                self._heed(ear.heard())
            if self.device.type != "cpu":
                time.sleep(_DEVICE_POLL)  # a timed wait of NCCL that runs out aborts the group
                continue
            # It raises when POLL is over, also if the work completes at that moment: only the wait below knows.
            with suppress(RuntimeError):
                work.wait(POLL)
        work.wait()

    def _heed(self, note: tuple[int, int] | None) -> None:
        if note is None:
            return
        finished, rank = note
        if sum(self.calls.values()) > finished and rank != self.ranks[self.position]:
            raise RemoteRankError(
                f"rank {rank} left the loader before the end of the epoch (a break, close() or an exit); the ranks "
                f"{self.ranks} of the {self._name} group cannot go on without it. Leave the loop on the same step on "
                "every rank.",
                rank=rank,
            )

    def _give_up(self, buffers: list[torch.Tensor], error: Exception) -> Exception:
        _keep_for_ever((list(self._in_flight), buffers, self._group))
        self._in_flight.clear()
        self._failure = copy.copy(error)  # without the frames, and so the nodes, that it goes through
        return error

    def _left(self) -> Exception:
        return Abandoned(
            f"this rank gave up waiting for ranks {self.ranks} in the {self._name} group: it shuts down"
        )

    def _interrupted(self) -> Exception:
        return Abandoned(f"this rank was interrupted inside a collective of the {self._name} group")

    def _late(self) -> Exception:
        seconds = self._timeout.total_seconds()
        return RemoteRankError(
            f"no answer from the ranks {self.ranks} of the {self._name} group within {seconds:g} s: one of them is "
            "stuck or slower than that, and its data cannot arrive. Look at the rank that raised nothing, or raise "
            "`timeout` if reading a window may take that long."
        )

    def _lost(self, error: Exception) -> Exception:
        detail = str(error).split(". This is typically")[0]  # gloo goes on with advice of its own
        if "timed out" in detail.lower():  # its clock is a little faster than ours
            return self._late()
        return RemoteRankError(
            f"the connection to a rank of {self.ranks} in the {self._name} group broke: a process died, left or "
            f"destroyed its process group. Look for the first error of another rank. ({detail})",
            error_type=type(error).__name__,
            error_message=detail,
        )


def _keep_for_ever(given_up: object) -> None:
    """Keep work, buffers and group of a collective that was given up, until the process is gone.

    Dropping the last reference to the group waits for the collective, that is for the peer; a thread that waits for it
    there is a SIGABRT. No variable is enough: the interpreter clears its modules before it exits.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(given_up))
