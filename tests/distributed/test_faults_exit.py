"""Faults that end ranks: every other rank ends too, with its own error or cleanly, within seconds."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import Loader, LoaderConfig, StepSampler, build_loader
from evenstep.errors import RemoteRankError
from evenstep.testing import Outcome, RankDied, run_ranks_outcomes

pytestmark = pytest.mark.gloo

SAMPLES = 400
GONE = "RemoteRankError: the connection to a rank of "
LATE = "RemoteRankError: no answer from the ranks "
LEFT = "RemoteRankError: rank 0 left the loader before the end of the epoch "
KEPT: list[Any] = []  # lives until the interpreter ends, as the variables of a script do


class Documents:
    """Documents of a few lengths; something happens when one index is read."""

    def __init__(self, at: int = -1, happens: Callable[[], object] | None = None) -> None:
        self.at = at
        self.happens = happens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at and self.happens is not None:
            self.happens()
        return {"input_ids": torch.arange(1 + index * 7 % 50)}


EVERYWHERE: dict[str, Any] = {}  # options of every loader of a rank


def build(dataset: Any = None, timeout: float = 30.0, **options: Any) -> Loader[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    loader = build_loader(
        Documents() if dataset is None else dataset,
        mesh,
        LoaderConfig(seq_len=64, timeout=timedelta(seconds=timeout), **EVERYWHERE, **options),
        sampler=StepSampler(SAMPLES, global_batch_size=4, order="sequential"),
    )
    KEPT.append(loader)
    return loader


def consume(loader: Loader[Any], batches: int) -> None:
    for _ in range(batches):
        next(loader)


def killed(rank: int) -> None:
    loader = build(Documents(9 if rank else -1, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    for _ in loader:
        pass


def killed_in_a_collective(rank: int) -> None:
    """Both ranks wait for each other: one in the gather of a header, as the other reads for long."""
    loader = build(Documents(-1 if rank else 8, lambda: time.sleep(2.0)))
    if rank:
        alarm = threading.Timer(0.0, lambda: None)
        for number, _ in enumerate(loader):
            if number == 0:
                alarm = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL))
                alarm.daemon = True
                alarm.start()
        alarm.cancel()
        return
    for _ in loader:
        pass


def killed_on_a_mesh(rank: int, victim: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = build_loader(
        Documents(),
        mesh,
        LoaderConfig(seq_len=64, timeout=timedelta(seconds=30)),
        sampler=StepSampler(SAMPLES, global_batch_size=4, order="sequential"),
    )
    KEPT.append(loader)
    for number, _ in enumerate(loader):
        if rank == victim and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)


def late(rank: int) -> None:
    loader = build(Documents(9, lambda: time.sleep(3) if rank else None), timeout=1.0)
    for _ in loader:
        pass


def press_ctrl_c_after(seconds: float) -> None:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def interrupted_everywhere(rank: int) -> None:
    """As a launcher passes Ctrl-C on, in the middle of a loop."""
    press_ctrl_c_after(0.7)
    for _ in build():
        time.sleep(0.02)


def interrupted(rank: int) -> None:
    if rank == 0:
        press_ctrl_c_after(0.7)
    loader = build(Documents(9, lambda: time.sleep(2.5) if rank else None))
    for _ in loader:
        pass


def breaks_alone(rank: int) -> None:
    loader = build()
    if rank == 0:
        consume(loader, 3)
        return
    for _ in loader:
        pass


def breaks_everywhere(rank: int) -> None:
    consume(build(), 3)


def step_raises(rank: int) -> None:
    loader = build()
    for step, _ in enumerate(loader):
        if step == 3 and rank == 1:
            raise FloatingPointError("the loss is not finite")


def step_raises_in_lockstep(rank: int) -> None:
    """The others stand in a collective of the training step."""
    loader = build()
    for step, _ in enumerate(loader):
        if step == 3 and rank == 1:
            raise FloatingPointError("the loss is not finite")
        dist.all_reduce(torch.ones(1))


def destroyed_first(rank: int) -> None:
    loader = build()
    consume(loader, 3)
    dist.destroy_process_group()
    loader.close()


def closes_early(rank: int) -> None:
    loader = build(Documents(9, lambda: time.sleep(8) if rank else None))
    consume(loader, 2)
    if rank == 0:
        loader.close()


def exits(rank: int) -> None:
    """Nobody closes the loader or destroys the group: what the end of the interpreter does is all there is."""
    loader = build()
    if rank == 0:
        consume(loader, 3)
        sys.exit(0)
    for _ in loader:
        pass


SCENARIOS: dict[str, tuple[Callable[[int], None], list[tuple[int, str]]]] = {
    "killed": (killed, [(1, GONE), (-9, "RankDied: rank 1 ended with exit code -9")]),
    "killed_in_a_collective": (
        killed_in_a_collective,
        [(1, GONE), (-9, "RankDied: rank 1 ended with exit code -9")],
    ),
    "late": (late, [(1, LATE), (1, GONE)]),
    "interrupted": (interrupted, [(-2, "KeyboardInterrupt"), (1, LEFT)]),
    "interrupted_everywhere": (
        interrupted_everywhere,
        [(-2, "KeyboardInterrupt"), (-2, "KeyboardInterrupt")],
    ),
    "breaks_alone": (breaks_alone, [(0, "None"), (1, f"{LEFT}|{GONE}")]),
    "breaks_everywhere": (breaks_everywhere, [(0, "None"), (0, "None")]),
    "step_raises": (
        step_raises,
        [(1, f"{LEFT.replace('0', '1')}|{GONE}"), (1, "FloatingPointError: the loss is not finite")],
    ),
    "step_raises_in_lockstep": (
        step_raises_in_lockstep,
        [(1, "RuntimeError: "), (1, "FloatingPointError: the loss is not finite")],
    ),
    "destroyed_first": (destroyed_first, [(0, "None"), (0, "None")]),
    "closes_early": (closes_early, [(0, "None"), (0, "None")]),
    "exits": (exits, [(0, "SystemExit: 0"), (1, LEFT)]),
}


def show(outcomes: list[Outcome[None]]) -> str:
    return "\n".join(
        f"  rank {rank}: exit {o.exit_code} after {o.seconds:.1f} s: {type(o.error).__name__}: {o.error}"
        for rank, o in enumerate(outcomes)
    )


def play(rank: int, name: str, options: dict[str, Any]) -> None:
    EVERYWHERE.update(options)
    SCENARIOS[name][0](rank)


def check(name: str, **options: Any) -> list[Outcome[None]]:
    expected = SCENARIOS[name][1]
    outcomes = run_ranks_outcomes(play, 2, name, options, timeout=40)
    for outcome, (code, text) in zip(outcomes, expected, strict=True):
        error = "None" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        assert outcome.exit_code == code, f"{show(outcomes)}\n{outcome.traceback}"
        assert re.match(text, error), f"{text!r} expected\n{show(outcomes)}"
        assert outcome.seconds < 10, show(outcomes)
    return outcomes


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank_ends(name: str) -> None:
    check(name, collectives="producer", shared_memory=False)


@pytest.mark.parametrize("name", ["killed", "breaks_everywhere", "step_raises", "exits"])
def test_every_rank_ends_whose_training_thread_starts_the_collectives(name: str) -> None:
    check(name, collectives="caller")


@pytest.mark.parametrize("name", ["killed", "killed_in_a_collective", "late", "breaks_alone", "closes_early"])
def test_every_rank_ends_that_shares_memory(name: str) -> None:
    check(name, collectives="producer")


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_of_a_mesh_ends_all_others(victim: int) -> None:
    """Constructors notice it in the control group, its peers in their replica's, the rest by what those tell."""
    outcomes = run_ranks_outcomes(killed_on_a_mesh, 4, victim, timeout=40)
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < 10, show(outcomes)
        assert outcome.exit_code == (-9 if rank == victim else 1), f"{show(outcomes)}\n{outcome.traceback}"
        assert isinstance(outcome.error, RankDied if rank == victim else RemoteRankError), show(outcomes)


if __name__ == "__main__":
    times = int(sys.argv[1])
    for name in sys.argv[2:] or SCENARIOS:
        began, bad = time.monotonic(), 0
        for _ in range(times):
            try:
                outcomes = check(name)
            except AssertionError as error:
                bad += 1
                print(error)
        print(
            f"{name}: {bad} of {times} bad, {(time.monotonic() - began) / times:.1f} s\n{show(outcomes)}",
            flush=True,
        )
