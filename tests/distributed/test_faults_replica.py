"""A rank that leaves a data-parallel replica, but lives on: those who share its batches hear of it within seconds."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import Loader, LoaderConfig, StepSampler, build_loader
from evenstep.errors import RemoteRankError
from evenstep.testing import run_ranks_outcomes

pytestmark = pytest.mark.gloo

LIVES_ON = 8.0  # seconds


def build() -> Loader[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    documents = [{"input_ids": torch.arange(1 + index * 7 % 50)} for index in range(48)]
    config = LoaderConfig(seq_len=64, timeout=timedelta(seconds=60))
    return build_loader(documents, mesh, config, sampler=StepSampler(48, global_batch_size=4))


def raises_in_its_step(rank: int, victim: int, at: int) -> tuple[str, float]:
    began = time.monotonic()
    try:
        with build() as loader:
            if rank == victim and not at:
                raise FloatingPointError("the loss is not finite")
            for number, _ in enumerate(loader, 1):
                if rank == victim and number == at:
                    began = time.monotonic()
                    raise FloatingPointError("the loss is not finite")
                began = time.monotonic()
    except FloatingPointError as error:
        time.sleep(LIVES_ON)
        return str(error), 0.0
    except RemoteRankError as error:
        return str(error), time.monotonic() - began
    return "the end", 0.0


@pytest.mark.parametrize(("victim", "at"), [(0, 3), (1, 3), (0, 0)])
def test_peers_of_a_rank_that_closes_its_loader_do_not_wait_for_the_timeout(victim: int, at: int) -> None:
    outcomes = run_ranks_outcomes(raises_in_its_step, 2, victim, at, timeout=50)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], [outcome.traceback for outcome in outcomes]
    other = outcomes[1 - victim].value
    assert other is not None
    assert other[0] == (
        f"rank {victim} left the loader before the end of the epoch (a break, close() or an exit); the ranks (0, 1) of "
        "the model-parallel group cannot go on without it. Leave the loop on the same step on every rank."
    )
    assert other[1] < LIVES_ON - 3


def test_every_rank_of_a_mesh_hears_of_a_constructor_that_closes_its_loader() -> None:
    outcomes = run_ranks_outcomes(raises_in_its_step, 4, 0, 3, timeout=50)
    for outcome in outcomes[1:]:
        assert outcome.value is not None, outcome.traceback
        assert re.match("rank 0 left the loader before the end of the epoch ", outcome.value[0])
        assert outcome.value[1] < LIVES_ON - 3


def leaves_with_the_others(rank: int) -> int:
    with build() as loader:
        first = [next(loader) for _ in range(3)]
    with build() as loader:  # what was noted of the first stream is not read in another's
        time.sleep(1.5 * (rank == 0))
        return len(first) + len(list(loader)) + len(list(loader))


def test_a_loader_that_all_ranks_leave_disturbs_none_that_comes_after_it() -> None:
    outcomes = run_ranks_outcomes(leaves_with_the_others, 2, timeout=50)
    assert [outcome.value for outcome in outcomes] == [99, 99], [outcome.traceback for outcome in outcomes]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
