"""Streams that make their own steps: balanced, resumed exactly on as many ranks, refused by name otherwise."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StateMismatch, build_loader
from evenstep.nodes import ExternalStepReader, MetadataGather, PaddingRow, StepBuilder
from evenstep.nodes.stage import upstream
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


def tokens(batches: list[Any]) -> Counter[tuple[int, ...]]:
    """Which documents were trained on."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        for row, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
            starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(row)]
            found.update(tuple(row[a:b].tolist()) for a, b in pairwise(starts))
    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_any_source_is_balanced_and_resumes_exactly(corpus: Any, kind: str) -> None:
    world = SimulatedWorld(2)

    def whole(plane: DataPlane) -> tuple[list[Any], list[Any]]:
        batches, states = [], []
        with loader_of(plane, corpus, kind) as loader:
            states.append(loader.state_dict())
            for _epoch in range(2):
                for batch in loader:
                    batches.append(batch)
                    states.append(loader.state_dict())
        return batches, states

    runs = world.run(whole)
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


def test_every_document_of_a_built_stream_is_trained_on_once(corpus: Any) -> None:
    def rank(plane: DataPlane) -> list[Any]:
        with loader_of(plane, corpus, "StepBuilder") as loader:
            return list(loader)

    found = sum((tokens(batches) for batches in SimulatedWorld(2).run(rank)), Counter())
    expected = Counter(tuple(corpus[k]["input_ids"].tolist()) for k in range(len(corpus)))
    padding = {key: number for key, number in found.items() if key not in expected}
    assert {key: found[key] for key in expected} == dict(expected)
    assert all(set(key) == {0} for key in padding)


def test_a_rank_local_batch_sampler_reads_its_dataset(corpus: Any) -> None:
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
    seen = sum((tokens(batches) for batches, _ in whole), Counter())
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


def test_another_number_of_ranks_is_refused_when_the_state_is_loaded(corpus: Any) -> None:
    def save(plane: DataPlane) -> Any:
        with loader_of(plane, corpus, "iterable") as loader:
            next(loader)
            return loader.state_dict()

    def load(plane: DataPlane, states: Any) -> None:
        with loader_of(plane, corpus, "iterable") as loader:
            loader.load_state_dict(states[0])

    states = SimulatedWorld(2).run(save)
    for outcome in SimulatedWorld(3).outcomes(load, states):
        assert isinstance(outcome, StateMismatch)
        assert str(outcome) == (
            "the state was saved on 2 data-parallel ranks, this loader has 3: each position of an external source "
            "belongs to one rank. Resume on as many ranks, or give the source reshard(states, dp_rank, dp_size)."
        )


def test_the_position_of_another_rank_is_refused(corpus: Any) -> None:
    def save(plane: DataPlane) -> Any:
        with loader_of(plane, corpus, "iterable") as loader:
            next(loader)
            return loader.state_dict()

    states = SimulatedWorld(2).run(save)

    def load(plane: DataPlane) -> None:
        with loader_of(plane, corpus, "iterable") as loader:
            loader.load_state_dict(states[0])  # as if the checkpoint had kept one copy for all
            next(loader)

    outcomes = SimulatedWorld(2).outcomes(load)
    assert str(outcomes[1]).startswith(
        "the state has positions of the external sources of dp ranks ['0'], not of this rank's (1)"
    )


