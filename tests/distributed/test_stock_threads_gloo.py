"""torchdata's reading threads behind our collectives, on real ranks: who leaves in mid-epoch leaves nothing behind."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
import torchdata.nodes as tn
from torch.distributed.device_mesh import init_device_mesh

from evenstep import DataPlane, Loader
from evenstep.testing import run_ranks
from evenstep.testing.jobs import Layout, Stream

pytestmark = pytest.mark.gloo

STREAM = Stream(kind="step", lengths=tuple(random.Random(0).choices(range(1, 9), k=72)), rows=12, seed=1)
LOADERS = 5
CLOSES_WITHIN = 4.0  # seconds; a rank that the others do not answer gives up after five

_kept: list[Any] = []  # to the end of the process


class Slow:
    """The stream's samples, each of which takes a while of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(STREAM)

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(self._random.random() * 0.004)
        return STREAM[index]


def loader_of(kind: str, seed: int, depth: int) -> Loader[Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    plane = DataPlane.from_mesh(mesh, timeout=timedelta(seconds=20))
    layout = Layout(dp=ranks, options={"host_prefetch": 0, "resume": "micro_batch"})
    node = layout.loader(STREAM, plane, dataset=Slow(seed + 100 * plane.topology.rank)).root
    if kind == "mapper":
        return Loader(tn.ParallelMapper(node, lambda batch: batch, num_workers=2))
    return Loader(tn.Prefetcher(node, depth))


def take(loader: Loader[Any], count: int) -> list[tuple[int, int]]:
    infos = [next(loader)["info"] for _ in range(count)]
    return [(info.step, info.micro_batch) for info in infos]


def leaves(rank: int, kind: str) -> list[float]:
    """Break, load and close in mid-epoch; the last loader is left to the end of the process."""
    del rank
    seconds = []
    for seed in range(LOADERS):
        same = random.Random(seed)
        loader = loader_of(kind, seed, same.randint(1, 4))
        per_step = 12 // dist.get_world_size()
        expected = [divmod(k, per_step) for k in range(6 * per_step)]
        at = same.randint(1, 8)
        assert take(loader, at) == expected[:at]
        state = loader.state_dict()
        for _ in range(2):
            ahead = same.randint(1, 8)
            loader.load_state_dict(state)
            assert take(loader, ahead) == expected[at : at + ahead]
        if seed == LOADERS - 1:
            _kept.append(loader)
            break
        began = time.monotonic()
        loader.close()
        seconds.append(time.monotonic() - began)
    return seconds


@pytest.mark.parametrize(("kind", "ranks"), [("prefetcher", 2), ("mapper", 2), ("prefetcher", 3)])
def test_ranks_leave_an_epoch_wherever_their_threads_have_got_to(kind: str, ranks: int) -> None:
    for seconds in run_ranks(leaves, ranks, kind):
        assert len(seconds) == LOADERS - 1
        assert max(seconds) < CLOSES_WITHIN
