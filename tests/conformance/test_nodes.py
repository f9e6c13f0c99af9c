"""One contract, every exported node: on one rank, and on several that do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchdata.nodes as tn

import evenstep.nodes
from evenstep import DataPlane, LoaderConfig, MetadataTable, Shard, StepSampler
from evenstep.nodes import (
    CallerPrefetch,
    ContextShard,
    DevicePrefetch,
    ExternalStepReader,
    HostPrefetch,
    MetadataGather,
    ModelBroadcast,
    Packer,
    PayloadAllToAll,
    PinMemory,
    PlannedReader,
    Planner,
    SamplerReader,
    ShardPad,
    Stage,
    StepBuilder,
)
from evenstep.sampling import RankLocalBatchSampler
from evenstep.testing import SimulatedWorld, assert_node_conforms

LENGTHS = [3, 17, 1, 9, 0, 12, 5, 20, 2, 7, 14, 4, 6, 11, 8, 19, 10, 13, 16, 15, 18, 3, 9, 6, 0, 12]
CONFIG = LoaderConfig(
    seq_len=20, micro_batch_size=1, balance_window=2, resume="micro_batch", min_balance_gain=0.01
)
THREADS = replace(CONFIG, num_workers=2)

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


def reader(plane: DataPlane, dataset: Any, config: LoaderConfig = CONFIG) -> tn.BaseNode[Any]:
    sampler = StepSampler(
        len(LENGTHS), global_batch_size=4 * plane.topology.dp_size, seed=3, remainder="wrap"
    )
    return SamplerReader(sampler, dataset, plane, config)


def known(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    sampler = StepSampler(
        len(LENGTHS), global_batch_size=4 * plane.topology.dp_size, seed=3, remainder="wrap"
    )
    return SamplerReader(sampler, dataset, plane, CONFIG, metadata=MetadataTable.from_tokens(LENGTHS))


class Documents:
    """A rank's own stream of documents, longer on no rank than on another."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for k, length in enumerate(LENGTHS):
            yield {"input_ids": torch.arange(length) + 1000 * self.rank + 100 * self.epoch + k}


class Steps(Documents):
    """The same as local steps, one document a row."""

    def __iter__(self) -> Iterator[Any]:
        documents = list(super().__iter__())
        return iter([[[d] for d in documents[k : k + 4]] for k in range(0, len(documents) - 3, 4)])


