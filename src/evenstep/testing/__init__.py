"""Tools to test evenstep, and code that uses it, on one machine."""

from __future__ import annotations

from evenstep.testing.outcomes import Outcome, RankDied, RanksFailed
from evenstep.testing.ranks import run_ranks, run_ranks_outcomes

__all__ = ["Outcome", "RankDied", "RanksFailed", "run_ranks", "run_ranks_outcomes"]
