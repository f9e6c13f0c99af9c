"""Every rank creates the same groups in the same order, no more than it needs, and none reaches across a node."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.comm.communicator import SoloCommunicator
from evenstep.comm.groups import Groups, check_backend, check_device, create_groups
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.errors import RemoteRankError
from evenstep.testing import run_ranks
from evenstep.topology import Topology

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)


@dataclass
class Torch:
    """Stands in for torch.distributed on one rank: notes the groups that are made."""

    rank: int
    made: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def new_group(self, ranks: list[int], *, backend: str, timeout: timedelta) -> tuple[int, ...]:
        assert timeout == TIMEOUT
        self.made.append((tuple(ranks), backend))
        return tuple(ranks)

    def get_process_group_ranks(self, group: tuple[int, ...]) -> list[int]:
        return list(group)

    def get_rank(self) -> int:
        return self.rank


def create(
    topology: Topology, payload_backend: str = "gloo"
) -> tuple[Groups, list[tuple[tuple[int, ...], str]]]:
    """The groups of one rank, and all that it made on the way."""
    fake = Torch(topology.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", fake.new_group)
        patch.setattr(dist, "get_process_group_ranks", fake.get_process_group_ranks)
        patch.setattr(dist, "get_rank", fake.get_rank)
        device = CPU if payload_backend == "gloo" else torch.device("cuda")
        world = SoloCommunicator(topology.rank)
        return create_groups(topology, world, "gloo", payload_backend, device, TIMEOUT), fake.made


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, list[Topology]]:
    """Replicas of some ranks each, in some order of ranks, with any readers, planner and balance groups."""
    dp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = np.array(draw(st.permutations(range(dp * tp)))).reshape(dp, tp)
    group = draw(st.sampled_from([size for size in range(1, dp + 1) if dp % size == 0]))
    options: dict[str, Any] = {
        "reader_ranks": draw(st.sampled_from([None, "all"])),
        "balance_group_size": group,
    }
    if group == dp:
        options["planner_rank"] = draw(st.none() | st.integers(0, dp * tp - 1))
    return group, [Topology.from_mesh(ranks, ["dp", "tp"], rank=rank, **options) for rank in range(dp * tp)]


def members(communicator: Any) -> tuple[int, ...] | None:
    return None if communicator is None else tuple(communicator.ranks)


@given(mesh=meshes(), payload=st.sampled_from(["gloo", "nccl"]))
def test_every_rank_creates_the_same_groups_in_the_same_order(
    mesh: tuple[int, list[Topology]], payload: str
) -> None:
    size, topologies = mesh
    created = [create(topology, payload) for topology in topologies]
    assert all(made == created[0][1] for _, made in created)
    for ranks, _ in created[0][1]:
        assert len(ranks) > 1, "a group of one costs descriptors and says nothing"
    for topology, (groups, made) in zip(topologies, created, strict=True):
        mine = topology.rank
        assert mine in groups.model.ranks
        assert groups.model.ranks == topology.replicas[topology.dp_rank]
        in_plane = topology.in_data_plane
        assert members(groups.control) == (tuple(sorted(topology.data_plane())) if in_plane else None)
        balanced = set(topology.data_plane(topology.group_start // size))
        for communicator in (groups.balance, groups.payload):
            assert (communicator is not None) == (mine in balanced)
            if communicator is not None:
                assert set(communicator.ranks) == balanced
                assert communicator.position == sorted(balanced).index(mine)
        if payload == "gloo":
            assert groups.payload is groups.balance, "one group serves what one thread says to the same ranks"
        if size == topology.dp_size:
            assert groups.balance is groups.control
        backends = {backend for _, backend in made}
        assert backends <= {"gloo", payload}


def test_what_one_group_can_do_needs_no_second() -> None:
    def made(**options: Any) -> list[tuple[int, ...]]:
        topology = Topology.from_mesh(np.arange(8).reshape(4, 2), ["dp", "tp"], rank=0, **options)
        return [ranks for ranks, _ in create(topology)[1]]

    replicas = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert made() == [(0, 2, 4, 6), *replicas]
    assert made(balance_group_size=2) == [(0, 2, 4, 6), (0, 2), (4, 6), *replicas]
    assert made(balance_group_size=1) == [(0, 2, 4, 6), *replicas]
    assert made(reader_ranks="all", balance_group_size=1) == [tuple(range(8)), *replicas, *replicas]


def test_payload_and_model_groups_follow_the_device() -> None:
    topology = Topology.from_mesh(np.arange(4).reshape(2, 2), ["dp", "tp"], rank=0)
    groups, made = create(topology, "nccl")
    assert made == [((0, 2), "gloo"), ((0, 2), "nccl"), ((0, 1), "nccl"), ((2, 3), "nccl")]
    assert groups.control is groups.balance is not groups.payload
    assert groups.payload is not None
    assert (groups.balance and groups.balance.device.type, groups.payload.device.type) == ("cpu", "cuda")


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("mpi", "cpu", "backend='mpi', expected one of ['gloo', 'hccl', 'nccl']"),
        (
            "nccl",
            "cpu",
            "backend='nccl' moves tensors of 'cuda' devices but device is 'cpu': its collectives would fail. Pass "
            "device='cuda', or backend='gloo'.",
        ),
        (
            "hccl",
            "cuda:1",
            "backend='hccl' moves tensors of 'npu' devices but device is 'cuda:1': its collectives would fail. Pass "
            "device='npu', or backend='gloo'.",
        ),
    ],
)
def test_a_backend_that_cannot_move_the_devices_tensors_is_refused(
    backend: str, device: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_backend(backend, torch.device(device), "backend")


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda:3")])
def test_a_backend_that_can_is_not(backend: str, device: str) -> None:
    check_backend(backend, torch.device(device), "backend")


def test_a_device_that_is_not_there_is_refused() -> None:
    check_device(CPU)
    found = torch.cuda.device_count()
    message = (
        f"device='cuda:{found}', but torch finds {found} 'cuda' devices in this process: no batch could be put there. "
        "Check the driver, the build of torch and the devices that are visible, or pass device='cpu'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_device(torch.device("cuda", found))


class Documents:
    """Sample ``i`` holds nothing but ``i``, in lengths that call for balance."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((1 + index * 7 % 31,), index)}


