"""Trains the same steps in the reference layout and balanced, then stops in the middle of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from evenstep.cost import LinearQuadraticCost
from evenstep.demo.calibrate import calibrate
from evenstep.demo.checks import core_share
from evenstep.demo.records import StepRecord
from evenstep.demo.resume import save
from evenstep.demo.settings import Settings
from evenstep.demo.tables import print_busy, print_heading, print_pair
from evenstep.demo.train import Trainer, build_model, data_parallel_mesh, gather, open_loader

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the ranks found.

    Attributes:
        cost: The cost model that was fitted, in seconds.
        reference: Steps in the reference layout, those after the stop included.
        balanced: The same steps balanced, up to the stop.
        given_up: Micro-batches that had been trained of the step that the stop cut off.
    """

    cost: LinearQuadraticCost
    reference: list[StepRecord]
    balanced: list[StepRecord]
    given_up: int


def compare(settings: Settings) -> Comparison | None:
    """Run by every rank; the result is on rank 0.

    The two layouts take turns, step by step, each first in every other pair: whatever else the machine does
    meets both alike.
    """
    pieces, mesh = settings.dataset(), data_parallel_mesh()
    models = [build_model(settings, pieces) for _ in range(2)]
    fitted = calibrate(models[0], settings.seq_len)
    cost = LinearQuadraticCost(fitted.a, fitted.b)
    reference, balanced = (Trainer(model, settings, cost) for model in models)
    before: list[StepRecord] = []
    after: list[StepRecord] = []
    with (
        open_loader(settings, mesh, pieces, cost, "reference") as reference_loader,
        open_loader(settings, mesh, pieces, cost, "auto") as balanced_loader,
    ):
        turns = [
            (reference, iter(reference_loader), before),
            (balanced, iter(balanced_loader), after),
        ]
        first = dist.get_rank() == 0
        if first:
            print_heading(cost)
        for pair in range(settings.compared_steps):
            for trainer, batches, records in turns if pair % 2 == 0 else turns[::-1]:
                records.extend(gather(trainer.step(batches)))
            if first:
                print_pair(before[-1], after[-1])
        if first:
            print_busy(core_share([*before, *after]))
        for _ in range(settings.resumed_steps):
            before.extend(gather(reference.step(turns[0][1])))
        given_up = settings.micro_batches // 2
        for _, batch in zip(range(given_up), turns[1][1], strict=False):
            balanced.micro_batch(batch)
        if first:
            save(settings.checkpoint, balanced, balanced_loader)
    if not first:
        return None
    return Comparison(cost=cost, reference=before, balanced=after, given_up=given_up)
