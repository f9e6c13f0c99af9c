"""A child that a rank forks, as savers and loggers are, takes nothing from its parent and says nothing for it."""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import LoaderConfig, StepSampler, build_loader
from evenstep.testing import run_ranks

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

SAMPLES = 192


class Documents:
    """Each is of its own index only."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "ids": torch.full((20_000 if index % 3 else 90_000,), index)}


def keep(samples: list[dict[str, Any]], seq_len: int) -> list[dict[str, Any]]:
    del seq_len
    return samples


def train_and_fork(rank: int, shared_memory: bool, host_prefetch: int | None) -> tuple[list[int], list[int]]:
    """Samples that came, and the status of each child: it drops its loader and ends as any program does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    config = LoaderConfig(
        seq_len=100_000,
        shared_memory=shared_memory,
        host_prefetch=host_prefetch,
        timeout=timedelta(seconds=20),
    )
    loader: Any = build_loader(
        Documents(),
        mesh,
        config,
        sampler=StepSampler(SAMPLES, global_batch_size=16),
        metadata_fn=lambda sample: len(sample["ids"]),
        pack=keep,
        collate=list,
    )
    seen, ends = [], []
    for number, batch in enumerate(loader):
        for row in batch:
            for sample in row:
                assert bool((sample["ids"] == sample["index"]).all()), (
                    "a child wrote into its parent's memory"
                )
                seen.append(sample["index"])
        if number % 16 == 5:
            sys.stdout.flush()
            child = os.fork()
            if not child:
                try:
                    batch = row = sample = loader = None
                    gc.collect()
                    sys.exit(0)
                finally:
                    _run_exit_hooks()
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    loader.close()
    return seen, ends


def _run_exit_hooks() -> None:
    """What the interpreter does at its end; the harness around this function must not go on in the child."""
    import atexit

    atexit._run_exitfuncs()
    os._exit(0)


@pytest.mark.parametrize(("shared_memory", "host_prefetch"), [(True, None), (True, 0), (False, None)])
def test_children_end_and_their_parent_goes_on(shared_memory: bool, host_prefetch: int | None) -> None:
    results = run_ranks(train_and_fork, 2, shared_memory, host_prefetch, timeout=60)
    assert sorted(i for seen, _ in results for i in seen) == list(range(SAMPLES))
    for _, ends in results:
        assert ends == [0] * len(ends)
        assert len(ends) >= 2
