"""How often ranks talk: three times a window at most, and once for each micro-batch in which something moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.comm.codec import Codec, PayloadCodec
from evenstep.testing import SimulatedWorld

STEPS, MICRO_BATCHES = 6, 4


class Documents:
    """One long document at every step, so that balancing has something to do."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(length(index))}


def length(index: int) -> int:
    return 1 + index * index * 7 % 61


class CountingCodec(PayloadCodec):
    """Counts samples on their way out and in."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[int] = []  # appended to by the threads of all ranks
        self.decoded: list[int] = []

    def encode(self, samples: Sequence[Any], out: torch.Tensor) -> None:
        self.encoded.append(len(samples))
        super().encode(samples, out)

    def decode(self, buffer: torch.Tensor, count: int) -> list[Any]:
        self.decoded.append(count)
        return super().decode(buffer, count)


def talk(ranks: int, known: bool = False, codec: Codec | None = None, **options: Any) -> tuple[int, int]:
    """Collectives and bytes of payload of one epoch, on all ranks together."""
    rows = ranks * MICRO_BATCHES
    dataset = Documents(STEPS * rows)
    world = SimulatedWorld(ranks)

    def work(plane: DataPlane) -> int:
        before = sum(group.collectives for group in world.groups)
        config = LoaderConfig(seq_len=64, **options)
        sampler = StepSampler(len(dataset), global_batch_size=rows, order="sequential")
        metadata = [length(i) for i in range(len(dataset))] if known else None
        with build_loader(dataset, plane, config, sampler=sampler, metadata=metadata, codec=codec) as loader:
            assert plane.balance is not None
            plane.balance.all_gather(
                torch.zeros(1, dtype=torch.uint8)
            )  # nobody has begun before it, all have built
            before = sum(group.collectives for group in world.groups)
            assert sum(1 for _ in loader) == STEPS * MICRO_BATCHES
        return before

    began = max(world.run(work))
    talked = sum(group.collectives for group in world.groups) - began
    return talked, sum(group.bytes_moved for group in world.groups)


@pytest.mark.parametrize("broadcast_plan", [True, False])
@pytest.mark.parametrize("window", [None, 2, 1])
def test_header_metadata_plan_and_an_exchange_for_each_micro_batch(
    window: int | None, broadcast_plan: bool
) -> None:
    windows = STEPS * MICRO_BATCHES // (window or MICRO_BATCHES)
    talked, moved = talk(2, balance_window=window, broadcast_plan=broadcast_plan)
    assert (
        3 * windows + 1 <= talked <= 3 * windows + STEPS * MICRO_BATCHES + 1
    )  # the last header ends the epoch
    assert moved > 0 or window == 1


def test_one_exchange_a_window_at_most() -> None:
    talked, moved = talk(2, exchange="window")
    assert 3 * STEPS + 1 < talked <= 4 * STEPS + 1
    assert moved > 0


def test_nothing_moves_nothing_is_exchanged() -> None:
    assert talk(2, algorithm="reference") == (3 * STEPS + 1, 0)


def test_lengths_known_ahead_leave_a_status_header_and_the_plan() -> None:
    talked, moved = talk(3, known=True)
    assert STEPS + 1 <= talked <= 2 * STEPS + 1
    assert moved == 0


def test_samples_that_stay_are_never_encoded() -> None:
    codec = CountingCodec()
    talk(2, codec=codec, algorithm="reference")
    assert codec.encoded == codec.decoded == []
    talk(2, codec=codec, algorithm="refine")
    assert 0 < sum(codec.encoded) == sum(codec.decoded) < STEPS * MICRO_BATCHES
