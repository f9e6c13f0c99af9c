"""What is told when samples are not what their metadata says, or cannot be read at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Cursor, DataPlane, LoaderConfig, RemoteRankError, SampleError, StepSampler, build_loader
from evenstep.sampling import Step
from evenstep.testing import SimulatedWorld

CONFIG = LoaderConfig(seq_len=512, balance_window=1)


def test_wrong_metadata_names_the_sample_on_every_rank(corpus: Any) -> None:
    lengths = list(corpus.lengths)
    lengths[17] += 1

    def rank(plane: DataPlane) -> None:
        sampler = StepSampler(len(corpus), global_batch_size=8, order="sequential")
        for _ in build_loader(corpus, plane, CONFIG, sampler=sampler, metadata=lengths):
            pass

    outcomes = SimulatedWorld(2).outcomes(rank)
    reasons = {type(outcome): outcome for outcome in outcomes}
    assert set(reasons) == {SampleError, RemoteRankError}
    told = (
        f"sample 17 has {corpus.lengths[17]} tokens, its metadata says {lengths[17]}: the rows were planned for another "
        "length. Compute the metadata from the dataset as it is now."
    )
    assert str(reasons[SampleError]) == told
    assert reasons[SampleError].sample == 17
    assert reasons[RemoteRankError].error_message == told
    assert reasons[RemoteRankError].sample == 17
    assert reasons[RemoteRankError].rank == reasons[SampleError].rank


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_one_except_clause_finds_what_could_not_be_read_on_every_rank(mesh: dict[str, int]) -> None:
    class Broken:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 5:
                raise OSError("no such block")
            return {"input_ids": np.arange(4)}

    def rank(plane: DataPlane) -> None:
        sampler = StepSampler(16, global_batch_size=4, order="sequential")
        for _ in build_loader(Broken(), plane, CONFIG, sampler=sampler, metadata=[4] * 16):
            pass

    world = SimulatedWorld(mesh)
    outcomes = world.outcomes(rank)
    assert all(isinstance(outcome, RemoteRankError) for outcome in outcomes)
    told = {(o.error_type, o.error_message, o.sample) for o in outcomes}
    assert told == {("OSError", "no such block", 5)}
    (origin,) = {o.rank for o in outcomes}
    for rank_number, outcome in enumerate(outcomes):
        assert isinstance(outcome, SampleError) == (rank_number == origin)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrong", [17, 95], ids=["in the middle", "in the last window"])
def test_the_next_header_tells_what_could_not_be_read(corpus: Any, wrong: int, workers: int) -> None:
    lengths = list(corpus.lengths)
    lengths[wrong] -= 1

    def rank(plane: DataPlane) -> tuple[int, str]:
        config = LoaderConfig(seq_len=512, num_workers=workers, host_prefetch=0)
        sampler = StepSampler(len(corpus), global_batch_size=8, order="sequential")
        batches = 0
        with build_loader(corpus, plane, config, sampler=sampler, metadata=lengths) as loader:
            try:
                for _ in loader:
                    batches += 1
            except (SampleError, RemoteRankError) as error:
                return batches, type(error).__name__
        return batches, "none"

    found = {error: batches for batches, error in SimulatedWorld(2).run(rank)}
    assert set(found) == {"SampleError", "RemoteRankError"}
    assert found["RemoteRankError"] == 4 * (wrong // 8 + 1)  # the whole window, and nothing of the next
    assert found["RemoteRankError"] - 4 <= found["SampleError"] < found["RemoteRankError"]


def test_ranks_that_plan_differently_are_told_at_the_next_window(corpus: Any) -> None:
    def rank(plane: DataPlane) -> None:
        lengths = np.array(corpus.lengths)
        if plane.topology.rank == 1:
            lengths = np.roll(lengths, 1)
        sampler = StepSampler(len(corpus), global_batch_size=8, order="sequential")

        class Silent:
            def __len__(self) -> int:
                return len(corpus)

            def __getitem__(self, index: int) -> Any:
                return bytes(3)

        loader = build_loader(
            Silent(),
            plane,
            LoaderConfig(seq_len=512, host_prefetch=0),
            sampler=sampler,
            metadata=lengths,
            pack=lambda samples, _: samples,
            collate=lambda rows: rows,
        )
        for _ in loader:
            pass

    for outcome in SimulatedWorld(2).outcomes(rank):
        assert type(outcome).__name__ == "ConfigMismatch"
        assert str(outcome).startswith("rank 1 planned the last window differently from rank 0 (digests 0x")


def test_a_sample_that_cannot_be_read_is_skipped_and_the_others_stay(
    corpus: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaged:
        def __init__(self, damaged: set[int]) -> None:
            self.damaged = damaged

        def __len__(self) -> int:
            return len(corpus)

        def __getitem__(self, index: int) -> Any:
            if index in self.damaged:
                raise OSError("no such block")
            return corpus[index]

    def rank(plane: DataPlane, damaged: set[int], known: bool) -> list[Any]:
        config = LoaderConfig(seq_len=512, on_sample_error="skip")
        sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
        metadata = corpus.lengths if known else None
        loader = build_loader(Damaged(damaged), plane, config, sampler=sampler, metadata=metadata)
        return [
            (
                b["info"].step,
                b["info"].num_samples,
                b["info"].num_tokens,
                b["input_ids"][b["labels"] != -100].tolist(),
            )
            for b in loader
        ]

    world = SimulatedWorld(2)
    for known in (True, False):
        whole, less = world.run(rank, set(), known), world.run(rank, {5, 6}, known)
        lost: dict[int, int] = {}
        for step, samples, *_ in [b for r in whole for b in r]:
            lost[step] = lost.get(step, 0) + samples
        for step, samples, *_ in [b for r in less for b in r]:
            lost[step] -= samples
        assert sum(lost.values()) == 2
        left = sum(tokens for r in less for _, _, tokens, _ in r)
        assert left == sum(corpus.lengths) - corpus.lengths[5] - corpus.lengths[6]
        if known:
            # Planned before anything was read: every other row is the same.
            same = sum(a == b for r, q in zip(whole, less, strict=True) for a, b in zip(r, q, strict=True))
            assert same >= sum(map(len, whole)) - 2
    messages = {record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()}
    assert {message.split(": ", 1)[1] for message in messages} == {
        f"evenstep: sample {k} is skipped: OSError: no such block" for k in (5, 6)
    }
    assert {message.split(": ", 1)[0] for message in messages} <= {f"rank {rank}" for rank in range(4)}


class Broken:
    """A sampler over eight samples that fails at its second step."""

    rows_per_step = 4

    def __init__(self) -> None:
        self.inner = StepSampler(8, global_batch_size=4, order="sequential")

    def start(self) -> Cursor:
        return self.inner.start()

    def step_at(self, cursor: Cursor) -> Step | None:
        if cursor.consumed_samples == 4:
            raise KeyError("no such shard")
        return self.inner.step_at(cursor)

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "oversized",
            "rank 0 failed at sample 5: SampleError: sample 5: it has 9 tokens, seq_len is 8: it fits no row. Raise "
            "seq_len, split it (evenstep.datasets.SplitDocuments), or choose oversized='truncate' or 'single' (every rank "
            "stops here; the traceback is on rank 0)",
        ),
        (
            "budget",
            "sample 1 of the window has patches=20, more than the budget of 10: it fits into no row. Filter such "
            "samples, raise budgets['patches'], or set oversized='single'",
        ),
        (
            "sampler",
            "rank 0 failed: KeyError: 'no such shard' (every rank stops here; the traceback is on rank 0)",
        ),
    ],
)
def test_what_fails_ahead_is_told_on_every_rank_when_its_turn_comes(
    fault: str, message: str, workers: int
) -> None:
    tokens, patches = [4] * 8, [1] * 8
    if fault == "oversized":
        tokens[5] = 9
    elif fault == "budget":
        patches[5] = 20
    dataset = [{"input_ids": torch.arange(n)} for n in tokens]
    sampler = Broken() if fault == "sampler" else Broken().inner

    def rank(plane: DataPlane, seen: list[int]) -> None:
        config = LoaderConfig(seq_len=8, budgets={"patches": 10.0}, num_workers=workers)
        metadata = {"tokens": tokens, "patches": patches}
        with build_loader(dataset, plane, config, sampler=sampler, metadata=metadata) as loader:
            for batch in loader:
                seen[plane.topology.rank] += batch["info"].num_samples

    seen = [0, 0]
    for outcome in SimulatedWorld(2).outcomes(rank, seen):
        assert str(outcome) == message
    assert seen == [2, 2]  # all of the step before
