"""Where each sample of a window goes: pure functions on NumPy arrays, no I/O, no clock, no random state.

Arguments and plans can be pickled, so where steps are so short that a plan of some 30 ms beside them counts, plan in
another process: ``ProcessPoolExecutor(1, mp_context=get_context("forkserver")).submit(plan_window, ...)``.
"""

from evenstep.errors import Infeasible
from evenstep.plan.accumulation import reference_layout
from evenstep.plan.constraints import PackingConstraints
from evenstep.plan.metrics import (
    efficiency,
    fill,
    imbalance,
    moved,
    rank_of,
    sum_of_makespans,
    sum_of_means,
)
from evenstep.plan.objective import Objective
from evenstep.plan.plan import Decision, Plan
from evenstep.plan.planner import Algorithm, lower_bound, plan_window

__all__ = [
    "Algorithm",
    "Decision",
    "Infeasible",
    "Objective",
    "PackingConstraints",
    "Plan",
    "efficiency",
    "fill",
    "imbalance",
    "lower_bound",
    "moved",
    "plan_window",
    "rank_of",
    "reference_layout",
    "sum_of_makespans",
    "sum_of_means",
]
