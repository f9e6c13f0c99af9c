"""Every rank of any mesh gets its slice of its replica's batch, through the whole loader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import (
    DataPlane,
    LoaderConfig,
    RemoteRankError,
    Shard,
    StepSampler,
    build_loader,
    collate_rows,
    collate_varlen,
)
from evenstep.packing import document_ids, pack_text, unshard
from evenstep.testing import SimulatedWorld, assert_same

LENGTHS = [1 + (7 * i) % 13 for i in range(24)]
DATA = [{"input_ids": torch.arange(100 * i + 1, 100 * i + 1 + n)} for i, n in enumerate(LENGTHS)]
MESHES = [
    {"dp": 2, "cp": 2},
    {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 3},
    {"pp": 2, "dp": 2, "cp": 2},
    {"pp": 2, "dp": 1, "tp": 2, "cp": 2},
]


def batches(plane: DataPlane, shard: Any, collate: Any = collate_rows, **options: Any) -> list[Any]:
    config = LoaderConfig(seq_len=13, micro_batch_size=2, **options)
    sampler = StepSampler(len(LENGTHS), global_batch_size=8, seed=1)
    with build_loader(DATA, plane, config, sampler=sampler, collate=collate, shard=shard) as loader:
        return [(batch, loader.state_dict()) for batch in loader]


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    mesh = draw(st.sampled_from(MESHES))
    names: Sequence[str] = draw(st.permutations(list(mesh)))
    return {name: mesh[name] for name in names}


def replicas_in_cp_order(world: SimulatedWorld) -> list[list[list[int]]]:
    """Of each replica, for each place in the other dimensions, the ranks in the order of their cp coordinate."""
    found = []
    for replica in world.topologies[0].replicas:
        lines: dict[Any, dict[int, int]] = {}
        for rank in replica:
            place = {name: at for name, at, _ in world.topologies[rank].coordinates}
            at = place.pop("cp")
            lines.setdefault(tuple(sorted(place.items())), {})[at] = rank
        found.append([[line[at] for at in sorted(line)] for line in lines.values()])
    return found


@settings(max_examples=12)
@given(meshes(), st.sampled_from(["contiguous", "zigzag"]), st.sampled_from(["rows", "flat", "documents"]))
def test_slices_put_together_are_the_padded_batch_on_any_mesh(
    mesh: dict[str, int], mode: Any, layout: str
) -> None:
    world = SimulatedWorld(mesh)
    collate = collate_rows if layout == "rows" else collate_varlen
    unit: Any = "document" if layout == "documents" else "row"
    whole = world.run(batches, None, collate)
    parted = world.run(batches, {"input_ids": Shard("cp", dim=-1, mode=mode, unit=unit)}, collate)
    divisor = mesh["cp"] * (2 if mode == "zigzag" else 1)
    for lines in replicas_in_cp_order(world):
        for line in lines:
            for k in range(len(whole[line[0]])):
                original, state = whole[line[0]][k]
                parts = [parted[rank][k][0] for rank in line]
                assert all(parted[rank][k][1] == state for rank in line)
                bounds = parts[0]["cu_seqlens_padded"] if unit == "document" else None
                joined = {
                    name: unshard([part[name] for part in parts], -1, mode, bounds)
                    for name in ("input_ids", "labels", "position_ids", "shift_labels")
                }
                assert joined["input_ids"].shape[-1] % divisor == 0
                ids = document_ids({**parts[0], "input_ids": joined["input_ids"]})
                padding = max(original["info"].num_padding, int((ids < 0).sum()))
                assert layout != "rows" or padding == int((ids < 0).sum())
                info = replace(original["info"], num_padding=padding)
                assert all(part["info"] == info for part in parts)
                for name in ("input_ids", "labels", "position_ids"):
                    assert torch.equal(joined[name][ids >= 0], original[name][document_ids(original) >= 0])
                assert (joined["labels"][ids < 0] == -100).all()
                assert (joined["input_ids"][ids < 0] == 0).all()
                found = torch.cat([part["input_ids"].flatten() for part in parts])
                ids = original["input_ids"]
                assert torch.equal(found[found > 0].sort().values, ids[ids > 0].sort().values)


@settings(max_examples=6)
@given(meshes())
def test_peers_at_the_same_coordinate_get_the_same_slice(mesh: dict[str, int]) -> None:
    world = SimulatedWorld(mesh)
    parted = world.run(batches, {"input_ids": Shard("cp", mode="zigzag")})
    for lines in replicas_in_cp_order(world):
        for line in lines[1:]:
            assert_same([parted[rank] for rank in line], [parted[rank] for rank in lines[0]])


def test_caller_launched_collectives_bring_the_same_slices() -> None:
    world = SimulatedWorld({"cp": 2, "dp": 2})
    shard = {"input_ids": Shard("cp", mode="zigzag")}
    expected = world.run(batches, shard)
    assert_same(world.run(lambda plane: batches(plane, shard, collectives="caller")), expected)


def test_one_process_has_the_whole_padded() -> None:
    (batch, _), *_ = batches(DataPlane.single(), {"input_ids": Shard("cp", mode="zigzag")})
    assert batch["input_ids"].shape == (2, 14)
    assert np.diff(batch["cu_seqlens"][0]).sum() == batch["cu_seqlens"][0][-1]


@pytest.mark.parametrize(
    ("collate", "unit", "expected"),
    [
        (collate_rows, "row", [(16, 15), (16, 10), (16, 3)]),  # rows of 13 grow to 16
        (collate_varlen, "row", [(8, 12), (8, 7), (16, 3)]),  # what is not filled counts as without shards
        (collate_varlen, "document", [(8, 12), (8, 7), (16, 3)]),
    ],
)
def test_padding_for_the_cuts_is_counted(collate: Any, unit: Any, expected: list[tuple[int, int]]) -> None:
    data = [{"input_ids": torch.arange(1, 1 + n)} for n in (1, 6, 13)]

    def counts(plane: DataPlane) -> list[tuple[int, int]]:
        shard = {"input_ids": Shard("cp", mode="zigzag", unit=unit)}
        sampler = StepSampler(3, global_batch_size=1, order="sequential")
        with build_loader(
            data, plane, LoaderConfig(seq_len=13), sampler=sampler, collate=collate, shard=shard
        ) as loader:
            return [(4 * batch["input_ids"].numel(), batch["info"].num_padding) for batch in loader]

    assert SimulatedWorld({"dp": 1, "cp": 4}).run(counts) == [expected] * 4


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (
            "cq",
            "the mesh has no dimension 'cq', only ['dp', 'cp']: nobody could tell which part is this rank's. Name one of "
            "them, or add the dimension to the mesh.",
        ),
        (
            "dp",
            "mesh dimension 'dp' is data parallel: its ranks hold different samples, so there is nothing to share among "
            "them. Name a context-parallel or another model-parallel dimension.",
        ),
    ],
)
def test_a_dimension_that_cannot_share_is_refused_when_building(dim: str, message: str) -> None:
    world = SimulatedWorld({"dp": 2, "cp": 2})
    for outcome in world.outcomes(batches, {"input_ids": Shard(dim)}):
        assert isinstance(outcome, ValueError)
        assert str(outcome) == message


def test_ranks_that_divide_differently_are_told() -> None:
    def differently(plane: DataPlane) -> None:
        batches(plane, {"input_ids": Shard("cp", mode="zigzag" if plane.topology.rank else "contiguous")})

    for outcome in SimulatedWorld({"dp": 1, "cp": 2}).outcomes(differently):
        assert re.match("shard differs between ranks: rank 0 has ", str(outcome))


def test_a_field_that_is_missing_stops_every_rank() -> None:
    def run(plane: DataPlane) -> None:
        batches(plane, {"positions": Shard("cp")})

    first, second = SimulatedWorld({"dp": 1, "cp": 2}).outcomes(run)
    assert isinstance(first, ValueError)
    assert str(first).startswith("shard names the field 'positions', which is not among the fields [")
    assert isinstance(second, RemoteRankError)
    assert second.error_type == "ValueError"


def test_targets_are_made_only_of_labels_that_stand_at_their_own_token() -> None:
    def shifted(samples: Any, seq_len: int) -> Any:
        return pack_text(samples, seq_len, shifted=True)

    config = LoaderConfig(seq_len=13)
    with build_loader(
        DATA,
        None,
        config,
        sampler=StepSampler(24, global_batch_size=8),
        pack=shifted,
        shard={"input_ids": Shard("cp")},
    ) as loader:
        assert "shift_labels" not in next(loader)