def external(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return ExternalStepReader(Steps(plane.topology.dp_rank), plane, CONFIG)


def external_nodes(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    source = tn.Batcher(tn.IterableWrapper(list(Documents(plane.topology.dp_rank))), 4)
    return ExternalStepReader(source, plane, CONFIG)


def rank_local(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    dp_rank, dp_size = plane.topology.dp_rank, plane.topology.dp_size
    mine = [[i] for i in range(dp_rank, len(LENGTHS) - len(LENGTHS) % dp_size, dp_size)]
    sampler = RankLocalBatchSampler(mine, accumulation_steps=3, global_batch_size=3 * dp_size)
    return ExternalStepReader(sampler, plane, CONFIG, dataset=dataset)


def step_builder(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return StepBuilder(Documents(plane.topology.dp_rank), CONFIG.seq_len, 4, look_ahead=5)


def built_steps(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    reader = ExternalStepReader(step_builder(plane, dataset), plane, CONFIG)
    exchanged = PayloadAllToAll(Planner(MetadataGather(reader, plane), plane, CONFIG), plane, CONFIG)
    return HostPrefetch(Packer(exchanged))


def gather(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return MetadataGather(reader(plane, dataset), plane)


def planner(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return Planner(gather(plane, dataset), plane, CONFIG)


def exchange(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return PayloadAllToAll(planner(plane, dataset), plane, CONFIG)


def planned_reader(plane: DataPlane, dataset: Any, config: LoaderConfig = CONFIG) -> tn.BaseNode[Any]:
    return PlannedReader(Planner(known(plane, dataset), plane, config), dataset, plane, config)


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


SHARD = {"input_ids": Shard("tp", mode="zigzag")}


def shard_pad(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return ShardPad(packer(plane, dataset), plane, SHARD)


def context_shard(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    if plane.is_constructor:
        return ContextShard(ModelBroadcast(shard_pad(plane, dataset), plane), plane, SHARD)
    return ContextShard(ModelBroadcast(reader(plane, None), plane), plane, SHARD)


def stock_nodes_behind(plane: DataPlane, dataset: Any) -> tn.BaseNode[Any]:
    return tn.Mapper(packer(plane, dataset), lambda batch: batch["input_ids"])


CASES: dict[str, Build] = {
    "SamplerReader": reader,
    "SamplerReader with metadata": known,
    "ExternalStepReader": external,
    "ExternalStepReader over nodes": external_nodes,
    "ExternalStepReader of rank-local indices": rank_local,
    "StepBuilder": step_builder,
    "StepBuilder behind HostPrefetch": built_steps,
    "SamplerReader with threads": lambda plane, dataset: reader(plane, dataset, THREADS),
    "PlannedReader with threads": lambda plane, dataset: planned_reader(plane, dataset, THREADS),
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
    "ShardPad": shard_pad,
    "ContextShard": context_shard,
}


def conform(plane_of: Callable[[], DataPlane], build: Build, *, failing: bool) -> None:
    assert_node_conforms(
        lambda: build(plane_of(), Dataset()),
        build_failing=(lambda: build(plane_of(), Dataset(failing=7))) if failing else None,
    )


@pytest.mark.parametrize("name", CASES)
def test_node_conforms_in_one_process(name: str) -> None:
    # A source does not remember its errors: the node that reads it does.
    failing = (
        name.split()[0] not in ("SamplerReader", "ExternalStepReader", "StepBuilder")
        and "metadata" not in name
    )
    conform(DataPlane.single, CASES[name], failing=failing)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=["dp2", "dp2tp2"])
def test_node_conforms_on_several_ranks(name: str, mesh: dict[str, int]) -> None:
    if "tp" in mesh and name not in ("ModelBroadcast", "ContextShard"):
        mesh = {"dp": 3}  # the others do not know that there are model-parallel peers
    world = SimulatedWorld({"tp": 1, **mesh})
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


@pytest.mark.parametrize("items", [1, 2, 3])
def test_a_short_epoch_is_an_epoch(items: int) -> None:
    assert_node_conforms(lambda: tn.IterableWrapper(range(items)))


def test_a_node_that_begins_its_step_again_is_told_from_a_wrong_one() -> None:
    config = replace(CONFIG, resume="step", balance_window=None)

    def build() -> tn.BaseNode[Any]:
        plane = DataPlane.single()
        node: tn.BaseNode[Any] = MetadataGather(reader(plane, Dataset(), config), plane)
        return Packer(PayloadAllToAll(Planner(node, plane, config), plane, config))

    with pytest.raises(AssertionError) as caught:
        assert_node_conforms(build)
    items = len(list(build()))
    assert str(caught.value) == (
        f"restored after item 1 of {items}, {items} items came, expected {items - 1}: step 0 began again at its first "
        "micro-batch, as resume='step' says; the node may be right. Use LoaderConfig(resume='micro_batch') for this test"
    )


def test_a_node_that_loses_its_position_gets_no_such_hint() -> None:
    class Forgetful(tn.BaseNode[Any]):
        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            super().reset(initial_state)
            self._left = iter(range(3))

        def next(self) -> int:
            return next(self._left)

        def get_state(self) -> dict[str, Any]:
            return {}

    with pytest.raises(AssertionError) as caught:
        assert_node_conforms(Forgetful)
    assert str(caught.value) == "restored after item 1 of 3, 3 items came, expected 2"
