"""Each way in on real processes that talk over gloo, as on simulated ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StepSampler, build_loader
from evenstep.comm.header import OK, Header
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.testing import SimulatedWorld, assert_same, run_ranks, run_ranks_outcomes

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
LENGTHS = [3, 17, 1, 9, 0, 12, 5, 20, 2, 7, 14, 4, 6, 11, 8, 19]


class Dataset:
    def __init__(self, fatal: int | None = None) -> None:
        self.fatal = fatal

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.fatal:
            os._exit(3)
        return {"input_ids": torch.arange(LENGTHS[index]) + 100 * index}


class Steps:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        samples = Dataset()
        return iter([[[samples[4 * s + 2 * m + self.rank]] for m in range(2)] for s in range(4)])


def train(where: Any, rank: int, graph: str, options: dict[str, Any]) -> tuple[list[Any], Any]:
    config = LoaderConfig(seq_len=24, **options)
    if graph == "external":
        loader = build_loader(Steps(rank), where, config)
    else:
        sampler = StepSampler(len(LENGTHS), global_batch_size=4, seed=3)
        metadata = LENGTHS if graph == "metadata" else None
        loader = build_loader(Dataset(), where, config, sampler=sampler, metadata=metadata)
    with loader:
        return list(loader), loader.state_dict()


def real(rank: int, graph: str, options: dict[str, Any]) -> tuple[list[Any], Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return train(mesh, rank, graph, options)


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        ("online", {"num_workers": 1, "worker": "process"}),
        ("metadata", {"num_workers": 2}),
        ("metadata", {"num_workers": 1, "worker": "process"}),
        ("external", {}),
    ],
)
def test_real_ranks_get_what_simulated_ones_get(graph: str, options: dict[str, Any]) -> None:
    def simulated(plane: DataPlane) -> Any:
        return train(plane, plane.topology.rank, graph, {})

    assert_same(run_ranks(real, 2, graph, options), SimulatedWorld(2).run(simulated))


def said(rank: int, window: int, workers: int) -> tuple[dict[str, int], int]:
    """What a whole epoch with known lengths says to the other rank: collectives by name, and bytes."""
    from torch.distributed.device_mesh import init_device_mesh

    plane = DataPlane.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    assert plane.payload is plane.balance
    group = plane.payload
    assert isinstance(group, ProcessGroupCommunicator)
    config = LoaderConfig(seq_len=24, balance_window=window, num_workers=workers, host_prefetch=0)
    sampler = StepSampler(len(LENGTHS), global_batch_size=4, seed=3)
    with build_loader(Dataset(), plane, config, sampler=sampler, metadata=LENGTHS) as loader:
        calls, sent = Counter(group.calls), group.sent_bytes.total()
        assert sum(1 for _ in loader) == 8
        return dict(Counter(group.calls) - calls), group.sent_bytes.total() - sent


@pytest.mark.parametrize(("window", "windows"), [(1, 8), (2, 4)])
def test_known_lengths_cost_one_header_a_window_and_not_a_byte_more(window: int, windows: int) -> None:
    told = windows + 1  # the last header closes the epoch
    header = Header(OK).pack().numel()
    for workers in (0, 1):
        for calls, sent in run_ranks(said, 2, window, workers):
            assert calls == {"all_gather": told}
            assert sent == told * header


def dying(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    config = LoaderConfig(seq_len=24, num_workers=1, worker="process")
    sampler = StepSampler(len(LENGTHS), global_batch_size=4, seed=3)
    with build_loader(Dataset(fatal=7), mesh, config, sampler=sampler, metadata=LENGTHS) as loader:
        for _ in loader:
            pass


def test_a_worker_that_dies_after_planning_stops_every_rank() -> None:
    outcomes = run_ranks_outcomes(dying, 2)
    errors = [outcome.error for outcome in outcomes]
    assert sum(isinstance(error, RemoteRankError) for error in errors) >= 1
    assert all("died with exit code 3" in str(error) for error in errors)
