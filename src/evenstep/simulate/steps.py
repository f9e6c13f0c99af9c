"""Optimizer steps of a dataset, sampled evenly over an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstep.cost import MarginalCost, checked_costs, padding_cost
from evenstep.demo.greedy import GreedySampler
from evenstep.samples import MetadataTable
from evenstep.sampling import TokenBudgetSampler
from evenstep.simulate.settings import Settings

__all__ = ["GREEDY", "SAMPLER", "SHUFFLED", "SampledStep", "sampled_steps"]

SHUFFLED = "shuffled rows"
SAMPLER = "sampler's rows"
GREEDY = "greedy rows"


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One optimizer step: its documents, and their rows in layouts that are not balanced.

    Attributes:
        tokens: int64 ``[n]``.
        costs: float64 ``[n]``; where padding is computed too, what a document costs more than padding.
        layouts: Row of each document, int32 ``[n]``, by name: where `TokenBudgetSampler` puts it (`SAMPLER`) and the same
            rows in random order (`SHUFFLED`), or rows as a greedy loader fills them (`GREEDY`). The first is compared with.
    """

    tokens: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    layouts: Mapping[str, npt.NDArray[np.int32]]


def sampled_steps(lengths: npt.NDArray[np.int64], settings: Settings, dp_size: int) -> list[SampledStep]:
    """Up to ``settings.steps`` steps of different documents; none if the documents do not fill one.

    Raises:
        ValueError: Every document costs 0.
    """
    rows = settings.rows(dp_size)
    if int(lengths.sum()) < rows * settings.seq_len * (settings.fill or 0.5) or len(lengths) < rows:
        return []
    sampler = _sampler(lengths, settings, rows)
    if sampler is None:
        return []
    model = MarginalCost(settings.cost) if padding_cost(settings.cost).any() else settings.cost
    cursor = sampler.start()
    found: list[SampledStep] = []
    spread = 0
    while len(found) < settings.steps and (step := sampler.step_at(cursor)) is not None:
        if not found and not settings.consecutive:
            # As far apart as the epoch allows; 1.5 steps are left for the last one, whose size is not known yet.
            room = len(lengths) - 3 * len(step.indices) // 2
            spread = max(0, room // max(settings.steps - 1, 1))
        with_tokens = lengths[step.indices] > 0
        tokens, row = lengths[step.indices][with_tokens], step.rows[with_tokens]
        costs = checked_costs(model, MetadataTable.from_tokens(tokens))
        if not costs.any():
            raise ValueError(f"every document costs 0 under {settings.cost!r}: there is nothing to balance")
        if settings.reference == "greedy":
            layouts = {GREEDY: row}
        else:
            dealt = np.random.default_rng((settings.seed, len(found))).permutation(rows).astype(np.int32)
            layouts = {SHUFFLED: dealt[row], SAMPLER: row}
        found.append(SampledStep(tokens, costs, layouts))
        consumed = max(step.next_cursor.consumed_samples, len(found) * spread)
        cursor = replace(step.next_cursor, consumed_samples=consumed)
    return found


def _sampler(
    lengths: npt.NDArray[np.int64], settings: Settings, rows: int
) -> TokenBudgetSampler | GreedySampler | None:
    """None if the documents fill no step."""
    if settings.reference == "greedy":
        return GreedySampler(lengths, rows_per_step=rows, seq_len=settings.seq_len, seed=settings.seed)
    try:
        return TokenBudgetSampler(
            lengths,
            rows_per_step=rows,
            seq_len=settings.seq_len,
            order=settings.order,
            seed=settings.seed,
            fill=settings.fill,
        )
    except ValueError:  # all else was checked: one row less would hold everything
        return None
