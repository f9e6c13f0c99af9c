"""Streams and states of streams that cannot be what they are said to be, refused before anything is trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from evenstep import DataPlane, LoaderConfig, RemoteRankError, build_loader
from evenstep.nodes import ExternalStepReader
from evenstep.sampling import RankLocalBatchSampler
from evenstep.testing import SimulatedWorld

CONFIG = LoaderConfig(seq_len=8, host_prefetch=0)
STEPS = [[[{"input_ids": torch.full((2,), k)}]] for k in range(5)]


def without_source(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "source"}


def at_rank_0(entry: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, "source": {"0": entry}}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            without_source,
            "the state has no position of an external source beside its cursor: it was saved by a loader over a dataset. "
            "Build the loader it was saved with.",
        ),
        (
            lambda state: {**state, "source": [1]},
            "state['source'] is [1], expected a mapping from dp ranks to positions",
        ),
        (
            at_rank_0(3),
            "the position of an external source is 3, expected {'epoch': ..., 'position': ...}; pass what "
            "loader.state_dict() returned",
        ),
        (
            at_rank_0({"epoch": "0", "position": {"taken": 1}}),
            "the position of an external source is {'epoch': '0', 'position': {'taken': 1}}, expected {'epoch': ..., "
            "'position': ...}; pass what loader.state_dict() returned",
        ),
        (
            at_rank_0({"epoch": 0, "position": {"taken": -1}}),
            "the state of the source is {'taken': -1}, expected {'taken': a number of items}: it was saved with a source "
            "of another kind",
        ),
        (
            at_rank_0({"epoch": 0, "position": {"offset": 1}}),
            "the state of the source is {'offset': 1}, expected {'taken': a number of items}: it was saved with a source "
            "of another kind",
        ),
    ],
)
def test_a_damaged_state_is_told(damage: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    def resume(state: dict[str, Any]) -> None:
        with build_loader(STEPS, None, CONFIG) as loader:
            loader.load_state_dict(state)
            next(loader)

    with build_loader(STEPS, None, CONFIG) as loader:
        next(loader)
        state = damage(loader.state_dict())
    with pytest.raises((TypeError, ValueError, RemoteRankError)) as caught:
        resume(state)
    told = caught.value
    assert (told.error_message if isinstance(told, RemoteRankError) else str(told)) == message


def test_a_rank_that_builds_batches_needs_a_source() -> None:
    message = "rank 0 builds batches but has no source of local steps; pass one on every constructor"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ExternalStepReader(None, DataPlane.single(), CONFIG)


def test_a_rank_that_builds_nothing_has_no_steps_to_read() -> None:
    def read(plane: DataPlane) -> None:
        reader = ExternalStepReader(None if plane.topology.rank else STEPS, plane, CONFIG)
        reader.reset()
        next(reader)

    _, outcome = SimulatedWorld({"dp": 1, "tp": 2}).outcomes(read)
    assert str(outcome) == "this rank constructs nothing: it has no external steps to read"


@pytest.mark.parametrize("source", [3, len])
def test_what_cannot_be_iterated_is_no_source(source: Any) -> None:
    message = (
        f"the source of local steps [[sample, ...], ...] is {type(source).__name__} {source!r}, expected a torchdata node, a "
        "StatefulDataLoader, an IterableDataset or another iterable of local steps [[sample, ...], ...]"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        ExternalStepReader(source, DataPlane.single(), CONFIG)


def test_several_rows_of_a_batch_sampler_hold_one_sample_each() -> None:
    class Pairs:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3, 4]])

    dataset = [{"input_ids": torch.full((2,), k)} for k in range(5)]
    config = LoaderConfig(seq_len=8, micro_batch_size=2, host_prefetch=0)
    sampler = RankLocalBatchSampler(Pairs(), accumulation_steps=1, global_batch_size=2)
    message = (
        "the batch sampler gave a micro-batch of 3 samples for micro_batch_size=2 rows: with more than one row each holds "
        "one sample. Use micro_batch_size=1 to put several samples into a row."
    )
    with build_loader(dataset, None, config, sampler=sampler) as loader:
        assert next(loader)["info"].num_samples == 2
        with pytest.raises(RemoteRankError) as caught:
            next(loader)
    assert caught.value.error_message == message
