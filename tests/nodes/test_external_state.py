"""The position of a rank-local stream beside the cursor: on as many ranks, on others, of others, damaged."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StateMismatch, StepSampler, build_loader
from evenstep.nodes import ExternalStepReader
from evenstep.testing import SimulatedWorld, assert_same

CONFIG = LoaderConfig(seq_len=512, balance_window=2)


def loader_of(plane: DataPlane, steps_of: Any) -> Any:
    topology = plane.topology
    return build_loader(steps_of(topology.dp_rank, topology.dp_size), plane, CONFIG)


def test_another_number_of_ranks_is_refused_when_the_state_is_loaded(steps_of: Any) -> None:
    def save(plane: DataPlane) -> Any:
        with loader_of(plane, steps_of) as loader:
            next(loader)
            return loader.state_dict()

    def load(plane: DataPlane, states: Any) -> None:
        with loader_of(plane, steps_of) as loader:
            loader.load_state_dict(states[0])

    states = SimulatedWorld(2).run(save)
    for outcome in SimulatedWorld(3).outcomes(load, states):
        assert isinstance(outcome, StateMismatch)
        assert str(outcome) == (
            "the state was saved on 2 data-parallel ranks, this loader has 3: each position of an external source "
            "belongs to one rank. Resume on as many ranks, or give the source reshard(states, dp_rank, dp_size)."
        )


def test_the_position_of_another_rank_is_refused(steps_of: Any) -> None:
    def save(plane: DataPlane) -> Any:
        with loader_of(plane, steps_of) as loader:
            next(loader)
            return loader.state_dict()

    states = SimulatedWorld(2).run(save)

    def load(plane: DataPlane) -> None:
        with loader_of(plane, steps_of) as loader:
            loader.load_state_dict(states[0])  # as if the checkpoint had kept one copy for all
            next(loader)

    outcomes = SimulatedWorld(2).outcomes(load)
    assert str(outcomes[1]).startswith(
        "the state has positions of the external sources of dp ranks ['0'], not of this rank's (1)"
    )


def test_a_source_that_can_be_resharded_goes_to_any_number_of_ranks(corpus: Any, documents_in: Any) -> None:
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

    found: Counter[Any] = sum(
        (documents_in(batches) for batches in SimulatedWorld(3).run(load, merged)), Counter()
    )
    expected = Counter(tuple(corpus[k]["input_ids"].tolist()) for k in range(4, 94))
    assert {key: n for key, n in found.items() if set(key) != {0}} == dict(expected)
    outcomes = SimulatedWorld(3).outcomes(load, states[0])
    assert "the source needs the states of all old ranks, those of 1 are missing" in str(outcomes[0])


class Odd:
    """One-row steps; what its state is made of, JSON would refuse or change."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        while self.taken < 4:
            self.taken += 1
            yield [[{"input_ids": torch.full((3,), self.taken)}]]
        self.taken = 0

    def state_dict(self) -> Any:
        return {"taken": {0: torch.tensor(self.taken)}, "pair": (1, b"x"), "number": np.int64(self.taken)}

    def load_state_dict(self, state: Any) -> None:
        assert state["pair"] == (1, b"x")
        assert type(state["number"]) is np.int64
        self.taken = int(state["taken"][0])


def test_a_state_of_tensors_and_integer_keys_is_the_same_on_model_parallel_peers() -> None:
    def run(plane: DataPlane) -> Any:
        batches, states = [], []
        with build_loader(Odd() if plane.is_constructor else None, plane, CONFIG) as loader:
            for batch in loader:
                batches.append(batch["input_ids"][batch["input_ids"] > 0].tolist())
                states.append(loader.state_dict())
        return batches, [*states, loader.state_dict()]

    def resume(plane: DataPlane, state: Any) -> Any:
        with build_loader(Odd() if plane.is_constructor else None, plane, CONFIG) as loader:
            loader.load_state_dict(state)
            return [batch["input_ids"][batch["input_ids"] > 0].tolist() for batch in loader]

    world = SimulatedWorld({"dp": 1, "tp": 2})
    (batches, states), (same, of_peer) = world.run(run)
    assert batches == same == [[k] * 3 for k in range(1, 5)]
    assert_same(states, of_peer)
    for peer in SimulatedWorld({"dp": 1, "tp": 2}).run(resume, of_peer[1]):
        assert peer == batches[2:]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_that_peers_cannot_be_told_is_an_error_on_every_rank(steps: int) -> None:
    class Unsayable(Odd):
        def __iter__(self) -> Iterator[Any]:
            return iter([[[{"input_ids": torch.ones(2, dtype=torch.int64)}]]] * steps)

        def state_dict(self) -> Any:
            return {"seen": {1, 2}}

    def run(plane: DataPlane) -> None:
        with build_loader(Unsayable() if plane.is_constructor else None, plane, CONFIG) as loader:
            list(loader)

    told, heard = SimulatedWorld({"dp": 1, "tp": 2}).outcomes(run)
    assert isinstance(told, TypeError)
    assert str(told) == (
        "the state at this batch cannot be told to model-parallel peers: state['source']['0']['position']['seen']: "
        "unsupported type set; a state is made of dicts, lists, tuples, numbers, strings, bytes, arrays and tensors"
    )
    assert isinstance(heard, RemoteRankError)
    assert str(told) in str(heard)


def test_a_state_that_no_checkpoint_can_hold_names_its_key() -> None:
    class Locked:
        def __iter__(self) -> Iterator[Any]:
            return iter([])

        def state_dict(self) -> Any:
            return {"inner": [{"lock": threading.Lock()}]}

        def load_state_dict(self, state: Any) -> None:
            pass

    reader = ExternalStepReader(Locked(), DataPlane.single(), CONFIG)
    with pytest.raises(TypeError, match=re.escape("the source's state['inner'][0]['lock'] is <unlocked")):
        reader.state_dict()


def test_a_state_of_a_dataset_is_refused_and_the_other_way_round(corpus: Any, steps_of: Any) -> None:
    sampler = StepSampler(len(corpus), global_batch_size=8)
    over_dataset = build_loader(corpus, None, LoaderConfig(seq_len=512), sampler=sampler)
    next(over_dataset)
    external = loader_of(DataPlane.single(), steps_of)
    next(external)
    with pytest.raises(
        StateMismatch, match=re.escape("the state was saved with dataset_size=96, this loader has")
    ):
        external.load_state_dict(over_dataset.state_dict())
    with pytest.raises((StateMismatch, ValueError)):
        over_dataset.load_state_dict(external.state_dict())
    over_dataset.close()
    external.close()
