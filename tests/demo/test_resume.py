from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evenstep.demo.records import StepRecord
from evenstep.demo.resume import Ledger, audit, write_ledger
from evenstep.demo.settings import Settings

LENGTHS = [4, 0, 3, 5, 2, 6, 1, 0, 4, 4, 7, 2, 3, 9, 12, 1, 1, 5]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(ranks=2, out=tmp_path, seq_len=8, micro_batches=1)
    settings.tokens.mkdir()
    offsets = np.concatenate(([0], np.cumsum(LENGTHS)))
    np.save(settings.tokens / "offsets.npy", offsets)
    np.save(settings.tokens / "tokens.npy", np.zeros(offsets[-1], dtype=np.uint16))
    meta = {"vocabulary": 10, "bytes": 100, "undecodable": 0}
    (settings.tokens / "meta.json").write_text(json.dumps(meta))
    return settings


Records = list[StepRecord]


@pytest.fixture
def records(settings: Settings, make_record: Callable[..., StepRecord]) -> Records:
    """Steps 0 and 1 as the sampler has them, empty samples left out."""
    pieces = settings.dataset()
    sampler, records = settings.sampler(pieces), []
    cursor = sampler.start()
    for number in range(2):
        step = sampler.step_at(cursor)
        assert step is not None
        rows = [
            {int(i): int(pieces.lengths[i]) for i in step.indices[step.rows == row] if pieces.lengths[i]}
            for row in range(2)
        ]
        records.append(make_record([[1, 1]], step=number, samples=[rows]))
        cursor = step.next_cursor
    return records


def test_every_sample_once(settings: Settings, records: Records) -> None:
    samples = sum(len(samples) for record in records for row in record.samples for samples in row)
    ledger = audit(settings, records)
    assert ledger == Ledger(expected=samples, trained=samples, skipped=[], repeated=[], foreign=[])
    assert ledger.exact


def test_a_skipped_a_repeated_and_a_foreign_sample_are_named(settings: Settings, records: Records) -> None:
    first = records[0].samples[0]
    skipped, _ = first[0].popitem()
    repeated = next(iter(first[1]))
    records[1].samples[0][0][repeated] = 1
    foreign = 10_000
    records[1].samples[0][1][foreign] = 1
    ledger = audit(settings, records)
    assert (ledger.skipped, ledger.repeated, ledger.foreign) == ([skipped], [repeated], [foreign])
    assert not ledger.exact


def test_an_unfinished_step_is_missed(settings: Settings, records: Records) -> None:
    records[1].samples[0][0].clear()
    assert not audit(settings, records).exact


def test_the_ledger_on_disk(make_record: Callable[..., StepRecord], tmp_path: Path) -> None:
    record = make_record([[1, 1]], step=4, samples=[[{3: 9, 1: 2}, {7: 1}]])
    write_ledger(tmp_path / "ledger.jsonl", [record])
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 4, "micro_batch": 0, "dp_rank": 0, "dp_size": 2, "samples": [3, 1]},
        {"step": 4, "micro_batch": 0, "dp_rank": 1, "dp_size": 2, "samples": [7]},
    ]
