"""Optimizer steps of a dataset, sampled evenly over an epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstep.cost import MarginalCost, checked_costs, padding_cost
from evenstep.samples import MetadataTable
from evenstep.sampling import TokenBudgetSampler
from evenstep.simulate.settings import Settings

__all__ = ["SampledStep", "sampled_steps"]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One optimizer step: its documents, and their rows in two layouts that are not balanced.

    Attributes:
        tokens: int64 ``[n]``.
        costs: float64 ``[n]``; where padding is computed too, what a document costs more than padding.
        sampler: Row of each document where `TokenBudgetSampler` puts it, int32 ``[n]``.
        shuffled: The same rows in random order, int32 ``[n]``.
    """

    tokens: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    sampler: npt.NDArray[np.int32]
    shuffled: npt.NDArray[np.int32]


def sampled_steps(lengths: npt.NDArray[np.int64], settings: Settings, dp_size: int) -> list[SampledStep]:
    """Up to ``settings.steps`` steps of different documents; none if the documents do not fill one.

    Raises:
        ValueError: Every document costs 0.
    """
    rows = settings.rows(dp_size)
    if int(lengths.sum()) < rows * settings.seq_len * (settings.fill or 0.5) or len(lengths) < rows:
        return []
    try:
        sampler = TokenBudgetSampler(
            lengths,
            rows_per_step=rows,
            seq_len=settings.seq_len,
            order=settings.order,
            seed=settings.seed,
            fill=settings.fill,
        )
    except ValueError:  # all else was checked: one row less would hold everything
        return []
    model = MarginalCost(settings.cost) if padding_cost(settings.cost).any() else settings.cost
    cursor = sampler.start()
    found: list[SampledStep] = []
    spread = 0
    while len(found) < settings.steps and (step := sampler.step_at(cursor)) is not None:
        if not found:
            # As far apart as the epoch allows; 1.5 steps are left for the last one, whose size is not known yet.
            room = len(lengths) - 3 * len(step.indices) // 2
            spread = max(0, room // max(settings.steps - 1, 1))
        tokens = lengths[step.indices]
        costs = checked_costs(model, MetadataTable.from_tokens(tokens))
        if not costs.any():
            raise ValueError(f"every document costs 0 under {settings.cost!r}: there is nothing to balance")
        dealt = np.random.default_rng((settings.seed, len(found))).permutation(rows).astype(np.int32)
        found.append(SampledStep(tokens, costs, sampler=step.rows, shuffled=dealt[step.rows]))
        consumed = max(step.next_cursor.consumed_samples, len(found) * spread)
        cursor = replace(step.next_cursor, consumed_samples=consumed)
    return found
