"""Torch samplers as functions of the cursor: the same order each time, whatever they keep themselves."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from evenstep.cursor import Cursor
from evenstep.sampling import TorchSamplerAdapter

N = 20
legacy: Any = np.random  # samplers still draw from NumPy's global state
DATASET: Any = range(N)


class Stateful:
    """Keeps its own position and its own random state, like samplers that resume by themselves."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.yielded = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        self.random.shuffle(order)
        for index in order[self.yielded :]:
            self.yielded += 1
            yield index
        self.yielded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])
        self.yielded = state["yielded"]


class Global:
    """Draws from every global random state there is."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        for i in range(N):
            yield (i * 1000 + random.randrange(5) + 10 * legacy.randint(5) + 100 * int(torch.randint(5, ())))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Replicas: Any = StatefulDistributedSampler
Torchdata: Any = TorchdataRandomSampler
SAMPLERS: dict[str, Callable[[int], Iterable[int]]] = {
    "sequential": lambda _: SequentialSampler(range(N)),
    "random": lambda _: RandomSampler(range(N)),
    "random with generator": lambda seed: RandomSampler(range(N), generator=generator(seed)),
    "subset": lambda seed: SubsetRandomSampler(range(5, 15), generator=generator(seed)),
    "weighted": lambda _: WeightedRandomSampler([1.0, 2.0, 3.0], 50),
    "distributed": lambda seed: DistributedSampler(DATASET, num_replicas=1, rank=0, seed=seed),
    "stateful": Stateful,
    "torchdata distributed": lambda seed: Replicas(DATASET, num_replicas=1, rank=0, seed=seed),
    "torchdata random with generator": lambda seed: Torchdata(DATASET, generator=generator(seed)),
    "global": Global,
    "list": lambda _: [3, 1, 2, 0],
}


def order_of(adapter: TorchSamplerAdapter, epoch: int) -> list[int]:
    cursor, seen = adapter.start().at_epoch(epoch), list[int]()
    while (step := adapter.step_at(cursor)) is not None:
        seen += step.indices[step.indices >= 0].tolist()
        cursor = step.next_cursor
    return seen


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_epoch_has_one_order_however_it_is_reached(name: str) -> None:
    build = SAMPLERS[name]
    reference = TorchSamplerAdapter(build(1), global_batch_size=3, remainder="pad", seed=7)
    orders = [order_of(reference, epoch) for epoch in range(5)]
    for epoch in (4, 0, 3, 3, 1, 4, 2):
        torch.rand(1), random.random(), legacy.random_sample()
        resumed = TorchSamplerAdapter(build(1), global_batch_size=2, remainder="pad", seed=7)
        assert order_of(resumed, epoch) == orders[epoch], "a new process"
        assert order_of(reference, epoch) == orders[epoch], "the same process, out of order"
    if name not in ("sequential", "list"):
        assert len({tuple(order) for order in orders}) == 5, "epochs differ"


def test_the_order_is_the_samplers_own() -> None:
    plain = RandomSampler(range(N), generator=generator(3))
    adapter = TorchSamplerAdapter(RandomSampler(range(N), generator=generator(3)), global_batch_size=4)
    distributed: DistributedSampler[int] = DistributedSampler(DATASET, num_replicas=1, rank=0, seed=5)
    adapted = TorchSamplerAdapter(
        DistributedSampler(DATASET, num_replicas=1, rank=0, seed=5), global_batch_size=4
    )
    stateful, own = Stateful(2), TorchSamplerAdapter(Stateful(2), global_batch_size=4)
    for epoch in range(3):
        assert order_of(adapter, epoch) == list(plain)
        distributed.set_epoch(epoch)
        assert order_of(adapted, epoch) == list(distributed)
        assert order_of(own, epoch) == list(stateful)


@given(at=st.integers(0, N), batch=st.integers(1, N))
def test_any_position(at: int, batch: int) -> None:
    adapter = TorchSamplerAdapter(SequentialSampler(range(N)), global_batch_size=batch)
    step = adapter.step_at(Cursor(consumed_samples=at))
    if at + batch > N:
        assert step is None
    else:
        assert step is not None
        assert step.indices.tolist() == list(range(at, at + batch))


@pytest.mark.parametrize("build", [SAMPLERS["random"], Global])
def test_global_random_state_is_left_alone(build: Callable[[int], Iterable[int]]) -> None:
    torch.manual_seed(1), random.seed(1), legacy.seed(1)
    adapter = TorchSamplerAdapter(build(0), global_batch_size=4)
    order_of(adapter, 2)
    drawn = (torch.rand(1).item(), random.random(), legacy.random_sample())
    torch.manual_seed(1), random.seed(1), legacy.seed(1)
    assert drawn == (torch.rand(1).item(), random.random(), legacy.random_sample())


def test_seed_chooses_the_order_of_samplers_without_one() -> None:
    a, b, c = (TorchSamplerAdapter(RandomSampler(range(N)), global_batch_size=4, seed=s) for s in (1, 1, 2))
    assert order_of(a, 0) == order_of(b, 0) != order_of(c, 0)
    assert a.start() == b.start()
    assert RandomSampler(range(N)).generator is None
    assert isinstance(a.sampler, RandomSampler)
    assert a.sampler.generator is None, "the lent generator is taken back"


def test_identity_is_the_order_itself() -> None:
    seeds = [
        TorchSamplerAdapter(RandomSampler(range(N), generator=generator(s)), global_batch_size=4).start()
        for s in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1]
    assert seeds[0].stream != seeds[2].stream
    assert (seeds[0].order, seeds[0].dataset_size) == ("torch", N)


def test_few_epochs_are_kept() -> None:
    adapter = TorchSamplerAdapter(RandomSampler(range(N), generator=generator(1)), global_batch_size=4)
    for epoch in range(10):
        order_of(adapter, epoch)
    order: Any = adapter._order
    assert sorted(order._epochs) == [8, 9]
    assert sorted(order._starts) == [0, 9, 10]


def test_a_partly_consumed_sampler() -> None:
    class Sized(Stateful):
        def __len__(self) -> int:
            return N

    sampler = Sized()
    used = iter(sampler)
    next(used), next(used)
    message = (
        "Sized gave 18 samples, its length is 20: the others would never be used. Give the adapter a sampler that "
        "is not yet partly consumed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TorchSamplerAdapter(sampler, global_batch_size=1)


class Changing:
    def __init__(self, *orders: list[Any]) -> None:
        self.orders = iter(orders)

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.orders))


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (
            DistributedSampler(DATASET, num_replicas=4, rank=1),
            ValueError,
            "DistributedSampler has num_replicas=4: each rank would see another order, and evenstep divides the "
            "order among ranks itself. Build it with num_replicas=1, rank=0",
        ),
        (
            BatchSampler(SequentialSampler(range(N)), 2, drop_last=False),
            TypeError,
            "BatchSampler does not yield dataset indices ('list' object cannot be interpreted as an integer): "
            "expected integers; a batch sampler goes through RankLocalBatchSampler",
        ),
        (
            Changing([0.5]),
            TypeError,
            "Changing does not yield dataset indices ('float' object cannot be interpreted as an integer): expected "
            "integers; a batch sampler goes through RankLocalBatchSampler",
        ),
        (
            Changing([0, 2**63]),
            ValueError,
            "Changing gave an index in epoch 0 that does not fit into 64 bits: no dataset has such a sample. Give it "
            "indices in [0, 2**63)",
        ),
        (Changing([]), ValueError, "Changing is empty in epoch 0: a sampler needs at least one sample"),
    ],
)
def test_bad_samplers(sampler: Iterable[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        TorchSamplerAdapter(sampler, global_batch_size=1)


def test_an_epoch_of_another_length() -> None:
    adapter = TorchSamplerAdapter(Changing([1, 2], [1, 2, 3]), global_batch_size=1)
    message = (
        "Changing gave 3 samples in epoch 1 and 2 in epoch 0: epochs of one length are needed to count steps"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        adapter.step_at(Cursor(epoch=1))


def test_a_sampler_that_cannot_repeat_itself() -> None:
    adapter = TorchSamplerAdapter(Changing([1, 2], [2, 1], [1, 2], [2, 1]), global_batch_size=1)
    for epoch in (1, 2):
        assert adapter.step_at(Cursor(epoch=epoch)) is not None
    message = (
        "Changing gave another order for epoch 0 than before: a resume would skip and repeat samples. Give it a "
        "set_epoch, a generator or a state_dict, so that its order is reproducible"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        adapter.step_at(Cursor(epoch=0))


def test_a_negative_index() -> None:
    adapter = TorchSamplerAdapter([2, -3], global_batch_size=2)
    message = (
        "_TorchOrder.index_at gave index -3 for position 1 of epoch 0: a dataset index is >= 0 (-1 is reserved "
        "for padding)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        adapter.step_at(Cursor())
