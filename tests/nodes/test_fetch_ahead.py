"""The time that workers save: they have the next window before this one is waited for, and read while it is used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from evenstep import DataPlane, LoaderConfig, StepSampler
from evenstep.nodes import InlineFetcher, PlannedReader, Planner, SamplerReader
from evenstep.nodes.fetch import Pending
from evenstep.nodes.known import known_metadata
from evenstep.nodes.sample_seed import SeedKey


class Told(InlineFetcher):
    """Reads without workers, and writes down what it is asked for and when that is waited for."""

    ahead = True

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.events: list[str] = []

    def submit(self, indices: Sequence[int], key: SeedKey) -> Pending:
        window = sum(event.startswith("ask") for event in self.events)
        self.events.append(f"ask {window}")
        events, pending = self.events, super().submit(indices, key)

        class Waited(Pending):
            def take(self, count: int) -> list[Any]:
                events.append(f"wait {window}")
                return pending.take(count)

        return Waited([])


class Four:
    """Samples of four tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.arange(4)}


@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
def test_workers_have_the_next_window_before_this_one_is_waited_for(known: bool) -> None:
    plane, config, dataset = DataPlane.single(), LoaderConfig(seq_len=8, num_workers=1), Four()
    fetcher, sampler = Told(dataset), StepSampler(16, global_batch_size=4)
    reader: Any
    if known:
        source = SamplerReader(sampler, dataset, plane, config, metadata=known_metadata([4] * 16, 16))
        reader = PlannedReader(Planner(source, plane, config), dataset, plane, config, fetcher=fetcher)
    else:
        reader = SamplerReader(sampler, dataset, plane, config, fetcher=fetcher)
    assert len(list(reader)) == (16 if known else 4)
    waits = 4 if known else 1  # a micro-batch at a time where rows are read, else the whole window
    expected = ["ask 0"]
    for window in range(4):
        expected += [f"ask {window + 1}"] if window < 3 else []
        expected += [f"wait {window}"] * waits
    assert fetcher.events == expected


def test_the_next_window_is_read_while_this_one_is_used() -> None:
    read: list[int] = []

    class Watched:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return {"input_ids": torch.arange(3)}

    config = LoaderConfig(seq_len=8, num_workers=2)
    reader = SamplerReader(StepSampler(16, global_batch_size=4), Watched(), DataPlane.single(), config)
    next(reader)
    deadline = time.monotonic() + 10
    while len(read) < 8 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(read) == 8
    assert reader.state_dict()["consumed_samples"] == 4
    reader.close()
