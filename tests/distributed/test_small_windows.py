"""Thousands of small windows beside the training step's own collectives: nothing mixes, nothing grows."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import LoaderConfig, StepSampler, build_loader
from evenstep.packing import pack_text
from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo


class Documents:
    """Sample ``i`` holds nothing but ``i``, two to eight times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((2 + index % 7,), index)}


def resident_kib() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def train(rank: int, windows: int) -> tuple[int, int, int, float]:
    ranks = dist.get_world_size()
    config = LoaderConfig(seq_len=8, balance_window=1, timeout=timedelta(seconds=60))
    sampler = StepSampler(windows * ranks, global_batch_size=ranks, seed=1)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    seen, early, began = 0, 0, time.monotonic()
    with build_loader(Documents(windows * ranks), mesh, config, sampler=sampler, pack=pack_text) as loader:
        for step, batch in enumerate(loader):
            (index,) = set(batch["input_ids"][batch["labels"] != -100].flatten().tolist())
            total = torch.tensor([index, 1])
            dist.all_reduce(total)
            assert total[1] == ranks
            seen += int(total[0])
            if step == windows // 2:
                early = resident_kib()
        threads = threading.active_count()
        grown = resident_kib() - early
    return seen, threads, grown, time.monotonic() - began


@pytest.mark.parametrize("ranks", [2])
def test_small_windows_beside_other_collectives(ranks: int) -> None:
    windows = int(os.environ.get("EVENSTEP_SMALL_WINDOWS", "2000"))
    for seen, threads, grown, _ in run_ranks(train, ranks, windows, timeout=170):
        assert seen == sum(range(windows * ranks))
        assert threads == 2  # the training thread and ours
        assert grown < 20_000


if __name__ == "__main__":
    print(run_ranks(train, int(sys.argv[1]), int(sys.argv[2]), timeout=900))
