"""The METADATA graph: any form of lengths, no word between ranks but one header a window, faults by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import (
    DataPlane,
    LoaderConfig,
    MetadataTable,
    RemoteRankError,
    SampleError,
    SampleMetadata,
    StepSampler,
    build_loader,
)
from evenstep.comm.simulated import SimulatedCommunicator
from evenstep.nodes.known import known_metadata
from evenstep.testing import SimulatedWorld, assert_same

CONFIG = LoaderConfig(seq_len=512, balance_window=1)


def forms(lengths: list[int], folder: Path) -> dict[str, Any]:
    path = folder / "lengths.npy"
    np.save(path, np.array(lengths, dtype=np.int32))
    records = [SampleMetadata(n) for n in lengths]
    return {
        "list": lengths,
        "int32": np.array(lengths, dtype=np.int32),
        "uint16": np.array(lengths, dtype=np.uint16),
        "tensor": torch.tensor(lengths),
        "path": path,
        "text path": str(path),
        "memory map": np.load(path, mmap_mode="r"),
        "columns": {"tokens": lengths, "patches": [1.5] * len(lengths)},
        "documents": {
            "tokens": lengths,
            "documents": lengths,
            "document_offsets": np.arange(len(lengths) + 1),
        },
        "records": records,
        "table": MetadataTable.from_samples(records),
    }


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    lengths = [3, 0, 7, 5, 9]
    index = np.array([4, 1, 1, 2])
    for name, form in forms(lengths, tmp_path).items():
        taken = known_metadata(form, 5).take(index)
        assert taken.tokens.tolist() == [9, 0, 0, 7], name
        assert taken.tokens.dtype == np.int64
        assert taken.documents.tolist() == [9, 0, 0, 7], name
        assert taken.loss_tokens.tolist() == [-1] * 4, name
        assert taken.features.keys() <= {"patches"}


def test_columns_take_documents_and_losses_along() -> None:
    known = known_metadata(
        {
            "tokens": [5, 4],
            "loss_tokens": [3, 2],
            "documents": [2, 3, 4],
            "document_offsets": [0, 2, 3],
            "patches": [1, 2],
        },
        0,
    )
    taken = known.take(np.array([1, 0]))
    assert taken.documents.tolist() == [4, 2, 3]
    assert taken.document_offsets.tolist() == [0, 1, 3]
    assert taken.loss_tokens.tolist() == [2, 3]
    assert taken.features["patches"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            [[1, 2]],
            "metadata column 'tokens' has shape (1, 2) and dtype int64, expected one integer per sample",
        ),
        ([1.5], "metadata column 'tokens' has shape (1,) and dtype float64, expected one integer per sample"),
        ({"length": [1]}, "metadata has the columns ['length'], expected one named 'tokens'"),
        (
            {"tokens": [1], "documents": [1]},
            "metadata needs both 'documents' and 'document_offsets', or neither",
        ),
        ({"tokens": [1], "patches": [1, 2]}, "metadata column 'patches' has 2 entries, expected 1"),
        (
            [1, 2, 3],
            "metadata has 3 samples, the sampler was made for 1: rows would be planned with the lengths of other "
            "samples. Compute the metadata from the dataset as it is now.",
        ),
    ],
)
def test_odd_metadata_is_refused(metadata: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        known_metadata(metadata, 1)


def test_a_budget_needs_its_column() -> None:
    message = (
        "metadata has no column 'patches', which has a budget: rows would be planned as if it were 0 in every sample. "
        "Pass it as a column, metadata={'tokens': ..., 'patches': ...}."
    )
    for metadata in ([1, 2], {"tokens": [1, 2]}, MetadataTable.from_tokens([1, 2])):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            known_metadata(metadata, 2, ["patches"])
    records = [SampleMetadata(1), SampleMetadata(2, {"patches": 3.0})]
    good: list[Any] = [records, {"tokens": [1, 2], "patches": [0, 3]}, MetadataTable.from_samples(records)]
    for metadata in good:
        assert known_metadata(metadata, 2, ["patches"]).take(np.array([1])).features["patches"].tolist() == [
            3.0
        ]


def test_a_budget_that_binds_nothing_is_said_once(corpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = LoaderConfig(seq_len=512, budgets={"pathces": 4.0})
    with build_loader(corpus, None, config, sampler=StepSampler(96, global_batch_size=8)) as loader:
        for _ in range(20):
            next(loader)
    assert [record.getMessage() for record in caplog.records if "budget" in record.getMessage()] == [
        "no sample of a window has the feature 'pathces', which has a budget: it binds nothing there. Return it from "
        "metadata_fn, in SampleMetadata(tokens, features={'pathces': ...})."
    ]


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


def test_a_negative_length_is_named_when_its_step_is_planned() -> None:
    known = known_metadata([3, 4, -2], 3)
    assert len(known.take(np.array([0, 1]))) == 2
    with pytest.raises(ValueError, match=re.escape("metadata gives sample 2 a length of -2 tokens")):
        known.take(np.array([1, 2]))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (MetadataTable.from_tokens([3, 4, -2]), "metadata gives sample 2 a length of -2 tokens"),
        (
            {"tokens": [3, 4, 2], "documents": [3, 2, 1, 2], "document_offsets": [0, 1, 3, 4]},
            "metadata gives sample 1 documents of 3 tokens together, but a length of 4 tokens",
        ),
        (
            [SampleMetadata(3), SampleMetadata(4, documents=[4, 1]), SampleMetadata(2)],
            "metadata gives sample 1 documents of 5 tokens together, but a length of 4 tokens",
        ),
        (
            {"tokens": [3, 4, 2], "documents": [3, 4, 2], "document_offsets": [0, 2, 1, 3]},
            "metadata has document_offsets that fall at sample 1: its documents have no place",
        ),
        (
            {"tokens": [3, 4, 2], "loss_tokens": [2, 9, -1]},
            "metadata gives sample 1 9 loss tokens, but a length of 4 tokens",
        ),
    ],
)
def test_what_cannot_be_is_named_when_its_step_is_planned(metadata: Any, message: str) -> None:
    dataset = [{"input_ids": torch.arange(n)} for n in (3, 4, 2)]
    sampler = StepSampler(3, global_batch_size=3, order="sequential")
    with (
        build_loader(dataset, None, LoaderConfig(seq_len=8), sampler=sampler, metadata=metadata) as loader,
        pytest.raises((ValueError, RemoteRankError), match=re.escape(message)),
    ):
        next(loader)


def test_only_the_rows_of_a_step_are_looked_at() -> None:
    class Column(np.ndarray[Any, np.dtype[np.int64]]):
        taken = 0

        def __getitem__(self, key: Any) -> Any:
            Column.taken += np.size(key)
            return super().__getitem__(key)

        def __array_finalize__(self, obj: Any) -> None:
            pass

    lengths = np.full(10**6, 300).view(Column)
    sampler = StepSampler(10**6, global_batch_size=8)

    class Dataset:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": torch.full((300,), index)}

    loader = build_loader(
        Dataset(), None, LoaderConfig(seq_len=512, host_prefetch=0), sampler=sampler, metadata=lengths
    )
    for _ in range(8):
        next(loader)
    assert Column.taken == 8


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
