"""The METADATA graph: no word between ranks but one header a window, and the same batches as the online graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.comm.simulated import SimulatedCommunicator
from evenstep.testing import SimulatedWorld, assert_same

CONFIG = LoaderConfig(seq_len=512, balance_window=1)


def test_a_rank_that_builds_batches_needs_the_dataset() -> None:
    sampler = StepSampler(4, global_batch_size=4)
    with pytest.raises(ValueError, match=r"^dataset=None, but rank 0 reads samples; pass the dataset here$"):
        build_loader(None, None, LoaderConfig(seq_len=8), sampler=sampler, metadata=[1, 2, 3, 4])


def test_budgets_hold_in_rows_planned_ahead() -> None:
    class Dataset:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.full((1 + index % 3,), index)}

    def rank(plane: DataPlane) -> list[list[int]]:
        config = LoaderConfig(seq_len=16, accumulation_steps="auto", budgets={"patches": 10.0})
        sampler = StepSampler(16, global_batch_size=16)
        metadata = {"tokens": [1 + k % 3 for k in range(16)], "patches": list(range(10)) + [0] * 6}
        loader = build_loader(
            Dataset(),
            plane,
            config,
            sampler=sampler,
            metadata=metadata,
            pack=lambda samples, _: [int(s["input_ids"][0]) for s in samples],
            collate=lambda rows: rows,
        )
        with loader:
            return [row for batch in loader for row in batch if isinstance(row, list)]

    rows = [row for part in SimulatedWorld(2).run(rank) for row in part]
    assert sorted(index for row in rows for index in row) == list(range(16))
    assert all(sum(index for index in row if index < 10) <= 10 for row in rows)


def count(world: SimulatedWorld, corpus: Any, config: LoaderConfig, *, known: bool) -> tuple[int, int]:
    """Windows, and collectives beside those that build the loader."""
    metadata = corpus.lengths if known else None

    def rank(plane: DataPlane) -> tuple[int, int]:
        sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
        loader = build_loader(corpus, plane, config, sampler=sampler, metadata=metadata)
        assert isinstance(plane.balance, SimulatedCommunicator)
        before = plane.balance._turn
        batches = sum(1 for _ in loader)
        return batches, plane.balance._turn - before

    results: list[tuple[int, int]] = world.run(rank)
    assert len(set(results)) == 1
    return results[0]


@pytest.mark.parametrize("broadcast_plan", [True, False])
@pytest.mark.parametrize("window", [1, 2, None])
def test_one_header_a_window_and_nothing_else(corpus: Any, window: int | None, broadcast_plan: bool) -> None:
    config = LoaderConfig(seq_len=512, balance_window=window, broadcast_plan=broadcast_plan)
    world = SimulatedWorld(2)
    batches, collectives = count(world, corpus, config, known=True)
    assert batches == 48
    assert collectives == batches // (window or 4) + 1  # the last header closes the epoch
    assert sum(group.bytes_moved for group in world.groups) == 0
    _, online = count(world, corpus, config, known=False)
    assert online > 2 * collectives


def test_each_rank_reads_only_what_it_trains_on(corpus: Any) -> None:
    def rank(plane: DataPlane) -> tuple[list[int], int]:
        mine = type(corpus)()
        sampler = StepSampler(len(mine), global_batch_size=8, seed=1)
        loader = build_loader(mine, plane, CONFIG, sampler=sampler, metadata=mine.lengths)
        samples = sum(batch["info"].num_samples for batch in loader)
        return mine.read, samples

    results = SimulatedWorld(2).run(rank)
    everything = [index for read, _ in results for index in read]
    assert sorted(everything) == list(range(len(corpus)))
    assert [len(read) for read, _ in results] == [samples for _, samples in results]


def test_truncated_samples_are_planned_and_read_as_cut(corpus: Any) -> None:
    config = LoaderConfig(seq_len=128, oversized="truncate")

    def rank(plane: DataPlane, known: bool) -> list[Any]:
        sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
        metadata = {"tokens": corpus.lengths, "loss_tokens": [max(0, n - 1) for n in corpus.lengths]}
        loader = build_loader(corpus, plane, config, sampler=sampler, metadata=metadata if known else None)
        return list(loader)

    world = SimulatedWorld(2)
    assert_same(world.run(rank, True), world.run(rank, False))


class Short:
    """Samples that tell no length, one of them oversized and one unreadable."""

    lengths = (30, 6, 7, 8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise OSError("no such block")
        return {"text": torch.arange(self.lengths[index])}


def test_what_is_left_of_a_batch_is_counted_as_planned() -> None:
    config = LoaderConfig(seq_len=20, micro_batch_size=4, oversized="truncate", on_sample_error="skip")
    loader = build_loader(
        Short(),
        None,
        config,
        sampler=StepSampler(4, global_batch_size=4, order="sequential"),
        metadata={"tokens": Short.lengths, "loss_tokens": [29, 5, 6, 3]},
        metadata_fn=lambda sample: len(sample["text"]),
        pack=lambda samples, _seq_len: [len(sample["text"]) for sample in samples],
        collate=lambda rows: {"rows": rows},
    )
    info = next(loader)["info"]
    assert (info.num_samples, info.num_tokens, info.num_padding) == (3, 20 + 6 + 8, 80 - 34)
    assert (info.num_loss_tokens, info.step_loss_tokens) == (19 + 5 + 3, None)


@pytest.mark.parametrize("ahead", [0, None])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_may_leave_right_after_its_last_batch(corpus: Any, ahead: int | None, leaver: int) -> None:
    """It counts its batches and closes, while the others ask for one more and find the end."""

    def loop(plane: DataPlane) -> int:
        config = LoaderConfig(seq_len=512, host_prefetch=ahead)
        sampler = StepSampler(len(corpus), global_batch_size=6)
        loader = build_loader(corpus, plane, config, sampler=sampler, metadata=corpus.lengths)
        with loader:
            if plane.topology.rank == leaver:
                return sum(1 for _, _ in zip(range(len(loader)), loader, strict=False))
            return sum(1 for _ in loader)

    expected = len(corpus) // 6 * 2
    assert SimulatedWorld(3).run(loop) == [expected] * 3
