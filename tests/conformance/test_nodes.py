"""One contract, every exported node: on one rank, and on several that do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchdata.nodes as tn

import evenstep.nodes
from evenstep import DataPlane, LoaderConfig, MetadataTable, StepSampler
from evenstep.nodes import (
    CallerPrefetch,
    DevicePrefetch,
    HostPrefetch,
    MetadataGather,
    ModelBroadcast,
    Packer,
    PayloadAllToAll,
    PinMemory,
    PlannedReader,
    Planner,
    SamplerReader,
    Stage,
)
from evenstep.testing import SimulatedWorld, assert_node_conforms

LENGTHS = [3, 17, 1, 9, 0, 12, 5, 20, 2, 7, 14, 4, 6, 11, 8, 19, 10, 13, 16, 15, 18, 3, 9, 6, 0, 12]
CONFIG = LoaderConfig(
    seq_len=20, micro_batch_size=1, balance_window=2, resume="micro_batch", min_balance_gain=0.01
)

Build = Callable[[DataPlane, Any], tn.BaseNode[Any]]


class Dataset:
    """Documents of known lengths; one index can be made to fail."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.failing:
            raise OSError(f"no sample {index}")
        return {"input_ids": torch.arange(100 * index, 100 * index + LENGTHS[index]), "index": index}


def reader(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    sampler = StepSampler(
        len(LENGTHS), global_batch_size=4 * plane.topology.dp_size, seed=3, remainder="wrap"
    )
    return SamplerReader(sampler, dataset, plane, CONFIG)


def known(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    sampler = StepSampler(
        len(LENGTHS), global_batch_size=4 * plane.topology.dp_size, seed=3, remainder="wrap"
    )
    return SamplerReader(sampler, dataset, plane, CONFIG, metadata=MetadataTable.from_tokens(LENGTHS))


def gather(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return MetadataGather(reader(plane, dataset), plane)


def planner(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return Planner(gather(plane, dataset), plane, CONFIG)


def exchange(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return PayloadAllToAll(planner(plane, dataset), plane, CONFIG)


def planned_reader(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return PlannedReader(Planner(known(plane, dataset), plane, CONFIG), dataset, plane, CONFIG)


def packer(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return Packer(exchange(plane, dataset))


def pin(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return PinMemory(packer(plane, dataset), "cpu")


def host_prefetch(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return HostPrefetch(packer(plane, dataset))


def host_prefetch_deep(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return HostPrefetch(packer(plane, dataset), 5)


def caller_prefetch(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return CallerPrefetch(packer(plane, dataset))


def device_prefetch(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return DevicePrefetch(host_prefetch(plane, dataset), "cpu")


def model_broadcast(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    if plane.is_constructor:
        return ModelBroadcast(device_prefetch(plane, dataset), plane)
    return ModelBroadcast(reader(plane, None), plane)


def stock_nodes_behind(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return tn.Mapper(packer(plane, dataset), lambda batch: batch["input_ids"])


CASES: dict[str, Build] = {
    "SamplerReader": reader,
    "SamplerReader with metadata": known,
    "MetadataGather": gather,
    "Planner": planner,
    "Planner with metadata": lambda plane, dataset: Planner(known(plane, dataset), plane, CONFIG),
    "PayloadAllToAll": exchange,
    "PlannedReader": planned_reader,
    "Packer": packer,
    "PinMemory": pin,
    "HostPrefetch": host_prefetch,
    "HostPrefetch, deep": host_prefetch_deep,
    "CallerPrefetch": caller_prefetch,
    "DevicePrefetch": device_prefetch,
    "ModelBroadcast": model_broadcast,
}


def conform(plane_of: Callable[[], DataPlane], build: Build, *, failing: bool) -> None:
    assert_node_conforms(
        lambda: build(plane_of(), Dataset()),
        build_failing=(lambda: build(plane_of(), Dataset(failing=7))) if failing else None,
    )


@pytest.mark.parametrize("name", CASES)
def test_node_conforms_in_one_process(name: str) -> None:
    # A source does not remember its errors: the node that reads it does.
    failing = name != "SamplerReader" and "metadata" not in name
    conform(DataPlane.single, CASES[name], failing=failing)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=["dp2", "dp2tp2"])
def test_node_conforms_on_several_ranks(name: str, mesh: dict[str, int]) -> None:
    if "tp" in mesh and name != "ModelBroadcast":
        mesh = {"dp": 3}  # the others do not know that there are model-parallel peers
    world = SimulatedWorld(mesh)
    planes = [world.planes() for _ in range(64)]

    def rank(plane: DataPlane) -> None:
        mine = iter([p[plane.topology.rank] for p in planes])
        conform(lambda: next(mine), CASES[name], failing=False)
        for everybody in planes:
            everybody[plane.topology.rank].close()

    world.run(rank)


def test_every_exported_node_has_a_case() -> None:
    exported = {
        name
        for name in evenstep.nodes.__all__
        if isinstance(getattr(evenstep.nodes, name), type)
        and issubclass(getattr(evenstep.nodes, name), tn.BaseNode)
    }
    missing = exported - {name.split()[0].rstrip(",") for name in CASES} - {Stage.__name__}
    assert not missing, f"these exported nodes have no conformance case: {sorted(missing)}"
