"""Samples that were packed before: their documents balanced one by one, or their rows kept whole."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import (
    DataPlane,
    LoaderConfig,
    RemoteRankError,
    SampleError,
    SampleMetadata,
    StepSampler,
    build_loader,
)
from evenstep.testing import SimulatedWorld, assert_same

SEQ_LEN = 1024


class Packed:
    """Rows of the corpus as a packer left them: documents one after another, and where they end."""

    def __init__(self, corpus: Any) -> None:
        self.rows: list[list[torch.Tensor]] = [[]]
        for k in range(len(corpus)):
            document = corpus[k]["input_ids"]
            if sum(map(len, self.rows[-1])) + len(document) > SEQ_LEN:
                self.rows.append([])
            self.rows[-1].append(document)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"tokens": torch.cat(row), "ends": np.cumsum([len(document) for document in row])}


def explode(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"input_ids": part} for part in torch.tensor_split(sample["tokens"], sample["ends"][:-1].tolist())
    ]


def documents_of(samples: list[Any], seq_len: int) -> list[tuple[int, ...]]:
    """A pack that keeps the documents apart."""
    assert sum(len(sample["input_ids"]) for sample in samples) <= seq_len
    return [tuple(sample["input_ids"].tolist()) for sample in samples]


def as_they_are(rows: list[Any]) -> list[Any]:
    return [row for row in rows if isinstance(row, list)]  # without evenstep's padding rows


def train(plane: DataPlane, packed: Packed, known: bool = False, **options: Any) -> list[Any]:
    config = LoaderConfig(seq_len=SEQ_LEN, **options)
    sampler = StepSampler(len(packed), global_batch_size=4, seed=2)
    metadata = None
    if known:
        documents = [len(document) for row in packed.rows for document in row]
        metadata = {
            "tokens": [sum(map(len, row)) for row in packed.rows],
            "documents": documents,
            "document_offsets": np.cumsum([0, *(len(row) for row in packed.rows)]),
        }
    loader = build_loader(
        packed,
        plane,
        config,
        sampler=sampler,
        explode=explode,
        metadata=metadata,
        pack=documents_of,
        collate=as_they_are,
    )
    with loader:
        return [row for batch in loader for row in batch]


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("options", [{}, {"balance_window": 1}, {"accumulation_steps": "auto"}])
def test_every_document_is_trained_on_once(corpus: Any, repack: bool, options: dict[str, Any]) -> None:
    packed = Packed(corpus)
    results = SimulatedWorld(2).run(lambda plane: train(plane, packed, repack=repack, **options))
    rows = [row for part in results for row in part]
    found = Counter(document for row in rows for document in row)
    steps = len(packed) // 4 * 4
    order = StepSampler(len(packed), global_batch_size=4, seed=2)
    cursor, members = order.start(), []
    while (step := order.step_at(cursor)) is not None:
        members += step.indices.tolist()
        cursor = step.next_cursor
    assert len(members) == steps
    expected = Counter(tuple(d.tolist()) for k in members for d in packed.rows[k])
    assert {key: found[key] for key in expected} == dict(expected)
    whole = {tuple(tuple(d.tolist()) for d in packed.rows[k]) for k in members}
    kept = sum(tuple(row) in whole for row in rows)
    if options.get("accumulation_steps") != "auto":
        assert (kept == len(rows)) == (not repack)


def test_repacking_balances_what_whole_rows_cannot(corpus: Any) -> None:
    packed = Packed(corpus)
    told: dict[bool, list[float]] = {}
    for repack in (True, False):
        told[repack] = []

        def rank(plane: DataPlane, repack: bool = repack) -> None:
            loader = build_loader(
                packed,
                plane,
                LoaderConfig(seq_len=SEQ_LEN, repack=repack),
                sampler=StepSampler(len(packed), global_batch_size=4, seed=2),
                explode=explode,
                on_balance=lambda balance: told[repack].append(balance.efficiency),
            )
            with loader:
                for _ in loader:
                    pass

        SimulatedWorld(2).run(rank)
    assert sum(told[True]) > sum(told[False])


def test_whole_rows_cost_what_their_documents_cost(corpus: Any) -> None:
    packed = Packed(corpus)
    costs: list[list[float]] = []
    build: dict[str, Any] = {
        "sampler": StepSampler(len(packed), global_batch_size=4, order="sequential"),
        "explode": explode,
        "on_balance": lambda balance: costs.append(balance.columns.costs[:, 0].tolist()),
    }
    with build_loader(packed, None, LoaderConfig(seq_len=SEQ_LEN, repack=False), **build) as loader:
        next(loader)
    from evenstep.cost import DEFAULT_COST
    from evenstep.samples import MetadataTable

    rows = [[len(document) for document in row] for row in packed.rows[:4]]
    table = MetadataTable.from_samples([SampleMetadata(sum(row), documents=row) for row in rows])
    assert costs == [DEFAULT_COST.cost(table).reshape(-1).tolist()]


def test_known_lengths_give_the_same_whole_rows(corpus: Any) -> None:
    packed = Packed(corpus)
    world = SimulatedWorld(2)
    online = world.run(lambda plane: train(plane, packed, repack=False))
    known = world.run(lambda plane: train(plane, packed, known=True, repack=False))
    assert_same(known, online)


@pytest.mark.parametrize(
    "options", [{}, {"balance_window": 1}, {"accumulation_steps": "auto"}, {"num_workers": 2}]
)
def test_known_documents_are_repacked_as_if_they_had_been_read(corpus: Any, options: dict[str, Any]) -> None:
    packed, world = Packed(corpus), SimulatedWorld(2)
    online = world.run(lambda plane: train(plane, packed, **options))
    known = world.run(lambda plane: train(plane, packed, known=True, **options))
    assert_same(known, online)
    assert sum(group.bytes_moved for group in world.groups) > 0
    alone = SimulatedWorld(2)
    alone.run(lambda plane: train(plane, packed, known=True, **options))
    assert sum(group.bytes_moved for group in alone.groups) == 0


def test_repacking_needs_the_documents_before_planning(corpus: Any) -> None:
    message = (
        "explode with repack=True needs the documents of each sample before planning, which metadata does not give: "
        "pass them as the columns 'documents' and 'document_offsets', choose repack=False to keep the rows whole, or "
        "leave metadata out"
    )
    packed = Packed(corpus)
    sampler = StepSampler(len(packed), global_batch_size=4)
    lengths = [sum(map(len, row)) for row in packed.rows]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_loader(
            packed, None, LoaderConfig(seq_len=SEQ_LEN), sampler=sampler, explode=explode, metadata=lengths
        )


class Rows:
    """Packed rows of bare lengths; the last one cannot be read."""

    rows = ((3, 0, 4), (2,), (5, 1), (6,))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("no such block")
        return self.rows[index]


def open_row(row: Any) -> Any:
    return [{"input_ids": torch.full((n,), 10 + n)} for n in row]


def train_rows(metadata: Any, explode: Any = open_row, **options: Any) -> Any:
    config = LoaderConfig(seq_len=8, **options)
    sampler = StepSampler(4, global_batch_size=4, order="sequential")
    heard: list[Any] = []
    with build_loader(
        Rows(),
        None,
        config,
        sampler=sampler,
        explode=explode,
        metadata=metadata,
        on_balance=heard.append,
        pack=documents_of,
        collate=as_they_are,
    ) as loader:
        found = sorted(len(document) for rows in loader for row in rows for document in row)
        return found, heard[0].counts.dropped, heard[0].counts.truncated


def records(*rows: tuple[int, ...]) -> list[SampleMetadata]:
    return [SampleMetadata(sum(row), documents=row) for row in rows]


def test_documents_of_known_length_meet_the_policies() -> None:
    skipping = {"on_sample_error": "skip"}
    assert train_rows(records(*Rows.rows), **skipping) == ([1, 2, 3, 4, 5], 1, 0)
    with pytest.raises(
        RemoteRankError, match=re.escape("sample 0: it has no tokens, and empty='error' refuses")
    ):
        train_rows(records(*Rows.rows), empty="error")
    with pytest.raises(SampleError, match=re.escape("sample 3: OSError: no such block")):
        train_rows(records(*Rows.rows))


def test_a_known_row_that_cannot_be_opened_is_one_that_cannot_be_read() -> None:
    def fragile(row: Any) -> Any:
        if row == Rows.rows[2]:
            raise ValueError("not a packed row")
        return open_row(row)

    assert train_rows(records(*Rows.rows), fragile, on_sample_error="skip") == ([2, 3, 4], 1, 0)
    with pytest.raises(SampleError, match=r"^sample 2: ValueError: not a packed row$") as caught:
        train_rows(records(*Rows.rows[:3], (1,)), fragile)
    assert caught.value.sample == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            (3, 4),
            "sample 0 has 3 documents, its metadata says 2: the rows were planned for others. Compute the metadata from the "
            "dataset as it is now.",
        ),
        (
            (3, 0, 5),
            "document 2 of sample 0 has 4 tokens, its metadata says 5: the rows were planned for another length. Compute "
            "the metadata from the dataset as it is now.",
        ),
    ],
)
def test_documents_that_metadata_tells_otherwise_are_named(row: tuple[int, ...], message: str) -> None:
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$") as caught:
        train_rows(records(row, *Rows.rows[1:]), on_sample_error="skip")
    assert caught.value.sample == 0


def test_features_of_whole_samples_cannot_be_divided() -> None:
    message = (
        "metadata has the feature 'patches' of whole samples, but explode with repack=True plans their documents one by "
        "one: choose repack=False to keep the rows whole, or leave metadata out"
    )
    metadata = [SampleMetadata(sum(row), {"patches": 1.0}, documents=row) for row in Rows.rows]
    with pytest.raises(RemoteRankError, match=re.escape(message)):
        train_rows(metadata)


def test_local_steps_of_packed_rows_are_exploded_too(corpus: Any) -> None:
    packed = Packed(corpus)

    def rank(plane: DataPlane) -> list[Any]:
        mine = [packed[k] for k in range(plane.topology.dp_rank, len(packed) - 1, 2)]
        steps = [[[sample] for sample in mine[k : k + 2]] for k in range(0, len(mine) // 2 * 2, 2)]
        config = LoaderConfig(seq_len=SEQ_LEN)
        loader = build_loader(steps, plane, config, explode=explode, pack=documents_of, collate=as_they_are)
        with loader:
            return [row for batch in loader for row in batch]

    found = Counter(d for part in SimulatedWorld(2).run(rank) for row in part for d in row)
    used = len(packed) // 4 * 4
    expected = Counter(tuple(d.tolist()) for row in packed.rows[:used] for d in row)
    assert {key: found[key] for key in expected} == dict(expected)


def test_a_document_that_fails_takes_its_sample_along(corpus: Any) -> None:
    def fragile(sample: Any) -> Any:
        yield {"input_ids": sample["tokens"][:2]}
        if sample["ends"][0] == packed[1]["ends"][0]:
            raise OSError("half a row")
        yield {"input_ids": sample["tokens"][2:]}

    packed = Packed(corpus)
    config = LoaderConfig(seq_len=SEQ_LEN, on_sample_error="skip")
    sampler = StepSampler(4, global_batch_size=4, order="sequential")
    packed.rows = packed.rows[:4]
    heard: list[Any] = []
    with build_loader(
        packed, None, config, sampler=sampler, explode=fragile, on_balance=heard.append
    ) as loader:
        assert sum(batch["info"].num_samples for batch in loader) == 6
    assert heard[0].counts.skipped == 1
