"""On any mesh, in any order of its dimensions, each replica gets the batches of its own constructor and no others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from evenstep import BatchSpec, DataPlane, LoaderConfig, StepSampler, TensorSpec, build_loader, collate_rows
from evenstep.nodes.model_broadcast import ModelBroadcast
from evenstep.testing import SimulatedWorld, assert_same, run_ranks
from evenstep.testing.positions import Positions
from evenstep.topology import Topology

LENGTHS = [1 + (7 * i) % 13 for i in range(32)]
DOCUMENTS = [{"input_ids": torch.arange(100 * i + 1, 100 * i + 1 + n)} for i, n in enumerate(LENGTHS)]
SHAPES = [
    {"dp": 4, "tp": 2},
    {"dp": 2, "tp": 4},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 3, "dp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 1},
]


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    shape = draw(st.sampled_from(SHAPES))
    names: Sequence[str] = draw(st.permutations(list(shape)))
    return {name: shape[name] for name in names}


def epoch(plane: DataPlane) -> list[Any]:
    config = LoaderConfig(seq_len=13, balance_window=2)
    sampler = StepSampler(len(LENGTHS), global_batch_size=8, seed=1)
    with build_loader(DOCUMENTS, plane, config, sampler=sampler) as loader:
        return [(batch, loader.state_dict()) for batch in loader]


def check_replicas(topology: Topology, seen: list[list[Any]]) -> None:
    """Equal inside each replica; all replicas together have every document once."""
    for replica in topology.replicas:
        for rank in replica[1:]:
            assert_same(seen[rank], seen[replica[0]])
    firsts = [
        batch["input_ids"][row, start].item() // 100
        for replica in topology.replicas
        for batch, _ in seen[replica[0]]
        for row, ends in enumerate(batch["cu_seqlens"])
        for start in ends[:-1]
    ]
    assert sorted(firsts) == list(range(len(LENGTHS)))


@settings(max_examples=15, deadline=None)
@given(meshes())
def test_on_simulated_ranks(mesh: dict[str, int]) -> None:
    world = SimulatedWorld(mesh)
    assert world.size >= 8
    check_replicas(world.topologies[0], world.run(epoch))


SMALL = [
    {"dp": 2, "tp": 2},
    {"tp": 2, "dp": 2},
    {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 1},
    {"cp": 2, "dp_shard": 2, "tp": 1, "dp_replicate": 1},
    {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2},
    {"tp": 2, "pp": 2, "dp": 1},
    {"pp": 2, "dp": 2, "tp": 1},
    {"dp": 1, "tp": 2, "pp": 2},
]


def on_each_mesh(rank: int) -> list[list[Any]]:
    seen = []
    for shape in SMALL:
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        with closing(DataPlane.from_mesh(mesh)) as plane:
            assert plane.topology.rank == rank
            seen.append(epoch(plane))
    return seen


@pytest.mark.gloo
def test_over_gloo() -> None:
    results = run_ranks(on_each_mesh, 4)
    for number, shape in enumerate(SMALL):
        ranks = np.arange(4).reshape(tuple(shape.values()))
        topology = Topology.from_mesh(ranks, list(shape), rank=0)
        check_replicas(topology, [seen[number] for seen in results])


def large_batches(rank: int) -> list[Any]:
    """Small and large, strided and empty tensors, which tell who made them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))

    def make(position: tuple[int, int]) -> dict[str, Any]:
        return {
            "small": torch.full((3 + position[1], 2), rank, dtype=torch.int16).T,
            "large": torch.arange(1 << 19) + rank,
            "middling": [torch.full((300_000 + i,), rank) for i in range(6)],
            "none": torch.empty(0, 4, dtype=torch.bfloat16),
            "text": f"{rank}.{position}",
            "raw": np.arange(position[1]),
        }

    with closing(DataPlane.from_mesh(mesh)) as plane:
        node = ModelBroadcast(Positions(make, size=3), plane)
        seen: list[Any] = []
        for _ in range(2):
            node.reset()
            kept = list(node)  # all of them stay valid while others come
            seen += [(batch, node.state_dict()) for batch in kept]
    return seen


@pytest.mark.gloo
def test_tensors_of_all_sizes_over_gloo() -> None:
    results = run_ranks(large_batches, 4)
    for rank, seen in enumerate(results):
        assert_same(seen, results[rank % 2])
    assert [batch["text"] for batch, _ in results[3]] == [f"1.{(e, i)}" for e in range(2) for i in range(3)]
    for batch, _ in results[2]:
        assert not batch["small"].any()
        assert torch.equal(batch["large"], torch.arange(1 << 19))
        assert [len(tensor) for tensor in batch["middling"]] == [300_000 + i for i in range(6)]


def declared_batches(rank: int) -> list[Any]:
    """With a specification made on each rank, which does not name ``"info"``."""
    spec = BatchSpec(
        {
            "input_ids": TensorSpec(torch.int64, (1, 13)),
            "labels": TensorSpec(torch.int64, (1, None)),
            "max_seqlen": int,
        }
    )

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = collate_rows(rows)
        return {name: batch[name] for name in ("input_ids", "labels", "max_seqlen")}

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sampler = StepSampler(len(LENGTHS), global_batch_size=8, seed=1)
    config = LoaderConfig(seq_len=13)
    with build_loader(DOCUMENTS, mesh, config, sampler=sampler, collate=collate, batch_spec=spec) as loader:
        return list(loader)


@pytest.mark.gloo
def test_declared_batches_over_gloo() -> None:
    constructor, peer = run_ranks(declared_batches, 2)
    assert len(constructor) == len(LENGTHS)
    assert [batch["info"].step for batch in peer] == [k // 8 for k in range(len(LENGTHS))]
    assert_same(peer, constructor)