def test_a_source_that_can_be_resharded_goes_to_any_number_of_ranks(corpus: Any) -> None:
    class Shared:
        """All ranks step through one list of documents together."""

        def __init__(self, plane: DataPlane) -> None:
            self.rank, self.size = plane.topology.dp_rank, plane.topology.dp_size
            self.position = 0

        def __iter__(self) -> Iterator[Any]:
            while self.position + self.size <= len(corpus):
                self.position += self.size
                yield [[corpus[self.position - self.size + self.rank]]]

        def state_dict(self) -> Any:
            return {"position": self.position}

        def load_state_dict(self, state: Any) -> None:
            self.position = state["position"]

        def reshard(self, states: dict[int, Any], dp_rank: int, dp_size: int) -> Any:
            assert sorted(states) == [0, 1]
            assert dp_size == 3
            assert dp_rank == self.rank
            return states[0]

    def save(plane: DataPlane) -> Any:
        with build_loader(Shared(plane), plane, LoaderConfig(seq_len=512)) as loader:
            next(loader)
            next(loader)
            return loader.state_dict()

    states = SimulatedWorld(2).run(save)
    merged = {**states[0], "source": {**states[0]["source"], **states[1]["source"]}}

    def load(plane: DataPlane, state: Any) -> list[Any]:
        with build_loader(Shared(plane), plane, LoaderConfig(seq_len=512)) as loader:
            loader.load_state_dict(state)
            return list(loader)

    found = sum((tokens(batches) for batches in SimulatedWorld(3).run(load, merged)), Counter())
    expected = Counter(tuple(corpus[k]["input_ids"].tolist()) for k in range(4, 94))
    assert {key: n for key, n in found.items() if set(key) != {0}} == dict(expected)
    outcomes = SimulatedWorld(3).outcomes(load, states[0])
    assert "the source needs the states of all old ranks, those of 1 are missing" in str(outcomes[0])


@pytest.mark.parametrize("host_prefetch", [0, None])
def test_uneven_ends_follow_the_policy(corpus: Any, host_prefetch: int | None) -> None:
    class Shorter(Steps):
        def __iter__(self) -> Iterator[Any]:
            return iter(list(super().__iter__())[: 2 if self.documents.rank else 5])  # type: ignore[attr-defined]

    def rank(plane: DataPlane, policy: Any) -> tuple[int, int, int]:
        documents = Documents(corpus, plane.topology.dp_rank, 2)
        documents.rank = plane.topology.dp_rank  # type: ignore[attr-defined]
        config = LoaderConfig(seq_len=512, uneven=policy, host_prefetch=host_prefetch)
        with build_loader(Shorter(documents), plane, config) as loader:
            gather = next(node for node in upstream(loader.root) if isinstance(node, MetadataGather))
            return len(list(loader)), len(list(loader)), gather.left_out

    world = SimulatedWorld(2)
    longer, shorter = world.run(rank, "stop")
    assert longer[:2] == shorter[:2] == (2 * ROWS, 2 * ROWS)
    assert longer[2] > 0  # the third step of each epoch, which only rank 0 had
    assert shorter[2] == 0
    for outcome in world.outcomes(rank, "error"):
        assert isinstance(outcome, RemoteRankError)
        assert str(outcome) == (
            "the stream of rank 1 has ended while rank 0 still has data: the ranks would take different numbers of "
            "steps. Give every rank the same number of steps, or choose uneven='stop'."
        )


def test_a_failing_stream_is_told_on_every_rank(corpus: Any) -> None:
    class Failing(Steps):
        def __iter__(self) -> Iterator[Any]:
            yield from list(super().__iter__())[:3]
            raise OSError("the archive is cut off")

    def rank(plane: DataPlane, got: list[int]) -> None:
        documents = Documents(corpus, plane.topology.dp_rank, 2)
        source = Failing(documents) if plane.topology.rank else Steps(documents)
        with build_loader(source, plane, LoaderConfig(seq_len=512)) as loader:
            for _ in loader:
                got[plane.topology.rank] += 1

    got = [0, 0]
    for outcome in SimulatedWorld(2).outcomes(rank, got):
        assert isinstance(outcome, RemoteRankError)
        assert (outcome.rank, outcome.error_type, outcome.error_message) == (
            1,
            "OSError",
            "the archive is cut off",
        )
    assert got == [3 * ROWS] * 2


