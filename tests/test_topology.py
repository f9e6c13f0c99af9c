"""Roles follow from the mesh alone, alike on every rank, whatever the order of its dimensions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.topology import Topology


def topology(shape: dict[str, int], rank: int = 0, **options: Any) -> Topology:
    ranks = np.arange(int(np.prod(list(shape.values())))).reshape(tuple(shape.values()))
    return Topology.from_mesh(ranks, list(shape), rank=rank, **options)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[str], dict[str, Any]]:
    names = draw(st.permutations(["dp_replicate", "dp_shard", "tp", "pp", "cp"]))[: draw(st.integers(1, 4))]
    if not any(name.startswith("dp") for name in names):
        names[0] = "dp_shard"
    shape = [draw(st.integers(1, 3)) for _ in names]
    ranks = np.array(draw(st.permutations(range(int(np.prod(shape)))))).reshape(shape)
    dp_size = int(np.prod([n for n, name in zip(shape, names, strict=True) if name.startswith("dp")]))
    group = draw(st.sampled_from([g for g in range(1, dp_size + 1) if dp_size % g == 0]))
    readers = draw(st.sampled_from([None, "all"]))
    return ranks, names, {"balance_group_size": group, "reader_ranks": readers}


@given(world=worlds())
def test_roles_of_any_mesh(world: tuple[np.ndarray[Any, Any], list[str], dict[str, Any]]) -> None:
    ranks, names, options = world
    everybody = [Topology.from_mesh(ranks, names, rank=rank, **options) for rank in range(ranks.size)]
    first = everybody[0]
    assert sorted(rank for replica in first.replicas for rank in replica) == list(range(ranks.size))
    for rank, own in enumerate(everybody):
        assert (own.replicas, own.readers, own.planners) == (first.replicas, first.readers, first.planners)
        assert rank in own.replicas[own.dp_rank]
        assert own.is_constructor == (own.replicas[own.dp_rank][0] == rank)
        assert own.is_reader == (own.is_constructor or options["reader_ranks"] == "all")
        assert own.group_start <= own.dp_rank < own.group_start + own.balance_group_size
        assert own.planner in own.replicas[own.group_start]
        assert own.in_data_plane == (own.is_reader or own.is_constructor or own.planner == rank)
    groups = [first.data_plane(g) for g in range(first.dp_size // first.balance_group_size)]
    assert sorted(sum(groups, ())) == sorted(first.data_plane())
    assert len(set(first.data_plane())) == len(first.data_plane())


def test_dp_rank_is_the_position_in_the_product_of_data_parallel_dimensions() -> None:
    shape = {"dp_replicate": 2, "tp": 2, "dp_shard": 3}
    assert topology(shape).replicas == ((0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11))


@given(world=worlds())
def test_every_rank_knows_its_place_in_each_dimension(
    world: tuple[np.ndarray[Any, Any], list[str], dict[str, Any]],
) -> None:
    ranks, names, options = world
    for rank in range(ranks.size):
        own = Topology.from_mesh(ranks, names, rank=rank, **options)
        place = {name: (at, size) for name, at, size in own.coordinates}
        assert ranks[tuple(place[name][0] for name in names)] == rank
        assert [place[name][1] for name in names] == list(ranks.shape)
        for name in names:
            if not name.startswith("dp"):
                assert own.model_coordinate(name) == place[name]


def test_dp_dims_are_taken_in_the_order_given() -> None:
    shape = {"a": 2, "b": 3}
    assert topology(shape, dp_dims=("b", "a")).constructors == (0, 3, 1, 4, 2, 5)
    assert topology(shape, dp_dims=("b",)).replicas == ((0, 3), (1, 4), (2, 5))
    assert topology(shape, dp_dims=()).replicas == ((0, 1, 2, 3, 4, 5),)


def test_a_plain_mesh_is_data_parallel() -> None:
    assert Topology.from_mesh(np.arange(3), None, rank=1).constructors == (0, 1, 2)
    alone = Topology.single()
    assert (alone.replicas, alone.readers, alone.planners) == (((0,),), ((0,),), (0,))


def test_chosen_readers_read_for_their_replica_else_for_others_of_the_group() -> None:
    chosen = topology({"dp": 4, "tp": 2}, rank=3, reader_ranks=(1, 3, 6))
    assert chosen.readers == ((1,), (3,), (6,), (6,))
    assert chosen.is_reader
    assert not chosen.is_constructor
    assert chosen.data_plane() == (0, 1, 2, 3, 4, 6)


def test_the_planner_can_be_any_rank() -> None:
    chosen = topology({"dp": 4, "tp": 2}, rank=5, planner_rank=5, balance_group_size=2)
    assert chosen.planners == (0, 5)
    assert chosen.planner == 5
    assert chosen.in_data_plane
    assert chosen.data_plane(1) == (4, 6, 5)


REFUSED: list[tuple[dict[str, int], dict[str, Any], type[Exception], str]] = [
    (
        {"tp": 2, "pp": 2},
        {},
        ValueError,
        "the mesh dimensions ['tp', 'pp'] hold none of ['dp_replicate', 'dp_shard', 'dp']: every rank would read the "
        "same samples. Name the data-parallel dimensions with dp_dims=(...).",
    ),
    (
        {"dp": 4},
        {"balance_group_size": 3},
        ValueError,
        "balance_group_size=3 does not divide the 4 data-parallel ranks: some ranks would be balanced with nobody. "
        "Choose a divisor.",
    ),
    (
        {"dp": 4},
        {"balance_group_size": True},
        ValueError,
        "balance_group_size=True does not divide the 4 data-parallel ranks: some ranks would be balanced with nobody. "
        "Choose a divisor.",
    ),
    (
        {"dp": 2},
        {"dp_dims": "dp"},
        TypeError,
        "dp_dims is the string 'dp', expected a tuple of names, e.g. ('dp',)",
    ),
    ({"dp": 2}, {"dp_dims": ("ep",)}, ValueError, "dp_dims=('ep',) names ['ep']; the mesh has ['dp']"),
    (
        {"dp": 2},
        {"dp_dims": ("dp", "dp")},
        ValueError,
        "dp_dims=('dp', 'dp') names a dimension twice; the mesh has ['dp']",
    ),
    (
        {"dp": 2},
        {"reader_ranks": "some"},
        ValueError,
        "reader_ranks='some', expected None, 'all' or a tuple of ranks",
    ),
    (
        {"dp": 2},
        {"reader_ranks": (0, 7)},
        ValueError,
        "reader_ranks=(0, 7): expected at least one rank, each once, each of the 2 ranks of the mesh; unknown: [7]",
    ),
    (
        {"dp": 2},
        {"reader_ranks": ()},
        ValueError,
        "reader_ranks=(): expected at least one rank, each once, each of the 2 ranks of the mesh; unknown: []",
    ),
    (
        {"dp": 4},
        {"reader_ranks": (0,), "balance_group_size": 2},
        ValueError,
        "reader_ranks=(0,) leaves the balance group of dp ranks 2..3 without a reader, and payload never crosses "
        "groups; add a rank of it",
    ),
    ({"dp": 2}, {"planner_rank": 9}, ValueError, "planner_rank=9 is not a rank of the mesh"),
]


@pytest.mark.parametrize(("shape", "options", "kind", "message"), REFUSED)
def test_refusals(
    shape: dict[str, int], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        topology(shape, **options)


def test_a_mesh_that_leaves_ranks_out() -> None:
    message = (
        "the mesh holds the ranks [0, 2], expected each of 0..1 once: a rank outside the mesh would wait for ever. "
        "Build the loader with a mesh that covers the world."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Topology.from_mesh(np.array([0, 2]), ["dp"], rank=0)


def test_a_mesh_without_names() -> None:
    message = (
        "the mesh has 2 dimensions without names, so nobody can tell which are data parallel; pass mesh_dim_names to "
        "init_device_mesh."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Topology.from_mesh(np.arange(4).reshape(2, 2), None, rank=0)
