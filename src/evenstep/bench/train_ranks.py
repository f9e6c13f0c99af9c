"""Trains the same documents in every layout, on real ranks, in turns: run by each rank of `evenstep bench train`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import evenstep
from evenstep.bench.train_layouts import (
    by_length,
    deal,
    micro_batches,
    packed_batch,
    packed_rows,
    padded_batch,
)
from evenstep.cost import LinearQuadraticCost
from evenstep.demo.calibrate import calibrate
from evenstep.demo.records import LocalStep, StepRecord
from evenstep.demo.settings import Settings
from evenstep.demo.tokens import Pieces
from evenstep.demo.train import Batch, Trainer, build_model, data_parallel_mesh, gather, metadata_of
from evenstep.packing import collate_varlen
from evenstep.samples import BatchInfo

__all__ = ["EVENSTEP", "LAYOUTS", "Contest", "Trained", "train_all"]

PADDED, PACKED, GROUPED, EVENSTEP = "padded", "packed per rank", "length-grouped", "evenstep"
LAYOUTS = (PADDED, PACKED, GROUPED, EVENSTEP)
Step = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What every rank must know.

    Attributes:
        settings: Of the model, the tokens on disk, and a row.
        micro_batch_size: Rows of a micro-batch, or documents where each is a row.
        documents: Documents of an optimizer step.
        steps: Optimizer steps of a round; length-grouped batches are formed inside one.
        rounds: Rounds that count. One step of each layout comes before them.
    """

    settings: Settings
    micro_batch_size: int
    documents: int
    steps: int
    rounds: int

    def sampler(self, pieces: Pieces) -> evenstep.StepSampler:
        """The stream of documents that every layout trains on."""
        return evenstep.StepSampler(len(pieces), global_batch_size=self.documents, seed=self.settings.seed)

    def schedule(self, pieces: Pieces) -> list[list[Step]]:
        """Documents that have tokens, by round and step; the round of one step that warms up is the first.

        Raises:
            ValueError: The corpus is too small.
        """
        available, needed = len(pieces) // self.documents, 1 + self.rounds * self.steps
        if available < needed:
            raise ValueError(
                f"the corpus has {available} optimizer steps of {self.documents} documents, but {needed} are "
                "trained; name more text with --corpus, or ask for fewer --rounds or --documents"
            )
        sampler = self.sampler(pieces)
        cursor = sampler.start()
        steps = []
        for _ in range(needed):
            step = sampler.step_at(cursor)
            assert step is not None, "one epoch has them all"
            steps.append(step.indices[pieces.lengths[step.indices] > 0].tolist())
            cursor = step.next_cursor
        return [steps[:1]] + [steps[at : at + self.steps] for at in range(1, needed, self.steps)]


@dataclass(frozen=True, slots=True)
class Trained:
    """An optimizer step, and the processor seconds of all threads of all ranks in it."""

    record: StepRecord
    processor: float


class _Layout:
    """A trainer of its own, and where its batches come from."""

    def __init__(self, trainer: Trainer, batches: Iterator[Batch], settle: Callable[[], object]) -> None:
        self._trainer = trainer
        self._batches = batches
        self._settle = settle

    def step(self) -> list[Trained]:
        """One optimizer step, on rank 0; it ends when all that was prepared beside it is ready."""
        dist.barrier()
        begin, begin_processor = time.perf_counter(), time.process_time()
        local: LocalStep = self._trainer.step(self._batches)
        self._settle()
        seconds, processor = time.perf_counter() - begin, torch.tensor(time.process_time() - begin_processor)
        dist.all_reduce(processor)
        return [Trained(record, float(processor)) for record in gather(replace(local, seconds=seconds))]