def test_a_corrupt_sample_of_a_stream_is_skipped_or_named(corpus: Any) -> None:
    def rank(plane: DataPlane, policy: Any) -> int:
        steps = [[[{"input_ids": [1, 2]}], [{"text": "no tokens"}, {"input_ids": [3]}]]]
        config = LoaderConfig(seq_len=8, on_sample_error=policy)
        with build_loader(steps, plane, config) as loader:
            return sum(batch["info"].num_tokens for batch in loader)

    assert SimulatedWorld(2).run(rank, "skip") == [3, 3]
    for outcome in SimulatedWorld(2).outcomes(rank, "raise"):
        assert outcome.sample == 1
        assert outcome.error_message.startswith(
            "a sample of type dict without 'input_ids' says nothing of its length"
        )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[]], "the external source gave a step of 0 rows, which micro_batch_size=2 does not divide"),
        (
            [[[], [], []]],
            "the external source gave a step of 3 rows, which micro_batch_size=2 does not divide",
        ),
        (
            [[{"input_ids": [1]}] * 2, [{"input_ids": [1]}] * 4],
            "the external source gave a step of 4 rows after steps of 2: ranks would take different numbers of "
            "micro-batches.",
        ),
        (
            [[[{"input_ids": [1]}] * 3, []]],
            "rank 0: the external source gave 0 samples for row 1 of a step of 2 rows, expected one or more in each: an "
            "empty row would train on padding alone. If that is meant, put evenstep.nodes.PaddingRow() there.",
        ),
        (
            [{"input_ids": [1]}],
            "the external source gave a dict, expected a local step: a list of rows, each a list of samples.",
        ),
    ],
)
def test_odd_steps_are_refused(steps: Any, message: str) -> None:
    config = LoaderConfig(seq_len=8, micro_batch_size=2)
    with (
        build_loader(steps, None, config) as loader,
        pytest.raises(RemoteRankError, match=re.escape(message)),
    ):
        list(loader)


def test_every_rank_hears_of_an_empty_row_and_a_row_of_padding_is_none() -> None:
    def body(plane: DataPlane, empty: list[Any]) -> list[int]:
        last = empty if plane.topology.rank == 1 else [{"input_ids": [3]}]
        steps = [[[{"input_ids": [1, 2]}], [{"input_ids": [3]}]], [[{"input_ids": [4]}], last]]
        with build_loader(steps, plane, LoaderConfig(seq_len=8)) as loader:
            return [batch["info"].num_tokens for batch in loader]

    assert sum(map(sum, SimulatedWorld(2).run(body, PaddingRow()))) == 9
    for outcome in SimulatedWorld(2).outcomes(body, []):
        assert outcome.rank == 1
        assert outcome.error_message == (
            "rank 1: the external source gave 0 samples for row 1 of a step of 2 rows, expected one or more in each: an "
            "empty row would train on padding alone. If that is meant, put evenstep.nodes.PaddingRow() there."
        )


def test_a_state_that_no_checkpoint_can_hold_names_its_key() -> None:
    class Locked(Resumable):
        def state_dict(self) -> Any:
            return {"inner": [{"lock": threading.Lock()}]}

    reader = ExternalStepReader(Locked(Documents([], 0, 1)), DataPlane.single(), CONFIG)
    with pytest.raises(TypeError, match=re.escape("the source's state['inner'][0]['lock'] is <unlocked")):
        reader.state_dict()


def test_a_state_of_a_dataset_is_refused_and_the_other_way_round(corpus: Any) -> None:
    from evenstep import StepSampler

    sampler = StepSampler(len(corpus), global_batch_size=8)
    over_dataset = build_loader(corpus, None, LoaderConfig(seq_len=512), sampler=sampler)
    next(over_dataset)
    external = loader_of(DataPlane.single(), corpus, "iterable")
    next(external)
    with pytest.raises(
        StateMismatch, match=re.escape("the state was saved with dataset_size=96, this loader has")
    ):
        external.load_state_dict(over_dataset.state_dict())
    with pytest.raises((StateMismatch, ValueError)):
        over_dataset.load_state_dict(external.state_dict())
    over_dataset.close()
    external.close()


def test_only_constructors_read() -> None:
    config = LoaderConfig(seq_len=8)
    world = SimulatedWorld({"dp": 2, "tp": 2}, reader_ranks="all")
    outcomes = world.outcomes(lambda plane: build_loader([], plane, config))
    assert str(outcomes[0]) == (
        "external steps are read by the constructors (0, 2) alone, but the ranks (0, 1, 2, 3) would read or plan: leave "
        "reader_ranks and planner_rank at None"
    )


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


def test_epochs_reach_the_source(corpus: Any) -> None:
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
    assert tokens(first_epoch) == tokens(second)
