"""Simulated ranks notice what gloo would turn into silent corruption or a hang."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenstep.comm.communicator import Abandoned
from evenstep.comm.simulated import SimulatedCommunicator, SimulatedGroup
from evenstep.errors import RemoteRankError

ROW = torch.zeros(8, dtype=torch.uint8)


def together(group: SimulatedGroup, *works: Callable[[SimulatedCommunicator], Any]) -> list[Any]:
    outcomes: list[Any] = [None] * len(works)

    def run(position: int) -> None:
        try:
            outcomes[position] = works[position](group.communicator(group.ranks[position]))
        except Exception as error:
            outcomes[position] = error

    threads = [threading.Thread(target=run, args=(p,)) for p in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return outcomes


def later(work: Callable[[SimulatedCommunicator], object]) -> Callable[[SimulatedCommunicator], object]:
    def run(c: SimulatedCommunicator) -> object:
        time.sleep(0.1)
        return work(c)

    return run


def test_different_collectives_are_noticed() -> None:
    outcomes = together(
        SimulatedGroup((0, 1), timeout=0.5),
        lambda c: c.all_gather(ROW),
        later(lambda c: c.broadcast(ROW.clone(), 0)),
    )
    assert str(outcomes[1]) == "collective 1: broadcast[8] from 0 here, all_gather[8] elsewhere"
    assert isinstance(outcomes[1], AssertionError)


def test_different_sizes_are_noticed() -> None:
    outcomes = together(
        SimulatedGroup((0, 1), timeout=0.5),
        lambda c: c.all_gather(ROW),
        later(lambda c: c.all_gather(ROW[:4])),
    )
    assert str(outcomes[1]) == "collective 1: all_gather[4] here, all_gather[8] elsewhere"


def test_splits_that_do_not_fit_are_noticed() -> None:
    outcomes = together(
        SimulatedGroup((0, 1), timeout=2),
        lambda c: c.all_to_all(ROW, [0, 8], torch.empty(2, dtype=torch.uint8), [0, 2]),
        lambda c: c.all_to_all(ROW[:2], [2, 0], torch.empty(6, dtype=torch.uint8), [6, 0]),
    )
    assert outcomes[0] is None
    assert str(outcomes[1]) == "all_to_all: expected [6, 0] bytes, the senders sent [8, 0]"


def test_a_late_rank_is_named_by_those_that_are_here() -> None:
    group = SimulatedGroup((3, 5), timeout=0.2)
    with pytest.raises(
        RemoteRankError, match=re.escape("no answer within 0.2 s; only the ranks [3] are here")
    ):
        group.communicator(3).all_gather(ROW)


def test_a_dead_rank_is_missed_at_once_and_for_good() -> None:
    group = SimulatedGroup((3, 5), timeout=30)
    mine = group.communicator(3)
    threading.Timer(0.1, group.kill, args=(5,)).start()
    for _ in range(2):
        with pytest.raises(RemoteRankError, match=r"^the connection to rank 5 broke: it is gone$") as caught:
            mine.all_gather(ROW)
        assert caught.value.rank == 5


def test_a_rank_that_shuts_down_stops_waiting() -> None:
    mine = SimulatedGroup((0, 1), timeout=30).communicator(0)
    threading.Timer(0.1, mine.abandon).start()
    with pytest.raises(Abandoned, match=r"^this rank gave up waiting: it shuts down$"):
        mine.all_gather(ROW)


def test_what_was_sent_may_be_changed_afterwards() -> None:
    def work(c: SimulatedCommunicator) -> list[int]:
        row = torch.full((2,), c.position, dtype=torch.uint8)
        rows = c.all_gather(row)
        row.fill_(9)
        return rows.flatten().tolist()

    assert together(SimulatedGroup((0, 1), timeout=5), work, work) == [[0, 0, 1, 1]] * 2
