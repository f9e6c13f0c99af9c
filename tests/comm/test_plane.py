"""A data plane is agreed on by all ranks, or refused on all of them."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenstep import DataPlane
from evenstep.comm.agreement import agree, dp_ranks_per_host
from evenstep.comm.communicator import SoloCommunicator
from evenstep.comm.header import OK, Header
from evenstep.errors import ConfigMismatch, RemoteRankError
from evenstep.testing import SimulatedWorld, run_ranks
from evenstep.topology import Topology


def together(told: list[dict[str, str]], problems: dict[int, Exception] | None = None) -> list[Any]:
    def work(plane: DataPlane) -> Any:
        rank = plane.topology.rank
        return agree(plane.world, told[rank], (problems or {}).get(rank))

    return SimulatedWorld(len(told), timeout=10).outcomes(work)


def test_ranks_that_agree_know_their_hosts() -> None:
    outcomes = together([{"seq_len": "64"}] * 3)
    assert len(set(outcomes[0])) == 1
    assert outcomes == [outcomes[0]] * 3


def test_a_field_that_differs_is_named_with_its_ranks_and_values() -> None:
    for error in together([{"seq_len": "64"}, {"seq_len": "64"}, {"seq_len": "32"}, {"seq_len": "32"}]):
        assert isinstance(error, ConfigMismatch)
        assert str(error) == (
            "seq_len differs between ranks: rank 0 has 64, ranks [2, 3] have 32: their plans and collectives would "
            "not fit together. Give every rank the same seq_len."
        )


def test_every_field_that_differs_is_named() -> None:
    told = [
        {"algorithm": "auto", "seed": "1", "seq_len": "64"},
        {"algorithm": "lpt", "seed": "1", "seq_len": "32"},
    ]
    for error in together([*told, told[0]]):
        assert str(error) == (
            "algorithm differs between ranks: rank 0 has auto, ranks [1] have lpt: their plans and collectives would "
            "not fit together. Give every rank the same algorithm. Other fields that differ: seq_len (ranks [1])."
        )


def test_a_field_that_only_some_ranks_have_differs() -> None:
    for error in together([{"seq_len": "64"}, {"seq_len": "64", "new": "1"}]):
        assert str(error).startswith("new differs between ranks: rank 0 has None, ranks [1] have 1: ")


def test_long_values_are_gathered_only_where_they_differ() -> None:
    class Counted:
        def __init__(self, world: Any) -> None:
            self.world, self.ranks, self.position = world, world.ranks, world.position
            self.gathered = 0

        def all_gather(self, row: torch.Tensor) -> torch.Tensor:
            self.gathered += row.numel()
            gathered: torch.Tensor = self.world.all_gather(row)
            return gathered

    def work(plane: DataPlane, odd: dict[str, str]) -> tuple[int, str]:
        counted: Any = Counted(plane.world)
        roles = {"a": "short", "roles": "(0, 1), " * 4000}
        message = ""
        try:
            agree(counted, {**roles, **odd} if plane.topology.rank == 2 else roles, None)
        except ConfigMismatch as error:
            message = str(error)
        return counted.gathered, message

    for gathered, message in SimulatedWorld(4, timeout=10).run(work, {}):
        assert message == ""
        assert gathered < 500
    for other in ("(0, 2), " * 4000, "é" * 200, "short", "[]"):
        for gathered, message in SimulatedWorld(4, timeout=10).run(work, {"roles": other}):
            assert gathered > 32000
            assert message == (
                f"roles differs between ranks: rank 0 has {'(0, 1), ' * 4000}, ranks [2] have {other}: their plans and "
                "collectives would not fit together. Give every rank the same roles."
            )


def test_a_problem_is_raised_as_it_is_at_home_and_told_elsewhere() -> None:
    problem = TypeError("pack is 3, expected a function")
    outcomes = together([{}, {"seq_len": "1"}, {}], {1: problem})
    assert outcomes[1] is problem
    for error in (outcomes[0], outcomes[2]):
        assert isinstance(error, RemoteRankError)
        assert str(error) == ("rank 1 could not build its loader: TypeError: pack is 3, expected a function")
        assert (error.rank, error.error_type, error.error_message) == (1, "TypeError", str(problem))


def topology(dp_size: int) -> Topology:
    return Topology.from_mesh(np.arange(dp_size), ["dp"], rank=0)


@pytest.mark.parametrize(
    ("hosts", "size"), [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("a", 1), ("aaabbbccc", 3)]
)
def test_dp_ranks_of_one_host_are_counted(hosts: str, size: int) -> None:
    assert dp_ranks_per_host(topology(len(hosts)), hosts) == size


@pytest.mark.parametrize("hosts", ["aab", "abab", "abba", "aabbb", "aabbaa"])
def test_hosts_that_do_not_divide_the_ranks_are_refused(hosts: str) -> None:
    message = (
        "balance_group_size='node' needs the same number of consecutive dp ranks on every host, but the hosts by dp "
        f"rank are {list(hosts)}: groups would reach across hosts. Pass a number."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dp_ranks_per_host(topology(len(hosts)), hosts)


def test_one_process_needs_no_torch_distributed() -> None:
    plane = DataPlane.from_mesh(None)
    assert isinstance(plane.balance, SoloCommunicator)
    assert plane.is_constructor
    assert plane.is_planner
    assert not plane.assists
    plane.close()
    plane.close()


def test_close_waits_for_the_others_no_longer_than_its_grace() -> None:
    def work(plane: DataPlane) -> float:
        assert plane.rounds is not None
        plane.rounds.begin(Header(OK))
        if plane.topology.rank == 1:
            time.sleep(0.8)
            return 0.0
        plane.close_grace = 0.2
        began = time.monotonic()
        plane.close()
        return time.monotonic() - began

    waited, _ = SimulatedWorld(2).run(work)
    assert 0.15 < waited < 0.75


def refused(mesh: DeviceMesh, **options: Any) -> str:
    try:
        DataPlane.from_mesh(mesh, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def builds(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    outcomes: dict[str, Any] = {
        "nccl": refused(mesh, backend="nccl"),
        "payload": refused(mesh, payload_backend="hccl"),
        "unknown": refused(mesh, backend="mpi"),
        "no mesh": refused(2 if rank == 1 else mesh),  # type: ignore[arg-type]
        "no device": refused(mesh, device="cuda:99" if rank == 3 else "cpu"),
        "on one rank": refused(mesh, reader_ranks=(7,) if rank == 2 else None),
        "differs": refused(mesh, balance_group_size=1 if rank == 3 else None),
    }
    for name, options in {
        "default": {},
        "all": {"reader_ranks": "all"},
        "groups": {"balance_group_size": 1},
        "node": {"balance_group_size": "node"},
        "planner": {"planner_rank": 3},
    }.items():
        plane = DataPlane.from_mesh(mesh, **options)  # type: ignore[arg-type]
        outcomes[name] = {
            "control": plane.rounds is not None,
            "balance": None if plane.balance is None else plane.balance.ranks,
            "same": plane.balance is plane.payload,
            "model": plane.model.ranks,
            "planner": plane.topology.planner,
        }
        plane.close()
    dist.barrier()
    return outcomes


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    return run_ranks(builds, 4)


@pytest.mark.gloo
def test_what_cannot_work_is_refused_on_every_rank(built: list[dict[str, Any]]) -> None:
    for rank, outcomes in enumerate(built):
        assert outcomes["nccl"] == (
            "ValueError: backend='nccl' moves tensors of 'cuda' devices but device is 'cpu': its collectives would "
            "fail. Pass device='cuda', or backend='gloo'."
        )
        assert outcomes["payload"] == (
            "ValueError: payload_backend='hccl' moves tensors of 'npu' devices but device is 'cpu': its collectives "
            "would fail. Pass device='npu', or payload_backend='gloo'."
        )
        assert outcomes["unknown"] == "ValueError: backend='mpi', expected one of ['gloo', 'hccl', 'nccl']"
        told = (
            "mesh must be a DeviceMesh over the whole world, a ready DataPlane, or None for one process, but is 2 (int). "
            "Make one with init_device_mesh('cpu', (world_size,), mesh_dim_names=('dp',))."
        )
        assert outcomes["no mesh"] == (
            f"TypeError: {told}"
            if rank == 1
            else f"RemoteRankError: rank 1 could not build its loader: TypeError: {told}"
        )
        told = (
            f"device='cuda:99', but torch finds {torch.cuda.device_count()} 'cuda' devices in this process: no batch "
            "could be put there. Check the driver, the build of torch and the devices that are visible, or pass "
            "device='cpu'."
        )
        assert outcomes["no device"] == (
            f"ValueError: {told}"
            if rank == 3
            else f"RemoteRankError: rank 3 could not build its loader: ValueError: {told}"
        )
        told = "reader_ranks=(7,): expected at least one rank, each once, each of the 4 ranks of the mesh; unknown: [7]"
        assert outcomes["on one rank"] == (
            f"ValueError: {told}"
            if rank == 2
            else f"RemoteRankError: rank 2 could not build its loader: ValueError: {told}"
        )
        assert outcomes["differs"].startswith(
            "ConfigMismatch: balance_group_size differs between ranks: rank 0 has None, ranks [3] have 1: "
        )


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "balance", "planner"),
    [
        ("default", [(0, 2), None, (0, 2), None], [0] * 4),
        ("all", [(0, 1, 2, 3)] * 4, [0] * 4),
        ("groups", [(0,), None, (2,), None], [0, 0, 2, 2]),
        ("node", [(0, 2), None, (0, 2), None], [0] * 4),
        ("planner", [(0, 2, 3), None, (0, 2, 3), (0, 2, 3)], [3] * 4),
    ],
)
def test_who_talks_to_whom(
    built: list[dict[str, Any]], name: str, balance: list[Any], planner: list[int]
) -> None:
    for rank, outcomes in enumerate(built):
        assert outcomes[name] == {
            "control": balance[rank] is not None,
            "balance": balance[rank],
            "same": True,
            "model": (0, 1) if rank < 2 else (2, 3),
            "planner": planner[rank],
        }


def test_a_mesh_needs_torch_distributed() -> None:
    class Mesh:
        def size(self) -> int:
            return 4

    message = (
        "the mesh has 4 ranks but torch.distributed is not initialised, so they cannot talk; call "
        "torch.distributed.init_process_group() first"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        DataPlane.from_mesh(Mesh())  # type: ignore[arg-type]
    assert not torch.distributed.is_initialized()
