"""Real process groups behave as the simulated ones do, and their waits always end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenstep.comm.communicator import Abandoned, Communicator
from evenstep.comm.gloo_threads import destroy_process_group
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.comm.simulated import SimulatedGroup
from evenstep.testing import run_ranks

CPU = torch.device("cpu")


def group(
    name: str = "test", seconds: float = 20.0, ranks: list[int] | None = None
) -> ProcessGroupCommunicator:
    """A group of the given ranks, in the given order."""
    everybody = list(range(dist.get_world_size())) if ranks is None else ranks
    created = dist.new_group(sorted(everybody), backend="gloo", timeout=timedelta(seconds=seconds))
    return ProcessGroupCommunicator(
        created, timeout=timedelta(seconds=seconds), device=CPU, name=name, ranks=everybody
    )


def collectives(communicator: Communicator) -> list[list[int]]:
    """One of each kind; what a rank receives depends on its position only."""
    me, size = communicator.position, len(communicator.ranks)
    rows = communicator.all_gather(torch.tensor([me, 10 + me], dtype=torch.uint8))
    buffer = torch.full((3,), me, dtype=torch.uint8)
    communicator.broadcast(buffer, size - 1)
    # Position p sends t + 1 bytes of value 10 * p + t to position t, and nothing to itself.
    splits = [0 if t == me else t + 1 for t in range(size)]
    sent = torch.cat([torch.full((n,), 10 * me + t, dtype=torch.uint8) for t, n in enumerate(splits)])
    into = [0 if p == me else me + 1 for p in range(size)]
    received = torch.empty(sum(into), dtype=torch.uint8)
    communicator.all_to_all(sent, splits, received, into)
    return [rows.flatten().tolist(), buffer.tolist(), received.tolist()]


def expected(me: int, size: int) -> list[list[int]]:
    return [
        [value for p in range(size) for value in (p, 10 + p)],
        [size - 1] * 3,
        [10 * p + me for p in range(size) if p != me for _ in range(me + 1)],
    ]


def gloo_collectives(rank: int) -> Any:
    communicator = group()
    plain = collectives(communicator)
    reordered = group(ranks=[2, 0, 1])
    assert reordered.ranks == (2, 0, 1)
    rows = reordered.all_gather(torch.tensor([rank], dtype=torch.uint8)).flatten().tolist()
    buffer = torch.tensor([rank], dtype=torch.uint8)
    reordered.broadcast(buffer, 0)
    return plain, rows, buffer.tolist(), dict(communicator.calls), dict(communicator.sent_bytes)


@pytest.mark.gloo
def test_collectives_on_gloo() -> None:
    for rank, (plain, rows, buffer, calls, sent) in enumerate(run_ranks(gloo_collectives, 3)):
        assert plain == expected(rank, 3)
        assert (rows, buffer) == ([2, 0, 1], [2])
        assert calls == {"all_gather": 1, "broadcast": 1, "all_to_all": 1}
        assert sent == {
            "all_gather": 4,
            "broadcast": 6 if rank == 2 else 0,
            "all_to_all": sum(t + 1 for t in range(3) if t != rank),
        }


def test_collectives_on_simulated_ranks() -> None:
    meeting = SimulatedGroup((4, 7, 9), timeout=5)
    results: dict[int, list[list[int]]] = {}

    def work(rank: int) -> None:
        results[rank] = collectives(meeting.communicator(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in meeting.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == {rank: expected(p, 3) for p, rank in enumerate(meeting.ranks)}
    assert meeting.collectives == 3


def failure(work: Callable[[], object]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", time.monotonic() - began


def waits_that_end(rank: int) -> dict[str, tuple[str, float]]:
    row = torch.zeros(8, dtype=torch.uint8)
    late, left = group("late", 1.0), group("left")
    if rank == 1:
        dist.barrier()
        return {}
    outcomes = {"late": failure(lambda: late.all_gather(row)), "again": failure(lambda: late.all_gather(row))}
    timer = threading.Timer(0.3, left.abandon)
    timer.start()
    outcomes["left"] = failure(lambda: left.all_gather(row))
    timer.join()
    dist.barrier()
    return outcomes


@pytest.mark.gloo
def test_every_wait_ends_and_stays_ended() -> None:
    outcomes, nothing = run_ranks(waits_that_end, 2)
    assert nothing == {}
    text, seconds = outcomes["late"]
    assert text == (
        "RemoteRankError: no answer from the ranks (0, 1) of the late group within 1 s: one of them is stuck or "
        "slower than that, and its data cannot arrive. Look at the rank that raised nothing, or raise `timeout` if "
        "reading a window may take that long."
    )
    assert 0.9 < seconds < 5
    assert outcomes["again"][0] == text
    assert outcomes["again"][1] < 0.1
    text, seconds = outcomes["left"]
    assert (
        text
        == f"{Abandoned.__name__}: this rank gave up waiting for ranks (0, 1) in the left group: it shuts down"
    )
    assert seconds < 3


def after_the_end(rank: int) -> str:
    communicator = group("data")
    communicator.all_gather(torch.zeros(8, dtype=torch.uint8))
    dist.barrier()
    destroy_process_group()
    outcomes = {
        failure(lambda: communicator.all_gather(torch.zeros(8, dtype=torch.uint8)))[0] for _ in range(2)
    }
    (text,) = outcomes
    return text


@pytest.mark.gloo
def test_a_group_that_was_destroyed_is_named_as_broken() -> None:
    message = (
        "RemoteRankError: the connection to a rank of (0, 1) in the data group broke: a process died, left or destroyed its "
        "process group. Look for the first error of another rank. (the process groups have been destroyed)"
    )
    assert run_ranks(after_the_end, 2) == [message] * 2


class LastMoment:
    """A work that completes at the moment at which the wait for it runs out."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.raised = False

    def is_completed(self) -> bool:
        return self.raised

    def wait(self, timeout: timedelta | None = None) -> None:
        self.work.wait()
        if timeout is not None and not self.raised:
            self.raised = True
            raise RuntimeError("Operation timed out!")


def completes_at_the_last_moment(rank: int) -> list[list[int]]:
    communicator = group()
    communicator.launcher = lambda _, start: LastMoment(start())
    return collectives(communicator)


@pytest.mark.gloo
def test_an_answer_that_comes_as_a_wait_runs_out_is_an_answer() -> None:
    assert run_ranks(completes_at_the_last_moment, 2) == [expected(0, 2), expected(1, 2)]
