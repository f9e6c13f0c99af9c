"""Streams that make their own steps: balanced, resumed exactly on as many ranks, refused by name otherwise."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep import DataPlane, LoaderConfig, build_loader
from evenstep.nodes import StepBuilder
from evenstep.sampling import RankLocalBatchSampler
from evenstep.testing import SimulatedWorld, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own

CONFIG = LoaderConfig(seq_len=512, balance_window=2)
ROWS = 4


class Documents:
    """A rank's share of the corpus, as its own stream."""

    def __init__(self, corpus: Any, dp_rank: int, dp_size: int) -> None:
        self.samples = [corpus[k] for k in range(dp_rank, len(corpus), dp_size)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Steps(IterableDataset[Any]):
    """Local steps of the same documents, one a row."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[Any]:
        rows = [[d] for d in self.documents]
        return iter([rows[k : k + ROWS] for k in range(0, len(rows) - ROWS + 1, ROWS)])


class Resumable(Steps):
    """The same with a position of its own, as many streams have."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        steps = list(super().__iter__())
        while self.position < len(steps):
            self.position += 1
            yield steps[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def first(batch: Any) -> Any:
    return batch[0]


SOURCES: dict[str, Callable[[Documents], Any]] = {
    "iterable": Steps,
    "stateful iterable": Resumable,
    "StatefulDataLoader": lambda documents: StatefulDataLoader(Steps(documents), batch_size=None),
    "shuffling StatefulDataLoader": lambda documents: StatefulDataLoader(
        documents,  # type: ignore[arg-type]
        batch_size=ROWS,
        shuffle=True,
        drop_last=True,
        collate_fn=list,
        generator=torch.Generator().manual_seed(3),
    ),
    "nodes": lambda documents: tn.Batcher(tn.IterableWrapper(documents), ROWS),
    "StepBuilder": lambda documents: StepBuilder(documents, 512, ROWS, look_ahead=6),
    "StepBuilder over nodes": lambda documents: StepBuilder(tn.IterableWrapper(documents), 512, ROWS),
}


def loader_of(plane: DataPlane, corpus: Any, kind: str, config: LoaderConfig = CONFIG) -> Any:
    topology = plane.topology
    documents = Documents(corpus, topology.dp_rank, topology.dp_size)
    return build_loader(SOURCES[kind](documents), plane, config)


@pytest.mark.parametrize("kind", SOURCES)
def test_any_source_is_balanced_and_resumes_exactly(
    corpus: Any, kind: str, two_epochs: Callable[[Any], Any]
) -> None:
    world = SimulatedWorld(2)
    runs = world.run(lambda plane: two_epochs(loader_of(plane, corpus, kind)))
    counts = {len(batches) for batches, _ in runs}
    assert len(counts) == 1
    per_epoch = counts.pop() // 2
    assert per_epoch >= 10 * ROWS // 2
    for state in runs[1][1]:
        assert set(state["source"]) == {"1"}
    for cut in (0, 1, 4, per_epoch, per_epoch + 8):

        def rest(plane: DataPlane, cut: int = cut) -> list[Any]:
            with loader_of(plane, corpus, kind) as loader:
                loader.load_state_dict(copy.deepcopy(runs[plane.topology.rank][1][cut]))
                again = loader.state_dict()
                assert_same(again, runs[plane.topology.rank][1][cut], "the state that was loaded")
                batches = list(loader)
                return batches if cut > per_epoch else batches + list(loader)

        begin = cut - cut % ROWS
        for rank, batches in enumerate(world.run(rest)):
            assert_same(batches, runs[rank][0][begin:], f"{kind}: rank {rank} after batch {cut}")


def test_every_document_of_a_built_stream_is_trained_on_once(corpus: Any, documents_in: Any) -> None:
    def rank(plane: DataPlane) -> list[Any]:
        with loader_of(plane, corpus, "StepBuilder") as loader:
            return list(loader)

    found: Counter[Any] = sum((documents_in(batches) for batches in SimulatedWorld(2).run(rank)), Counter())
    expected = Counter(tuple(corpus[k]["input_ids"].tolist()) for k in range(len(corpus)))
    padding = {key: number for key, number in found.items() if key not in expected}
    assert {key: found[key] for key in expected} == dict(expected)
    assert all(set(key) == {0} for key in padding)


def test_a_rank_local_batch_sampler_reads_its_dataset(corpus: Any, documents_in: Any) -> None:
    def rank(plane: DataPlane, stop: int | None = None, state: Any = None) -> tuple[list[Any], Any]:
        topology = plane.topology
        mine = [[k, k + 1] for k in range(2 * topology.dp_rank, len(corpus) - 1, 2 * topology.dp_size)]
        sampler = RankLocalBatchSampler(mine, accumulation_steps=3, global_batch_size=12)
        config = LoaderConfig(seq_len=512, micro_batch_size=2, num_workers=2)
        with build_loader(corpus, plane, config, sampler=sampler) as loader:
            if state is not None:
                loader.load_state_dict(state[topology.rank])
            batches = []
            for batch in loader:
                batches.append(batch)
                if len(batches) == stop:
                    break
            return batches, loader.state_dict()

    world = SimulatedWorld(2)
    whole = world.run(rank)
    part = world.run(rank, 6)
    assert json.loads(json.dumps(part[1][1])) == part[1][1]
    rest = world.run(rank, None, [state for _, state in part])
    for r in range(2):
        assert len(whole[r][0]) == 24
        assert_same(part[r][0] + rest[r][0], whole[r][0])
    seen: Counter[Any] = sum((documents_in(batches) for batches, _ in whole), Counter())
    assert sum(n for key, n in seen.items() if set(key) != {0}) == 96


def test_auto_packs_each_step_into_as_few_micro_batches_as_fit(corpus: Any) -> None:
    config = LoaderConfig(seq_len=2048, accumulation_steps="auto")

    def rank(plane: DataPlane) -> list[Any]:
        with loader_of(plane, corpus, "iterable", config) as loader:
            return [(b["info"].step, b["info"].num_micro_batches, b["info"].num_samples) for b in loader]

    results = SimulatedWorld(2).run(rank)
    by_step: Counter[int] = Counter()
    for batches in results:
        for step, _, samples in batches:
            by_step[step] += samples
    assert set(by_step.values()) == {2 * ROWS}
    assert [b[:2] for b in results[0]] == [b[:2] for b in results[1]]


def test_model_parallel_peers_receive_the_batches_and_the_state(corpus: Any) -> None:
    def rank(plane: DataPlane, state: Any = None) -> tuple[list[Any], Any]:
        topology = plane.topology
        source = Steps(Documents(corpus, topology.dp_rank, 2)) if plane.is_constructor else None
        with build_loader(source, plane, CONFIG) as loader:
            if state is not None:
                loader.load_state_dict(state[topology.rank])
                return list(loader), None
            batches = [next(loader) for _ in range(ROWS)]
            return batches, loader.state_dict()

    world = SimulatedWorld({"dp": 2, "tp": 2})
    results = world.run(rank)
    for d in range(2):
        assert_same(results[2 * d + 1], results[2 * d])
        assert set(results[2 * d + 1][1]["source"]) == {str(d)}
    rest = world.run(rank, [state for _, state in results])
    assert_same(rest[1][0], rest[0][0])
    assert len(rest[0][0]) == len(corpus) // 2 - ROWS


def test_epochs_reach_the_source(corpus: Any, documents_in: Any) -> None:
    class Shuffled(Steps):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            order = np.random.default_rng(self.epoch).permutation(len(self.documents))
            rows = [[self.documents[int(k)]] for k in order]
            return iter([rows[k : k + ROWS] for k in range(0, len(rows), ROWS)])

    def epochs(state: Any = None, skip: int = 0) -> tuple[list[Any], Any]:
        with build_loader(Shuffled(Documents(corpus, 0, 1)), None, LoaderConfig(seq_len=512)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            elif skip:
                loader.set_epoch(skip)
            return list(loader), loader.state_dict()

    first_epoch, end = epochs()
    assert end["epoch"] == 0
    second, _ = epochs(skip=1)
    with build_loader(Shuffled(Documents(corpus, 0, 1)), None, LoaderConfig(seq_len=512)) as loader:
        loader.load_state_dict(end)
        assert list(loader) == []
        assert_same([{**b, "info": 0} for b in loader], [{**b, "info": 0} for b in second])
    assert documents_in(first_epoch) == documents_in(second)
