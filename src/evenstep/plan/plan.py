"""What planning decided and why: where each sample of a window goes, in numbers and in words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.plan import metrics

__all__ = ["Decision", "Plan", "digest_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which candidate won a window, and why.

    Attributes:
        algorithm: The layout taken: ``"lpt"``, ``"levels"``, ``"refine"``, for small windows also ``"exact"`` or
            ``"differencing"``, or ``"reference"`` when it was kept.
        reason: One sentence on why it was taken.
        original: Score of the reference layout; None without one.
        candidate: Best score found by the algorithms (the unit of the costs for makespans); None if all failed.
        gain: ``(original - candidate) / original``; 0 without a reference layout or where it scores 0.
        scores: Score of each candidate.
        failures: Why a candidate failed, by algorithm.
        lower_bound: No plan of this window scores less; 0 where the objective has no bound.
        floor_sample: Position of the sample whose cost alone sets the floor of a micro-batch; -1 if none does.
        moved_samples: Samples that leave the dp rank that holds them.
        moved_tokens: Their tokens.
        moved_bytes: Their payload, or 0 if ``payload_bytes`` was not given.
        num_samples: Samples in the window.
        num_tokens: Their tokens.
        advice: What would help beyond this plan, in words; empty if nothing would.
    """

    algorithm: str
    reason: str
    original: float | None = None
    candidate: float | None = None
    gain: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    lower_bound: float = 0.0
    floor_sample: int = -1
    moved_samples: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    advice: str = ""

    def explain(self) -> str:
        """The decision as a few sentences for a log or a report."""
        parts = [self.reason]
        if self.moved_samples:
            share = self.moved_tokens / self.num_tokens if self.num_tokens else 0.0
            parts.append(
                f"{self.moved_samples} of {self.num_samples} samples ({share:.1%} of the tokens) change their rank."
            )
        parts += [f"{name} failed: {why}." for name, why in sorted(self.failures.items())]
        if self.advice:
            parts.append(self.advice)
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each sample of one window goes.

    Attributes:
        assignment: Flat row of each sample, int32 ``[n]``: ``(micro_batch * dp_size + dp_rank) * rows + row``.
        loads: Cost of each rank's micro-batch in the unit of the costs, float64 ``[micro_batches, dp_size]``, or
            ``[micro_batches, dp_size, stages]`` for vector costs.
        decision: Which candidate won, and why.
        digest: 8 bytes that differ when the assignment or anything that decides it differs; in ``[1, 2**64)``.
        dp_size: Data-parallel ranks.
        micro_batches: Micro-batches of the window on every rank.
        rows: Rows of one rank's micro-batch.
    """

    assignment: npt.NDArray[np.int32]
    loads: npt.NDArray[np.float64]
    decision: Decision
    digest: int
    dp_size: int
    micro_batches: int
    rows: int

    @property
    def imbalance(self) -> float:
        """Sum of makespans over sum of means; 1 is perfect."""
        return metrics.imbalance(self.loads)

    @property
    def efficiency(self) -> float:
        """Sum of means over sum of makespans; 1 is perfect."""
        return metrics.efficiency(self.loads)

    @property
    def micro_batch_of(self) -> npt.NDArray[np.int32]:
        """Micro-batch of each sample, int32 ``[n]``."""
        return np.asarray(self.assignment // (self.dp_size * self.rows), dtype=np.int32)

    @property
    def rank_of(self) -> npt.NDArray[np.int32]:
        """Dp rank of each sample, int32 ``[n]``."""
        return metrics.rank_of(self.assignment, dp_size=self.dp_size, rows=self.rows)

    @property
    def row_of(self) -> npt.NDArray[np.int32]:
        """Row of each sample inside its rank's micro-batch, int32 ``[n]``."""
        return np.asarray(self.assignment % self.rows, dtype=np.int32)


def digest_of(*parts: npt.NDArray[Any] | str | None) -> int:
    """8 bytes of arrays (little-endian values) and texts; never 0, which means "no plan under way"."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            little = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            head, body = f"{little.dtype.str}{little.shape}", little.tobytes()
        else:
            head, body = repr(part), b""
        digest.update(f"{len(head)}:{head}".encode())
        digest.update(body)
    return int.from_bytes(digest.digest(), "little") or 1
