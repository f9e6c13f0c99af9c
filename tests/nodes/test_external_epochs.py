"""Epochs of sources that keep a position of their own: each as long as the first, wherever the last was left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from evenstep import DataPlane, LoaderConfig, build_loader
from evenstep.nodes import ExternalStepReader, StepBuilder
from evenstep.sampling import RankLocalBatchSampler

EPOCHS = 3
SAMPLES = 8


class Numbers(Dataset[Any]):
    """Sample i holds the number i + 1."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([index + 1])}


class Keeping(IterableDataset[Any]):
    """Keeps its position until it has been exhausted, as torchdata's protocol for stateful datasets has it."""

    def __init__(self, make: Callable[[int, int], Any], size: int = SAMPLES) -> None:
        self.make, self.size = make, size
        self.position = self.epoch = self.pulled = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.size:
            self.position += 1
            self.pulled += 1
            yield self.make(self.epoch, self.position)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.epoch = state["position"], state["epoch"]


class Lazy(Keeping):
    """Goes where it was told only once it is iterated, as torchdata's sampler does."""

    next_position: int | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.next_position is not None:
            self.position, self.next_position = self.next_position, None
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_position, self.epoch = state["position"], state["epoch"]


class Distributed:
    """Torchdata's sampler in micro-batches of two."""

    def __init__(self) -> None:
        self.sampler = StatefulDistributedSampler(Numbers(), num_replicas=1, rank=0)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        return iter(lambda: list(itertools.islice(indices, 2)), [])

    def state_dict(self) -> Any:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.sampler.load_state_dict(state)


def sample(epoch: int, position: int) -> dict[str, Any]:
    return {"input_ids": torch.tensor([100 * epoch + position])}


def step(epoch: int, position: int) -> list[Any]:
    return [[sample(epoch, position)]]


def two_rows(epoch: int, position: int) -> list[Any]:
    return step(epoch, 2 * position - 1) + step(epoch, 2 * position)


def micro_batch(epoch: int, position: int) -> list[int]:
    return [2 * (position - 1) + epoch % 2]


def as_step(samples: list[Any]) -> list[Any]:
    return [[one] for one in samples]


def rank_local(batches: Any, accumulation_steps: int) -> RankLocalBatchSampler:
    return RankLocalBatchSampler(batches, accumulation_steps=accumulation_steps, global_batch_size=4)


def loader_of(kind: str, host_prefetch: int | None) -> Any:
    sources: dict[str, Callable[[], Any]] = {
        "steps": lambda: Keeping(step),
        "lazy": lambda: Lazy(two_rows),
        "samples": lambda: StepBuilder(Keeping(sample), seq_len=2, rows=2, look_ahead=1),
        "dataset": lambda: StatefulDataLoader(Keeping(sample), batch_size=2, collate_fn=as_step),
        "shuffled": lambda: StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, collate_fn=as_step),
        "micro-batches": lambda: rank_local(Keeping(micro_batch, 4), 2),
        "a remainder": lambda: rank_local(Keeping(micro_batch, 4), 4),
        "distributed": lambda: rank_local(Distributed(), 2),
    }
    source = sources[kind]()
    config = LoaderConfig(seq_len=2, host_prefetch=host_prefetch)
    if isinstance(source, RankLocalBatchSampler):
        return build_loader(Numbers(), None, config, sampler=source)
    return build_loader(source, None, config)


