"""The same data, plan and seed give the same batches, whichever way the data comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.nodes import PaddingRow
from evenstep.testing import SimulatedWorld, assert_same

SEQ_LEN = 16


class Dataset:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(self.lengths[index]) + 100 * index}


class LocalSteps:
    """What the sampler gives one dp rank, as its own stream of local steps."""

    def __init__(
        self, sampler: StepSampler, dataset: Dataset, plane: DataPlane, size: int, auto: bool
    ) -> None:
        self.sampler, self.dataset, self.size, self.auto = sampler, dataset, size, auto
        self.dp_rank, self.dp_size = plane.topology.dp_rank, plane.topology.dp_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        cursor = self.sampler.start().at_epoch(self.epoch)
        while (step := self.sampler.step_at(cursor)) is not None:
            cursor = step.next_cursor
            if self.auto:
                mine = np.array_split(step.indices[step.indices >= 0], self.dp_size)[self.dp_rank]
                yield [[self.dataset[int(i)]] for i in mine]
                continue
            owner = step.rows // self.size % self.dp_size
            rows = zip(step.indices[owner == self.dp_rank].tolist(), strict=True)
            yield [[self.dataset[i]] if i >= 0 else PaddingRow() for (i,) in rows]


def train(
    plane: DataPlane, graph: str, lengths: list[int], config: LoaderConfig, rows: int, rest: Any
) -> list[Any]:
    dataset = Dataset(lengths)
    sampler = StepSampler(len(lengths), global_batch_size=rows, seed=5, remainder=rest)
    if graph == "external":
        auto = config.accumulation_steps == "auto"
        source = LocalSteps(sampler, dataset, plane, config.micro_batch_size, auto)
        loader = build_loader(source, plane, config)
    else:
        metadata = None
        if graph == "metadata":
            metadata = {"tokens": np.array(lengths), "loss_tokens": np.maximum(np.array(lengths) - 1, 0)}
        loader = build_loader(dataset, plane, config, sampler=sampler, metadata=metadata)
    with loader:
        return [*loader, *loader]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_batches_are_the_same_in_every_graph(data: st.DataObject) -> None:
    dp_size = data.draw(st.sampled_from([1, 2, 3, 4]), "dp_size")
    size = data.draw(st.sampled_from([1, 2]), "micro_batch_size")
    steps = data.draw(st.integers(1, 3), "accumulation_steps")
    rows = dp_size * size * steps
    lengths = data.draw(st.lists(st.integers(0, SEQ_LEN), min_size=rows, max_size=4 * rows), "lengths")
    rest = data.draw(st.sampled_from(["drop", "wrap", "pad"]), "remainder")
    auto = data.draw(st.booleans(), "auto")
    config = LoaderConfig(
        seq_len=SEQ_LEN,
        micro_batch_size=size,
        accumulation_steps="auto" if auto else None,
        balance_window=None if auto else data.draw(st.sampled_from([None, 1, 2]), "window"),
        num_workers=data.draw(st.sampled_from([0, 2]), "num_workers"),
    )
    world = SimulatedWorld(dp_size)
    online, metadata, external = (
        world.run(train, graph, lengths, config, rows, rest) for graph in ("online", "metadata", "external")
    )
    assert_same(metadata, online, "the METADATA graph")
    assert_same(external, online, "the EXTERNAL graph")


def test_external_counts_rows_where_the_others_count_samples() -> None:
    lengths = [3, 9, 4, 16, 7, 2, 11, 5]
    config = LoaderConfig(seq_len=SEQ_LEN, host_prefetch=0)

    def state(plane: DataPlane, graph: str) -> Any:
        dataset = Dataset(lengths)
        sampler = StepSampler(8, global_batch_size=4, seed=5)
        source = LocalSteps(sampler, dataset, plane, 1, False)
        loader = (
            build_loader(source, plane, config)
            if graph == "external"
            else build_loader(dataset, plane, config, sampler=sampler)
        )
        with loader:
            for _ in range(2):
                next(loader)
            return loader.state_dict()

    world = SimulatedWorld(2)
    online, external = world.run(state, "online"), world.run(state, "external")
    for d in range(2):
        assert external[d]["source"] == {str(d): {"epoch": 0, "position": {"taken": 1}}}
        assert external[d]["consumed_samples"] == online[d]["consumed_samples"] == 4


@pytest.mark.parametrize("graph", ["online", "metadata", "external"])
def test_a_stop_anywhere_resumes_exactly(graph: str, two_epochs: Callable[[Any], Any]) -> None:
    lengths = [3, 9, 4, 16, 7, 2, 11, 5, 0, 8, 1, 13]
    config = LoaderConfig(seq_len=SEQ_LEN, balance_window=1)

    def loader_of(plane: DataPlane) -> Any:
        dataset, sampler = Dataset(lengths), StepSampler(12, global_batch_size=4, seed=5)
        if graph == "external":
            return build_loader(LocalSteps(sampler, dataset, plane, 1, False), plane, config)
        metadata = lengths if graph == "metadata" else None
        return build_loader(dataset, plane, config, sampler=sampler, metadata=metadata)

    world = SimulatedWorld(2)
    runs = world.run(lambda plane: two_epochs(loader_of(plane)))
    for cut in range(len(runs[0][1])):

        def rest(plane: DataPlane, cut: int = cut) -> list[Any]:
            with loader_of(plane) as loader:
                loader.load_state_dict(runs[plane.topology.rank][1][cut])
                return [*loader, *(loader if cut <= 6 else ())]

        begin = cut - cut % 2  # inside a step it is begun again
        for rank, batches in enumerate(world.run(rest)):
            expected = runs[rank][0][begin:]
            assert_same(batches, expected, f"rank {rank} resumed after batch {cut}")


@pytest.mark.parametrize("saved", ["online", "metadata"])
@pytest.mark.parametrize("loaded", ["online", "metadata"])
def test_a_state_goes_on_in_another_graph_on_another_number_of_ranks(saved: str, loaded: str) -> None:
    lengths = [3, 9, 4, 16, 7, 2, 11, 5, 1, 8, 6, 13] * 3

    def loader_of(plane: DataPlane, graph: str) -> Any:
        return build_loader(
            Dataset(lengths),
            plane,
            LoaderConfig(seq_len=SEQ_LEN, num_workers=1),
            sampler=StepSampler(36, global_batch_size=12, seed=5),
            metadata=lengths if graph == "metadata" else None,
            pack=lambda samples, _: [int(sample["input_ids"][0]) // 100 for sample in samples],
            collate=lambda rows: {"members": [k for row in rows if isinstance(row, list) for k in row]},
        )

    def members(batches: Any) -> list[tuple[int, int]]:
        return [(batch["info"].step, k) for batch in batches for k in batch["members"]]

    def begin(plane: DataPlane) -> tuple[Any, list[tuple[int, int]]]:
        with loader_of(plane, saved) as loader:
            for _ in range(6):
                next(loader)
            return loader.state_dict(), members(loader)

    def go_on(plane: DataPlane, state: Any) -> list[tuple[int, int]]:
        with loader_of(plane, loaded) as loader:
            loader.load_state_dict(state)
            return members(loader)

    runs = SimulatedWorld(2).run(begin)
    expected = sorted(member for _, part in runs for member in part)
    assert [step for step, _ in expected] == [1] * 12 + [2] * 12
    for ranks in (1, 3, 4):
        parts = SimulatedWorld(ranks).run(go_on, runs[0][0])
        assert sorted(member for part in parts for member in part) == expected


def test_num_workers_changes_nothing() -> None:
    lengths = [3, 9, 4, 16, 7, 2, 11, 5]
    world = SimulatedWorld(2)
    config = LoaderConfig(seq_len=SEQ_LEN)
    expected = world.run(train, "online", lengths, config, 4, "drop")
    for workers in (1, 3):
        assert_same(
            world.run(train, "online", lengths, replace(config, num_workers=workers), 4, "drop"),
            expected,
            f"{workers} threads",
        )
