"""How balanced a window was before and after planning, computed when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.comm.columns import Columns
from evenstep.nodes.items import Counts, Place
from evenstep.plan import Plan, efficiency, imbalance

__all__ = ["Balance", "RowStatistics"]


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """One entry per row of a window, in flat order ``(micro_batch * dp_size + dp_rank) * rows + row``.

    Attributes:
        samples: int64 ``[rows]``.
        tokens: int64 ``[rows]``.
        padding: Tokens of capacity left empty, int64 ``[rows]``.
        cost: Predicted cost summed over stages, float64 ``[rows]``.
    """

    samples: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    padding: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, repr=False)
class Balance:
    """The balance of one planned window of one balance group.

    Attributes:
        place: Where the window stands.
        columns: Metadata of its samples.
        reference: Flat reference row of each sample, int32 ``[n]``.
        holders: Dp rank (inside the group) that held each sample, int32 ``[n]``; None where nothing moves.
        plan: The plan.
        seq_len: Capacity of a row.
        counts: Samples left out of it or cut.
    """

    place: Place
    columns: Columns
    reference: npt.NDArray[np.int32]
    holders: npt.NDArray[np.int32] | None
    plan: Plan
    seq_len: int
    counts: Counts = field(default_factory=Counts)

    @property
    def step(self) -> int:
        """Optimizer step of the window."""
        return self.place.start.step

    @property
    def micro_batch(self) -> int:
        """First micro-batch of the window inside the step."""
        return self.place.first

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the window."""
        return self.plan.micro_batches

    @property
    def efficiency(self) -> float:
        """Predicted sum of mean rank costs over sum of makespans, as planned."""
        return efficiency(self.plan.loads)

    @property
    def imbalance(self) -> float:
        """Predicted sum of makespans over sum of mean rank costs, as planned."""
        return imbalance(self.plan.loads)

    @property
    def reference_efficiency(self) -> float:
        """The same of the reference layout."""
        return efficiency(self.reference_loads)

    @property
    def reference_loads(self) -> npt.NDArray[np.float64]:
        """Cost of each rank in the reference layout, float64 ``[micro_batches, dp_size, stages]``."""
        plan = self.plan
        rank = self.reference // plan.rows
        # The reference of an "auto" step may have more micro-batches than its plan.
        micro_batches = max(plan.micro_batches, int(rank.max(initial=0)) // plan.dp_size + 1)
        size = micro_batches * plan.dp_size
        stages = [np.bincount(rank, weights=cost, minlength=size) for cost in self.columns.costs.T]
        loads: npt.NDArray[np.float64] = np.stack(stages, axis=-1)
        return loads.reshape(micro_batches, plan.dp_size, -1)

    @property
    def spread(self) -> float:
        """(largest - smallest) / mean of what the window costs a dp rank, as planned; 0 where it costs nothing."""
        return _spread(self.plan.loads)

    @property
    def reference_spread(self) -> float:
        """The same of the reference layout."""
        return _spread(self.reference_loads)

    @property
    def gain(self) -> float:
        """Relative gain of the objective over the reference layout."""
        return self.plan.decision.gain

    @property
    def moved_samples(self) -> int:
        """Samples that changed their dp rank."""
        return self.plan.decision.moved_samples

    @property
    def moved_tokens(self) -> int:
        """Their tokens."""
        return self.plan.decision.moved_tokens

    @property
    def moved_bytes(self) -> int:
        """Their encoded size; 0 where nothing moves."""
        if self.holders is None:
            return 0
        return int(self.columns.nbytes[self.holders != self.plan.rank_of].sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of the window."""
        return int(self.columns.tokens.sum())

    @property
    def num_padding(self) -> int:
        """Tokens of capacity left empty in the window."""
        return int(self.rows(planned=True).padding.sum())

    @property
    def sent(self) -> npt.NDArray[np.int64]:
        """Samples that each dp rank sent, int64 ``[dp_size]``."""
        return self._travelled(outgoing=True)

    @property
    def received(self) -> npt.NDArray[np.int64]:
        """Samples that each dp rank received, int64 ``[dp_size]``."""
        return self._travelled(outgoing=False)

    def _travelled(self, *, outgoing: bool) -> npt.NDArray[np.int64]:
        if self.holders is None:
            return np.zeros(self.plan.dp_size, dtype=np.int64)
        target = self.plan.rank_of
        moved = self.holders != target
        ends = self.holders if outgoing else target
        return np.bincount(ends[moved], minlength=self.plan.dp_size)

    def rows(self, *, planned: bool) -> RowStatistics:
        """Statistics of each row, as planned or as in the reference layout."""
        flat = self.plan.assignment if planned else self.reference
        number = self.plan.micro_batches * self.plan.dp_size * self.plan.rows
        number = max(number, int(flat.max(initial=-1)) + 1)
        tokens = np.bincount(flat, weights=self.columns.tokens, minlength=number).astype(np.int64)
        return RowStatistics(
            samples=np.bincount(flat, minlength=number),
            tokens=tokens,
            padding=np.maximum(self.seq_len - tokens, 0),
            cost=np.bincount(flat, weights=self.columns.costs.sum(axis=1), minlength=number).astype(
                np.float64
            ),
        )

    def __repr__(self) -> str:
        """The scalars: the arrays of a window would fill screens."""
        return f"Balance({', '.join(f'{name}={_short(value)}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """Scalars for a log or a tracker."""
        return {
            "step": self.step,
            "micro_batch": self.micro_batch,
            "efficiency": self.efficiency,
            "imbalance": self.imbalance,
            "reference_efficiency": self.reference_efficiency,
            "spread": self.spread,
            "reference_spread": self.reference_spread,
            "gain": self.gain,
            "moved_samples": self.moved_samples,
            "moved_tokens": self.moved_tokens,
            "moved_bytes": self.moved_bytes,
            "num_tokens": self.num_tokens,
            "num_padding": self.num_padding,
            "dropped": self.counts.dropped,
            "skipped": self.counts.skipped,
            "truncated": self.counts.truncated,
            "algorithm": self.plan.decision.algorithm,
        }

    def scalars(self, prefix: str = "balance/") -> dict[str, float]:
        """The numbers of `to_dict` by name, as trackers take them; the step is `step`.

        ``wandb.log(balance.scalars(), step=balance.step)``, or ``writer.add_scalar(name, value, balance.step)`` for each.
        """
        told = self.to_dict()
        left_out = ("step", "micro_batch", "algorithm")
        return {f"{prefix}{name}": float(value) for name, value in told.items() if name not in left_out}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _spread(loads: npt.NDArray[np.float64]) -> float:
    ranks = loads.reshape(*loads.shape[:2], -1).sum(axis=(0, 2))
    mean = float(ranks.mean())
    return float(ranks.max() - ranks.min()) / mean if mean else 0.0