KINDS = ["steps", "lazy", "samples", "dataset", "shuffled", "micro-batches", "a remainder", "distributed"]


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["input_ids"][batch["input_ids"] > 0].tolist()
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("host_prefetch", [0, None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_is_as_long_as_the_first_also_after_a_resume_anywhere(
    kind: str, host_prefetch: int | None
) -> None:
    torch.manual_seed(0)
    epochs, states = [], []
    with loader_of(kind, host_prefetch) as loader:
        for epoch in range(EPOCHS):
            batches: list[list[int]] = []
            for batch in loader:
                batches.append(numbers(batch))
                state = loader.state_dict()
                if not state["micro_batch"]:
                    states.append((epoch, len(batches), state))
            epochs.append(batches)
    assert epochs[0]
    assert len({len(batches) for batches in epochs}) == 1
    if kind != "a remainder":
        assert len({len(set(itertools.chain(*batches))) for batches in epochs}) == 1
    for epoch, taken, state in states:
        with loader_of(kind, host_prefetch) as loader:
            loader.load_state_dict(state)
            resumed = [[numbers(batch) for batch in loader] for _ in range(epoch, EPOCHS)]
        assert resumed[0] == epochs[epoch][taken:]
        if kind == "shuffled":  # torch draws the seed of an epoch anew
            assert [len(batches) for batches in resumed[1:]] == [len(epochs[0])] * (EPOCHS - epoch - 1)
        else:
            assert resumed[1:] == epochs[epoch + 1 :]


@pytest.mark.parametrize("kind", ["lazy", "samples", "micro-batches", "distributed"])
def test_a_state_taken_inside_the_first_step_after_a_resume_is_one_too(kind: str) -> None:
    with loader_of(kind, 0) as loader:
        batches = [numbers(next(loader)) for _ in range(2)]
        state = loader.state_dict()
        batches += [numbers(batch) for batch in loader]
    with loader_of(kind, 0) as loader:
        loader.load_state_dict(state)
        assert numbers(next(loader)) == batches[2]
        inside = loader.state_dict()
    assert inside["micro_batch"] == 1
    with loader_of(kind, 0) as loader:
        loader.load_state_dict(inside)
        assert [numbers(batch) for batch in loader] == batches[2:]


@pytest.mark.parametrize("size", [4, 10**12])
def test_an_epoch_left_in_its_middle_is_followed_by_a_whole_one(size: int) -> None:
    source = Keeping(step, size)
    reader = ExternalStepReader(source, DataPlane.single(), LoaderConfig(seq_len=2))
    reader.reset(None)
    for _ in range(2):
        next(reader)
    reader.reset(None)
    found = [window.samples[0]["input_ids"].item() for window in itertools.islice(reader, 4)]
    assert found == [101, 102, 103, 104]
    assert source.pulled < 10  # what was left of the epoch was not read


def test_one_begun_by_nobody_here_is_read_to_its_end() -> None:
    config = LoaderConfig(seq_len=2)
    first = ExternalStepReader(Keeping(step, 4), DataPlane.single(), config)
    first.reset(None)
    next(first)
    source = Keeping(step, 4)
    reader = ExternalStepReader(source, DataPlane.single(), config)
    reader.reset(first.state_dict())
    reader.reset(None)
    assert [window.samples[0]["input_ids"].item() for window in reader] == [101, 102, 103, 104]


@pytest.mark.parametrize("sized", [True, False])
def test_a_batch_sampler_left_in_its_middle_begins_again(sized: bool) -> None:
    batches: Any = Keeping(micro_batch, 4 if sized else 10**12)
    if sized:
        batches = type("Sized", (Keeping,), {"__len__": lambda self: self.size})(micro_batch, 4)
    source = rank_local(batches, 2)
    cursor = source.start()
    first = source.local_step(cursor)
    assert first is not None
    following = source.local_step(first.next_cursor.at_epoch(1))
    assert following is not None
    assert [batch.tolist() for batch in following.micro_batches] == [[1], [3]]


def test_a_later_epoch_is_begun_without_reading_those_before_it() -> None:
    source = Keeping(step, 1000)
    with build_loader(source, None, LoaderConfig(seq_len=2, host_prefetch=0)) as loader:
        loader.set_epoch(5)
        assert numbers(next(loader)) == [501]
    assert source.pulled < 10


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shuffled"])
def test_a_restored_end_goes_on_with_any_epoch(kind: str) -> None:
    with loader_of(kind, None) as loader:
        epochs = [[numbers(batch) for batch in loader] for _ in range(3)]
    with loader_of(kind, None) as loader:
        inside = [loader.state_dict() for _ in loader][-1]
        end = loader.state_dict()
    assert "ended" not in inside["source"]["0"]
    assert end["source"] == {"0": {**inside["source"]["0"], "ended": True}}
    assert {key: end[key] for key in end if key != "source"} == {
        key: inside[key] for key in inside if key != "source"
    }
    with loader_of(kind, None) as loader:
        loader.load_state_dict(end)
        assert loader.state_dict() == end
        loader.set_epoch(2)
        assert [numbers(batch) for batch in loader] == epochs[2]
    with loader_of(kind, None) as loader:
        loader.load_state_dict(end)
        assert list(loader) == []
        assert loader.state_dict() == end
        assert [numbers(batch) for batch in loader] == epochs[1]
    with loader_of(kind, None) as loader:
        loader.restart_on_stop_iteration = True
        loader.load_state_dict(end)
        assert [numbers(batch) for batch in loader] == epochs[1]
    with loader_of(kind, None) as loader:
        loader.load_state_dict(inside)
        with pytest.raises(RuntimeError, match=r"^set_epoch\(1\) in the middle of epoch 0 "):
            loader.set_epoch(1)
