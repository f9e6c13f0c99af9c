"""The composed graph is the one that anybody can compose."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torchdata.nodes as tn

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StepSampler, TokenBudgetSampler, build_loader
from evenstep.nodes import HostPrefetch, MetadataGather, Packer, PayloadAllToAll, Planner, SamplerReader
from evenstep.packing import collate_rows, pack_text
from evenstep.testing import SimulatedWorld, assert_same

LENGTHS = [(7 * i) % 61 for i in range(200)]
DATA = [{"input_ids": torch.arange(i, i + n)} for i, n in enumerate(LENGTHS)]
CONFIG = LoaderConfig(seq_len=64, micro_batch_size=1, balance_window=2)


def sampler() -> TokenBudgetSampler:
    return TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=64, seed=5)


def by_hand(plane: DataPlane) -> tn.BaseNode[Any]:
    node: tn.BaseNode[Any] = SamplerReader(sampler(), DATA, plane, CONFIG)
    node = PayloadAllToAll(Planner(MetadataGather(node, plane), plane, CONFIG), plane, CONFIG)
    return HostPrefetch(Packer(node, pack_text, collate_rows), 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_composed_by_hand_under_the_stock_loader_gives_the_same_batches(ranks: int) -> None:
    world = SimulatedWorld(ranks)

    def stock(plane: DataPlane) -> list[Any]:
        loader = tn.Loader(by_hand(plane))
        return [list(loader), list(loader)]

    def built(plane: DataPlane) -> list[Any]:
        with build_loader(DATA, plane, CONFIG, sampler=sampler()) as loader:
            return [list(loader), list(loader)]

    expected = world.run(stock)
    assert len(expected[0][0]) > 4
    assert_same(world.run(built), expected)


def test_a_global_batch_that_the_mesh_does_not_divide_is_refused_on_every_rank() -> None:
    def build(plane: DataPlane) -> None:
        build_loader(
            DATA,
            plane,
            LoaderConfig(seq_len=64, micro_batch_size=2),
            sampler=StepSampler(200, global_batch_size=9),
        )

    message = (
        "the sampler makes steps of 9 rows, which micro_batch_size=2 x 2 data-parallel ranks = 4 does not divide: "
        "ranks would take different numbers of micro-batches. Choose a global batch that is a multiple of 4."
    )
    for outcome in SimulatedWorld(2).outcomes(build):
        assert isinstance(outcome, ValueError)
        assert str(outcome) == message


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": {"seq_len": 4}}, TypeError, "config is dict {'seq_len': 4}, expected a LoaderConfig"),
        ({"dataset": DATA[:-1]}, ValueError, "the sampler was made for 200 samples, the dataset has 199"),
        ({"dataset": []}, ValueError, "the dataset is empty: there is nothing to train on"),
        ({"dataset": None}, ValueError, "dataset=None, but rank 0 reads samples; pass the dataset here"),
        ({"pack": 3}, TypeError, "pack is 3, expected a function"),
        (
            {"metadata": [1.5] * 200},
            TypeError,
            "metadata column 'tokens' has shape (200,) and dtype float64, expected one integer per sample",
        ),
        ({"start": {"epoch": 1}}, TypeError, "start is {'epoch': 1}, expected an evenstep.Cursor"),
    ],
)
def test_bad_input_is_refused_when_the_loader_is_built(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "dataset": DATA,
        "mesh": None,
        "config": CONFIG,
        "sampler": sampler(),
        **change,
    }
    with pytest.raises(error, match="^" + re.escape(message)):
        build_loader(**arguments)


def test_an_argument_that_is_wrong_on_one_rank_is_told_on_all() -> None:
    def build(plane: DataPlane) -> None:
        build_loader(DATA if plane.topology.rank else None, plane, CONFIG, sampler=sampler())

    first, second = SimulatedWorld(2).outcomes(build)
    assert str(first) == "dataset=None, but rank 0 reads samples; pass the dataset here"
    assert isinstance(second, RemoteRankError)
    assert str(second) == f"rank 0 could not build its loader: ValueError: {first}"


def test_a_loop_that_counts_batches_and_never_meets_the_end_gets_the_next_epoch() -> None:
    with (
        build_loader(DATA, None, CONFIG, sampler=sampler()) as loader,
        build_loader(DATA, None, CONFIG, sampler=sampler()) as met,
    ):
        for epoch in range(3):
            expected = list(met)
            batches = iter(loader)
            counted = [next(batches) for _ in range(len(expected))]
            assert_same(counted, expected, f"epoch {epoch}")


def test_a_state_of_an_epochs_end_restores_to_that_end() -> None:
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as loader:
        list(loader)
        end, second = loader.state_dict(), list(loader)
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as restored:
        restored.load_state_dict(end)
        assert list(restored) == []
        assert_same(list(restored), second)
