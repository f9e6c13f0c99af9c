"""A sampler names samples that its dataset has: none at all, a part too many or one of torch's is refused with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler, SubsetRandomSampler

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StepSampler, build_loader
from evenstep.sampling import TorchSamplerAdapter
from evenstep.testing import SimulatedWorld

LENGTHS = [1 + i % 5 for i in range(200)]
DATA = [{"input_ids": torch.ones(length, dtype=torch.int64)} for length in LENGTHS]
CONFIG = LoaderConfig(seq_len=64)


class Texts:
    """A dataset by index, as most are."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index % 7)}

    def __repr__(self) -> str:
        return "Texts()"


class Told(Texts):
    """One that can be iterated, too, as those of datasets are."""

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (Texts(), "Texts() (Texts), 1,200"),
        (Told(), "Texts() (Told), 1,200"),
        ([{"a": 1}] * 2, "[{'a': 1}, {'a': 1}] (list), 2"),
        (("one text", "another"), "('one text', 'another') (tuple), 2"),
        (torch.ones(2), "tensor([1., 1.]) (Tensor), 2"),
    ],
    ids=["by index", "iterable", "list", "texts", "tensor"],
)
def test_a_forgotten_sampler_is_named_on_every_rank(dataset: Any, told: str) -> None:
    message = (
        f"no sampler was given, and dataset is {told} samples by index, which make no steps by themselves: pass "
        "sampler=StepSampler(len(dataset), global_batch_size=...). Without a sampler a dataset is an iterable of local "
        "steps [[sample, ...], ...], as evenstep.nodes.StepBuilder makes them of a stream of samples."
    )

    def build(plane: DataPlane) -> None:
        steps = [[[{"input_ids": torch.ones(2)}]]]
        build_loader(steps if plane.topology.rank else dataset, plane, CONFIG)

    here, there = SimulatedWorld(2).outcomes(build)
    assert isinstance(here, TypeError)
    assert str(here) == message
    assert isinstance(there, RemoteRankError)
    assert (there.rank, there.error_type, there.error_message) == (0, "TypeError", message)


class Doubled:
    """Every second sample."""

    def index_at(self, epoch: int, positions: Any) -> Any:
        return 2 * positions + epoch


@pytest.mark.parametrize(
    ("dataset", "metadata", "message"),
    [
        (
            DATA[:90],
            None,
            "the sampler names sample 90, the dataset has 90: it would be out of range. Build the sampler over the "
            "dataset that is passed here.",
        ),
        (
            None,
            LENGTHS[:90],
            "the sampler names sample 90, metadata has 90: it would be out of range. Build the sampler over the dataset "
            "that is passed here.",
        ),
        (
            DATA,
            LENGTHS[:95],
            "metadata has 95 samples, the dataset has 200: rows would be planned with the lengths of other samples. "
            "Compute the metadata from the dataset as it is now.",
        ),
    ],
)
def test_a_part_that_the_dataset_or_its_metadata_does_not_have_is_refused(
    dataset: Any, metadata: list[int] | None, message: str
) -> None:
    class Sizeless:
        def __getitem__(self, index: int) -> Any:
            return DATA[index]

    steps = TorchSamplerAdapter(SubsetRandomSampler(range(50, 91)), global_batch_size=8)
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        build_loader(
            Sizeless() if dataset is None else dataset, None, CONFIG, sampler=steps, metadata=metadata
        )


def test_an_order_that_leaves_the_metadata_is_refused_where_it_does() -> None:
    steps = StepSampler(100, global_batch_size=100, order=Doubled())
    config = LoaderConfig(seq_len=64, empty="drop", host_prefetch=0)
    with build_loader(DATA, None, config, sampler=steps, metadata=LENGTHS) as loader:
        loader.set_epoch(2)
        message = (
            "the sampler names sample 200, metadata has 200: its length is not known. Give metadata of every sample of "
            "the dataset, or an order that stays inside it."
        )
        with pytest.raises(RemoteRankError, match=re.escape(message)):
            next(loader)


def test_a_torch_sampler_is_told_its_adapter() -> None:
    message = (
        " (SequentialSampler). A torch sampler over the whole dataset goes through evenstep.sampling.TorchSamplerAdapter, "
        "one that gives this rank its micro-batches of indices through evenstep.sampling.RankLocalBatchSampler"
    )
    chosen: Any = SequentialSampler(DATA)
    with pytest.raises(TypeError, match=f"{re.escape(message)}$"):
        build_loader(DATA, None, CONFIG, sampler=chosen)
