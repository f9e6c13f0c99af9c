"""Goes on from the middle of training on another number of ranks, and follows every sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import evenstep
from evenstep.cost import LinearQuadraticCost
from evenstep.demo.records import StepRecord
from evenstep.demo.settings import Settings
from evenstep.demo.train import Trainer, build_model, data_parallel_mesh, gather, open_loader

__all__ = ["Ledger", "audit", "resume", "save", "write_ledger"]


def save(path: Path, trainer: Trainer, loader: evenstep.Loader[Any]) -> None:
    """Keep all that training needs to go on; the loader's part is one small cursor, the same on every rank."""
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "loader": loader.state_dict(),
    }
    torch.save(state, path)


def resume(settings: Settings, cost: LinearQuadraticCost) -> list[StepRecord]:
    """Run by every rank of the second launch; the records are on rank 0, the list is empty elsewhere."""
    pieces, mesh = settings.dataset(), data_parallel_mesh()
    trainer = Trainer(build_model(settings, pieces), settings, cost)
    state = torch.load(settings.checkpoint, weights_only=True)
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    records: list[StepRecord] = []
    with open_loader(settings, mesh, pieces, cost, "auto") as loader:
        loader.load_state_dict(state["loader"])
        batches = iter(loader)
        for _ in range(settings.resumed_steps):
            records.extend(gather(trainer.step(batches)))
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What became of the samples of the part of the epoch that was trained.

    Attributes:
        expected: Samples with tokens in these steps, by the sampler alone.
        trained: Samples that went into an optimizer step.
        skipped: Expected samples that did not.
        repeated: Samples that went in more than once.
        foreign: Samples that belong to no such step.
    """

    expected: int
    trained: int
    skipped: list[int]
    repeated: list[int]
    foreign: list[int]

    @property
    def exact(self) -> bool:
        """Every sample exactly once, none skipped."""
        return not (self.skipped or self.repeated or self.foreign) and self.expected > 0


def audit(settings: Settings, records: Sequence[StepRecord]) -> Ledger:
    """Compare the samples of ``records`` (of the steps from 0 on) with those that the sampler names."""
    pieces = settings.dataset()
    sampler = settings.sampler(pieces)
    expected: set[int] = set()
    cursor = sampler.start()
    for _ in records:
        step = sampler.step_at(cursor)
        assert step is not None, "a step was trained that the sampler does not have"
        expected.update(step.indices[pieces.lengths[step.indices] > 0].tolist())
        cursor = step.next_cursor
    trained = Counter(
        sample
        for record in records
        for micro_batch in record.samples
        for samples in micro_batch
        for sample in samples
    )
    return Ledger(
        expected=len(expected),
        trained=trained.total(),
        skipped=sorted(expected - trained.keys()),
        repeated=sorted(sample for sample, times in trained.items() if times > 1),
        foreign=sorted(trained.keys() - expected),
    )


def write_ledger(path: Path, records: Sequence[StepRecord]) -> None:
    """One line per step, micro-batch and rank: the indices of the samples that were trained there."""
    with path.open("w") as file:
        for record in records:
            for m, micro_batch in enumerate(record.samples):
                for rank, samples in enumerate(micro_batch):
                    line = {
                        "step": record.step,
                        "micro_batch": m,
                        "dp_rank": rank,
                        "dp_size": len(micro_batch),
                        "samples": list(samples),
                    }
                    file.write(json.dumps(line) + "\n")