def train_all(contest: Contest) -> list[dict[str, list[Trained]]]:
    """Every round in every layout; the records, by round and layout, are on rank 0, nothing elsewhere.

    The layouts take turns step by step, in an order that rotates: whatever else the machine does meets all alike.
    """
    settings, mesh = contest.settings, data_parallel_mesh()
    pieces = settings.dataset()
    schedule = contest.schedule(pieces)
    models = [build_model(settings, pieces) for _ in LAYOUTS]
    fitted = calibrate(models[0], settings.seq_len)
    cost = LinearQuadraticCost(fitted.a, fitted.b)
    trainers = dict(zip(LAYOUTS, (Trainer(model, settings, cost) for model in models), strict=True))
    rounds = []
    with _open_loader(contest, mesh, pieces, cost) as loader:
        layouts = {
            name: _Layout(trainers[name], _batches(name, schedule, contest, pieces), _nothing)
            for name in LAYOUTS[:-1]
        }
        layouts[EVENSTEP] = _Layout(trainers[EVENSTEP], iter(loader), loader.wait_for_prefetch)
        turn = 0
        for steps in schedule:
            records: dict[str, list[Trained]] = {name: [] for name in LAYOUTS}
            for _ in steps:
                for place in range(len(LAYOUTS)):
                    name = LAYOUTS[(turn + place) % len(LAYOUTS)]
                    records[name] += layouts[name].step()
                turn += 1
            rounds.append(records)
    return rounds if dist.get_rank() == 0 else []


def _nothing() -> None:
    """The data of a loop that reads for itself is never ahead."""


def _open_loader(
    contest: Contest, mesh: DeviceMesh, pieces: Pieces, cost: LinearQuadraticCost
) -> evenstep.Loader[Any]:
    """What a user writes: lengths are found by reading, documents move between the ranks."""
    return evenstep.build_loader(
        pieces,
        mesh,
        evenstep.LoaderConfig(
            seq_len=contest.settings.seq_len,
            micro_batch_size=contest.micro_batch_size,
            accumulation_steps="auto",
        ),
        sampler=contest.sampler(pieces),
        metadata_fn=metadata_of,
        collate=collate_varlen,
        cost=cost,
    )


def _batches(
    name: str, schedule: list[list[Step]], contest: Contest, pieces: Pieces
) -> Iterator[dict[str, Any]]:
    """The micro-batches of this rank in the layout ``name``, read when they are asked for."""
    number = 0
    for steps in schedule:
        if name == GROUPED:
            steps = _regrouped(steps, pieces)
        for step in steps:
            yield from _step_batches(name, step, number, contest, pieces)
            number += 1


def _regrouped(steps: list[Step], pieces: Pieces) -> list[Step]:
    """The documents of a round, sorted by length and cut into as many steps."""
    documents = by_length(pieces.lengths, [document for step in steps for document in step])
    bounds = np.linspace(0, len(documents), len(steps) + 1).astype(int)
    return [documents[a:b] for a, b in pairwise(bounds)]


def _step_batches(
    name: str, step: Step, number: int, contest: Contest, pieces: Pieces
) -> Iterator[dict[str, Any]]:
    seq_len = contest.settings.seq_len
    rows = [[document] for document in deal(step, dist.get_rank(), dist.get_world_size())]
    if name == PACKED:
        generator = np.random.default_rng((contest.settings.seed, number, dist.get_rank()))
        rows = packed_rows(pieces.lengths, [row[0] for row in rows], seq_len, generator)
    mine = micro_batches(rows, contest.micro_batch_size)
    most = torch.tensor(len(mine))
    dist.all_reduce(most, dist.ReduceOp.MAX)  # ranks with fewer wait, as the reduction of gradients demands
    count = int(most)
    for at in range(count):
        samples = [[pieces[document] for document in row] for row in (mine[at] if at < len(mine) else [])]
        flat = [sample for row in samples for sample in row]
        lengths = [len(sample["input_ids"]) for sample in flat]
        info = BatchInfo(
            step=number,
            micro_batch=at,
            num_micro_batches=count,
            is_last_micro_batch=at == count - 1,
            num_samples=len(flat),
            num_tokens=sum(lengths),
            num_padding=0 if name == PACKED else len(flat) * max(lengths, default=0) - sum(lengths),
            num_loss_tokens=None,
            step_loss_tokens=int(pieces.lengths[step].sum()) - len(step),
        )
        yield packed_batch(samples, info, seq_len) if name == PACKED else padded_batch(flat, info)
