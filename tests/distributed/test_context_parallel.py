"""Slices of a context-parallel mesh of real processes, under both ways to start collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from evenstep import LoaderConfig, Shard, StepSampler, build_loader, collate_varlen
from evenstep.packing import unshard
from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo

DATA = [{"input_ids": torch.arange(100 * i + 1, 100 * i + 2 + (7 * i) % 13)} for i in range(24)]


def train(rank: int, shard: Any, collectives: Any) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    config = LoaderConfig(seq_len=13, micro_batch_size=2, collectives=collectives)
    sampler = StepSampler(len(DATA), global_batch_size=8, seed=1)
    with build_loader(DATA, mesh, config, sampler=sampler, collate=collate_varlen, shard=shard) as loader:
        seen = []
        for batch in loader:
            seen.append(dict(batch))
            loader.prefetch_plan()
            loader.prefetch()
        return seen


@pytest.mark.parametrize("collectives", ["producer", "caller"])
def test_slices_of_documents_are_the_documents(collectives: str) -> None:
    shard = {"input_ids": Shard("cp", mode="zigzag", unit="document")}
    parted = run_ranks(train, 4, shard, collectives)
    whole = run_ranks(train, 4, None, "producer")
    for dp_rank in range(2):
        first, second = parted[dp_rank], parted[2 + dp_rank]  # cp is the slower dimension
        assert len(first) == len(whole[dp_rank]) > 2
        for one, other, original in zip(first, second, whole[dp_rank], strict=True):
            joined = unshard([one["input_ids"], other["input_ids"]], -1, "zigzag", one["cu_seqlens_padded"])
            assert torch.equal(joined[joined > 0], original["input_ids"][original["input_ids"] > 0])
            assert torch.equal(one["cu_seqlens"], original["cu_seqlens"])
            assert torch.equal(one["cu_seqlens_padded"], other["cu_seqlens_padded"])
            assert one["info"] == other["info"] == original["info"]