def on_two_nodes(rank: int, balance_group_size: int | str | None) -> dict[str, Any]:
    """A whole epoch of four ranks, two to a host; who talked to whom, and which samples this rank trained on."""
    socket.gethostname = lambda: f"node{rank // 2}"
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    plane = DataPlane.from_mesh(mesh, balance_group_size=balance_group_size, timeout=TIMEOUT)
    group, control = plane.payload, plane.rounds
    assert isinstance(group, ProcessGroupCommunicator)
    assert control is not None
    config = LoaderConfig(seq_len=64, balance_group_size=balance_group_size, timeout=TIMEOUT)
    taken: list[int] = []
    with build_loader(
        Documents(),
        plane,
        config,
        sampler=StepSampler(64, global_batch_size=16, order="sequential"),
        pack=first_token,
        collate=list,
    ) as loader:
        for batch in loader:
            taken += batch
    return {"ranks": group.ranks, "exchanges": group.calls["all_to_all"], "taken": taken}


def first_token(samples: list[dict[str, torch.Tensor]], _seq_len: int) -> int:
    (sample,) = samples
    return int(sample["input_ids"][0])


@pytest.mark.gloo
@pytest.mark.parametrize("size", ["node", 2])
def test_payload_stays_on_its_node(size: int | str) -> None:
    outcomes = run_ranks(on_two_nodes, 4, size)
    reference = np.arange(64).reshape(4, 4, 4)  # step, micro-batch, dp rank
    for node in range(2):
        pair = outcomes[2 * node : 2 * node + 2]
        assert [one["ranks"] for one in pair] == [(2 * node, 2 * node + 1)] * 2
        assert pair[0]["exchanges"] == pair[1]["exchanges"] > 0
        together = sorted(pair[0]["taken"] + pair[1]["taken"])
        assert together == sorted(reference[:, :, 2 * node : 2 * node + 2].flatten().tolist())


def uneven_nodes(rank: int) -> str:
    socket.gethostname = lambda: "big" if rank < 3 else "small"
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    try:
        DataPlane.from_mesh(mesh, balance_group_size="node", timeout=TIMEOUT)
    except (ValueError, RemoteRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


@pytest.mark.gloo
def test_nodes_of_different_sizes_are_refused_on_every_rank() -> None:
    assert (
        run_ranks(uneven_nodes, 4)
        == [
            "ValueError: balance_group_size='node' needs the same number of consecutive dp ranks on every host, but the "
            "hosts by dp rank are ['big', 'big', 'big', 'small']: groups would reach across hosts. Pass a number."
        ]
        * 4
    )
