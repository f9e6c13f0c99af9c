"""The composed graph is the one that anybody can compose."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StepSampler, TokenBudgetSampler, build_loader
from evenstep.nodes import HostPrefetch, MetadataGather, Packer, PayloadAllToAll, Planner, SamplerReader
from evenstep.packing import collate_rows, pack_text
from evenstep.sampling import TorchSamplerAdapter
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


def test_without_an_accelerator_batches_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # as torch 2.6 does

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    with build_loader(DATA, None, replace(CONFIG, backend="nccl"), sampler=sampler()) as loader:
        assert next(loader)["input_ids"].device.type == "cpu"


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


def test_a_closed_loader_has_ended_for_good() -> None:
    loader = build_loader(DATA, None, CONFIG, sampler=sampler())
    next(loader)
    loader.close()
    assert next(iter(loader), "end") == "end"
    assert list(loader) == []


class Failing:
    """A dataset that cannot be read to its end."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("no such sample")
        return DATA[index]


@pytest.mark.parametrize("dataset", [DATA, Failing()], ids=["end", "error"])
def test_a_loader_that_is_dropped_after_its_end_or_an_error_leaves_no_thread(dataset: Any) -> None:
    before = set(threading.enumerate())

    def loop() -> None:
        loader = build_loader(dataset, None, CONFIG, sampler=sampler())
        with pytest.raises(RemoteRankError) if isinstance(dataset, Failing) else nullcontext():
            for _ in loader:
                pass

    loop()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} is still alive"


class Doubled:
    """Every second sample."""

    def index_at(self, epoch: int, positions: Any) -> Any:
        return 2 * positions + epoch


@pytest.mark.parametrize("metadata", [None, LENGTHS], ids=["read", "known"])
@pytest.mark.parametrize(
    ("order", "count"),
    [
        (SubsetRandomSampler(range(50, 90)), 40),
        (WeightedRandomSampler([1.0] * 200, 400), 400),
        (RandomSampler(range(200), num_samples=40), 40),
        (Doubled(), 80),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_part_of_the_dataset_or_more_than_all_of_it_may_be_named(
    order: Any, count: int, metadata: list[int] | None
) -> None:
    steps: StepSampler
    if isinstance(order, Doubled):
        steps = StepSampler(count, global_batch_size=8, order=order)
    else:
        steps = TorchSamplerAdapter(order, global_batch_size=8)
    config = LoaderConfig(seq_len=64, empty="drop")
    with build_loader(DATA, None, config, sampler=steps, metadata=metadata) as loader:
        assert sum(1 for _ in loader) == count
