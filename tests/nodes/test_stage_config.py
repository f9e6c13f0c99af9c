"""A graph says its configuration once: stages behind the reader find it there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torchdata.nodes as tn

from evenstep import DataPlane, LoaderConfig, StepSampler
from evenstep.nodes import MetadataGather, PayloadAllToAll, PlannedReader, Planner, SamplerReader
from evenstep.testing import SimulatedWorld, assert_same

LENGTHS = [3, 5, 2, 7, 1, 4, 6, 2, 8, 1, 8, 3]
DATA = [{"input_ids": torch.arange(100 * i, 100 * i + n)} for i, n in enumerate(LENGTHS)]
CONFIG = LoaderConfig(seq_len=8, micro_batch_size=2, balance_window=1)


@pytest.mark.parametrize("known", [False, True])
def test_stages_take_the_configuration_of_the_nearest_node_upstream(known: bool) -> None:
    def rank(plane: DataPlane, told: tuple[Any, ...]) -> list[Any]:
        metadata = LENGTHS if known else None
        sampler = StepSampler(len(DATA), global_batch_size=4)
        node: tn.BaseNode[Any] = SamplerReader(sampler, DATA, plane, CONFIG, metadata=metadata)
        if known:
            node = PlannedReader(Planner(node, plane, *told), DATA, plane, *told)
        else:
            node = PayloadAllToAll(Planner(MetadataGather(node, plane), plane, *told), plane, *told)
        return [(routed.rows, routed.info) for routed in tn.Loader(node)]

    world = SimulatedWorld(2)
    assert_same(world.run(rank, ()), world.run(rank, (CONFIG,)))


@pytest.mark.parametrize("stage", [Planner, PayloadAllToAll])
def test_a_graph_without_any_is_told_so(stage: Any) -> None:
    message = "no node that IterableWrapper pulls from has a LoaderConfig: pass one, config=LoaderConfig(seq_len=...)"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        stage(tn.IterableWrapper([]), DataPlane.single())
