"""Several broadcasts on their way at once arrive as one after the other would, and an end of one ends them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenstep.comm.communicator import Abandoned
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.comm.simulated import SimulatedGroup
from evenstep.errors import RemoteRankError
from evenstep.testing import run_ranks

SIZES = [1, 3 << 20, 64, 1 << 20, 5, 1 << 21, 1, 7, 1 << 16] * 2


def group(seconds: float = 20.0) -> ProcessGroupCommunicator:
    everybody = list(range(dist.get_world_size()))
    wait = timedelta(seconds=seconds)
    created = dist.new_group(everybody, backend="gloo", timeout=wait)
    return ProcessGroupCommunicator(created, timeout=wait, device=torch.device("cpu"), name="test")


def several(rank: int) -> tuple[list[bool], int, int, dict[str, int]]:
    communicator = group()
    flying, most = 0, 0

    class Watched:
        def __init__(self, work: Any) -> None:
            nonlocal flying, most
            self.work = work
            flying += 1
            most = max(most, flying)

        def is_completed(self) -> bool:
            return bool(self.work.is_completed())

        def wait(self, *timeout: timedelta) -> None:
            nonlocal flying
            self.work.wait(*timeout)
            flying -= not timeout

    communicator.launcher = lambda _, start: Watched(start())
    buffers: list[torch.Tensor] = []

    def made() -> Iterator[torch.Tensor]:
        for number, nbytes in enumerate(SIZES):
            buffers.append(torch.full((nbytes,), number % 9 if rank == 1 else 255, dtype=torch.uint8))
            yield buffers[-1]

    communicator.broadcast_all(made(), 1)
    right = [bool((buffer == number % 9).all()) for number, buffer in enumerate(buffers)]
    return right, flying, most, dict(communicator.calls)


@pytest.mark.gloo
def test_over_gloo_some_are_under_way_at_once_and_all_arrive() -> None:
    for right, flying, most, calls in run_ranks(several, 3):
        assert right == [True] * len(SIZES)
        assert flying == 0
        assert 1 < most <= 12
        assert calls == {"broadcast": len(SIZES)}


def waits_for_the_first(rank: int) -> list[list[bool]]:
    communicator, arrived = group(), []
    buffers = [torch.full((n << 16,), rank + 1, dtype=torch.uint8) for n in (1, 2, 3)]

    def made() -> Iterator[torch.Tensor | None]:
        yield None
        yield from buffers
        for _ in range(4):
            yield None
            arrived.append([bool((buffer == 1).all()) for buffer in buffers])

    communicator.broadcast_all(made(), 0)
    return arrived


@pytest.mark.gloo
def test_none_waits_for_the_first_on_its_way() -> None:
    for arrived in run_ranks(waits_for_the_first, 2):
        assert [all(some[: n + 1]) for n, some in enumerate(arrived)] == [True] * 4


def test_on_simulated_ranks_all_arrive() -> None:
    meeting = SimulatedGroup((2, 5), timeout=10)
    buffers = [torch.zeros(n, dtype=torch.uint8) for n in (3, 1, 8)]
    peer = threading.Thread(target=lambda: meeting.communicator(5).broadcast_all(iter(buffers), 0))
    peer.start()
    meeting.communicator(2).broadcast_all((torch.full((n,), n, dtype=torch.uint8) for n in (3, 1, 8)), 0)
    peer.join(10)
    assert [buffer.tolist() for buffer in buffers] == [[3] * 3, [1], [8] * 8]


def failures(rank: int) -> list[str]:
    """A source that cannot make its third buffer, and then one whose rank gives up."""
    told = []
    failing, left = group(5.0), group(20.0)

    def made() -> Iterator[torch.Tensor]:
        for number in range(4):
            if number == 2 and rank == 0:
                raise ZeroDivisionError("no third buffer")
            yield torch.full((1 << 20,), number, dtype=torch.uint8)

    begun = time.monotonic()
    for _ in range(2):
        try:
            failing.broadcast_all(made(), 0)
        except (Abandoned, RemoteRankError, ZeroDivisionError) as error:
            told.append(f"{type(error).__name__}: {str(error)[:40]}")
        if rank == 0:
            failing.say_goodbye()
    timer = threading.Timer(0.3, left.abandon)
    timer.start()
    if rank == 1:
        try:
            left.broadcast_all((torch.zeros(9, dtype=torch.uint8) for _ in range(9)), 0)
        except Abandoned as error:
            told.append(f"{type(error).__name__}: {str(error)[:40]}")
    timer.join()
    assert time.monotonic() - begun < 15
    dist.barrier()
    return told


@pytest.mark.gloo
def test_a_source_that_fails_and_a_rank_that_gives_up_leave_nobody_waiting() -> None:
    source, peer = run_ranks(failures, 2)
    interrupted = "Abandoned: this rank was interrupted inside a colle"
    assert source == ["ZeroDivisionError: no third buffer", interrupted]
    heard = "RemoteRankError: rank 0 left the loader before the end of"
    assert peer == [heard, heard, "Abandoned: this rank gave up waiting for ranks (0, "]


def breaks_off(rank: int) -> list[str]:
    """One rank is interrupted between two buffers of one message, when none is on its way."""
    communicator, told = group(5.0), []

    def made() -> Iterator[torch.Tensor | None]:
        yield torch.zeros(4, dtype=torch.uint8)
        yield None
        if rank == 1:
            raise KeyboardInterrupt
        yield torch.zeros(1 << 20, dtype=torch.uint8)

    for _ in range(2):
        try:
            communicator.broadcast_all(made(), 0)
        except (Abandoned, KeyboardInterrupt, RemoteRankError) as error:
            told.append(f"{type(error).__name__}: {str(error)[:40]}")
        if rank == 1:
            communicator.say_goodbye()
    dist.barrier()
    return told


@pytest.mark.gloo
def test_the_rest_of_a_message_broken_off_is_not_taken_for_the_next() -> None:
    sender, receiver = run_ranks(breaks_off, 2)
    assert receiver == ["KeyboardInterrupt: ", "Abandoned: this rank was interrupted inside a colle"]
    assert set(sender) == {"RemoteRankError: rank 1 left the loader before the end of"}
