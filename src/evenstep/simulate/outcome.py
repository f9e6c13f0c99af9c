"""What a simulation found out, as plain records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenstep.simulate.settings import Settings, Sync

__all__ = ["Outcome", "Simulation", "StepPicture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one layout of the same sampled steps does.

    Attributes:
        dp_size: Data-parallel ranks.
        layout: `SHUFFLED` (the packed rows in random order, as a loader deals them that packs but does not
            balance), `SAMPLER` (where `TokenBudgetSampler` puts them), `GREEDY` (as documents come, dealt to the ranks in
            turn) or a planning algorithm.
        window: Micro-batches planned together; 0 where nothing is planned.
        efficiency: Sum of mean rank costs over sum of makespans; 1 is perfect.
        speedup: How many times faster the steps are than in the layout that is compared with (`SHUFFLED` or `GREEDY`);
            predicted from costs.
        slowest: ``speedup`` of the sampled step with the smallest one.
        fastest: ``speedup`` of the sampled step with the largest one.
        padding: Share of the rows' places that no token takes.
        moved_tokens: Share of the tokens that leave the dp rank that reads them.
        moved_bytes: Their payload in a step, over all ranks.
        plan_seconds: Median time of planning one window.
        bound_share: Lower bound over sum of makespans: 1 means that no layout within these windows is faster;
            None where no bound is known.
        steps: Sampled steps.
        windows: Planned windows.
    """

    dp_size: int
    layout: str
    window: int
    efficiency: float
    speedup: float
    slowest: float
    fastest: float
    padding: float
    moved_tokens: float = 0.0
    moved_bytes: float = 0.0
    plan_seconds: float = 0.0
    bound_share: float | None = None
    steps: int
    windows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """Rank costs of one step before (in the layout `baseline`) and after, float64 ``[micro_batches, dp_size]``."""

    sync: Sync
    dp_size: int
    window: int
    algorithm: str
    baseline: str
    before: npt.NDArray[np.float64]
    after: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Everything that was found out about one file of lengths.

    Attributes:
        settings: What was simulated.
        documents: Documents in the file.
        empty: Documents without tokens, left out.
        oversized: Documents longer than a row.
        tokens: Tokens that take part.
        outcomes: One per dp size, layout and window.
        picture: The first step of the largest dp size up to 64 (or of the smallest above).
        skipped: Why a dp size was left out, in words.
    """

    settings: Settings
    documents: int
    empty: int
    oversized: int
    tokens: int
    outcomes: tuple[Outcome, ...]
    picture: StepPicture
    skipped: tuple[str, ...] = ()

    def best(self, dp_size: int) -> Outcome:
        """The planned layout with the largest speed-up; among nearly equal ones, that of the smallest window."""
        planned = [o for o in self.outcomes if o.dp_size == dp_size and o.window]
        enough = 0.995 * max(o.speedup for o in planned)
        return min((o for o in planned if o.speedup >= enough), key=lambda o: (o.window, -o.speedup))

    def unplanned(self, dp_size: int) -> tuple[Outcome, ...]:
        """The layouts that nobody planned; speed-ups are relative to the first."""
        return tuple(o for o in self.outcomes if o.dp_size == dp_size and not o.window)
