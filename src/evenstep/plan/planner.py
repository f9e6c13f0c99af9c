"""Plan a window: run the portfolio, judge it, and let the gate decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from evenstep.plan.accumulation import fewest_micro_batches
from evenstep.plan.bounds import makespan_bound
from evenstep.plan.constraints import PackingConstraints
from evenstep.plan.decide import decide
from evenstep.plan.objective import Objective
from evenstep.plan.plan import Plan, digest_of
from evenstep.plan.problem import Int
from evenstep.plan.window import Window, check_positive

__all__ = ["Algorithm", "lower_bound", "plan_window"]

Algorithm = Literal["auto", "lpt", "levels", "refine"]
_ALGORITHMS = ("auto", "lpt", "levels", "refine")


def plan_window(
    tokens: npt.ArrayLike,
    costs: npt.ArrayLike,
    *,
    dp_size: int,
    micro_batches: int | None,
    rows: int,
    reference: npt.ArrayLike | None = None,
    constraints: PackingConstraints,
    objective: Objective | None = None,
    algorithm: Algorithm = "auto",
    min_gain: float = 0.0,
    features: Mapping[str, npt.ArrayLike] | None = None,
    holders: npt.ArrayLike | None = None,
    payload_bytes: npt.ArrayLike | None = None,
) -> Plan:
    """Decide where each sample of a window goes.

    A pure function: equal inputs give equal plans on every machine.

    Args:
        tokens: Tokens of each sample, integers ``[n]``.
        costs: Predicted compute of each sample, ``[n]`` or ``[n, stages]``, finite and >= 0.
        dp_size: Data-parallel ranks.
        micro_batches: Micro-batches of every rank in this window; None finds the fewest, never more than the
            reference layout has.
        rows: Rows of one rank's micro-batch.
        reference: Flat row of each sample before balancing, ``(micro_batch * dp_size + dp_rank) * rows + row``,
            or None: then there is no gate, and nothing counts as moved unless ``holders`` says who holds it.
        constraints: Hard limits of a row.
        objective: What a plan is judged by; default `Objective()`.
        algorithm: ``"lpt"`` is the fastest, ``"levels"`` the most even, ``"refine"`` moves the least;
            ``"auto"`` takes the best of them by the objective.
        min_gain: The reference layout is kept unless ``(original - candidate) / original`` exceeds this.
        features: Columns ``[n]`` that ``constraints.budgets`` names.
        holders: Dp rank that holds each sample, ``[n]``; default: its rank in the reference layout.
        payload_bytes: Payload of each sample, ``[n]``, so that the plan moves few bytes rather than few tokens.

    Raises:
        Infeasible: No layout obeys the constraints, or none was found.
        TypeError: An argument has the wrong type.
        ValueError: An argument has the wrong shape or range.
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(
            f"algorithm={algorithm!r} is unknown; use one of {', '.join(map(repr, _ALGORITHMS))}"
        )
    if isinstance(min_gain, bool) or not isinstance(min_gain, (int, float)):
        raise TypeError(f"min_gain is {min_gain!r} ({type(min_gain).__name__}), expected a number")
    if not (math.isfinite(min_gain) and min_gain >= 0):
        raise ValueError(f"min_gain is {min_gain!r}, expected a share of the original score >= 0, like 0.02")
    window = Window.check(
        tokens,
        costs,
        dp_size=dp_size,
        rows=rows,
        reference=reference,
        constraints=constraints,
        objective=Objective() if objective is None else objective,
        features=features,
        holders=holders,
        payload_bytes=payload_bytes,
    )
    if micro_batches is None:
        count = fewest_micro_batches(window)
    else:
        check_positive("micro_batches", micro_batches)
        count = int(micro_batches)
        window.check_reference(count)
    row, decision = decide(window, window.problem(count), count, algorithm, float(min_gain))
    flat = window.to_flat(row, count)
    return Plan(
        assignment=flat.astype(np.int32),
        loads=window.loads(flat, count),
        decision=decision,
        digest=_digest(window, flat, count, algorithm, min_gain),
        dp_size=int(dp_size),
        micro_batches=count,
        rows=int(rows),
    )


def _digest(window: Window, flat: Int, count: int, algorithm: str, min_gain: float) -> int:
    shape = (count, window.dp_size, window.rows, window.constraints.seq_len, window.names)
    return digest_of(
        flat.astype(np.int32),
        window.tokens,
        window.costs,
        window.weights,
        window.limits,
        window.reference,
        window.holders,
        window.payload_bytes,
        repr((shape, window.objective, algorithm, float(min_gain))),
    )


def lower_bound(
    tokens: npt.ArrayLike,
    costs: npt.ArrayLike,
    *,
    dp_size: int,
    micro_batches: int,
    rows: int,
    constraints: PackingConstraints,
    objective: Objective | None = None,
    features: Mapping[str, npt.ArrayLike] | None = None,
) -> float:
    """What no plan of this window can beat: a bound on the sum of makespans, in the unit of the costs.

    Args:
        tokens: As for `plan_window`.
        costs: As for `plan_window`.
        dp_size: As for `plan_window`.
        micro_batches: As for `plan_window`.
        rows: As for `plan_window`.
        constraints: As for `plan_window`.
        objective: As for `plan_window`; the bound of a ``"balance"`` is 0.
        features: As for `plan_window`.
    """
    check_positive("micro_batches", micro_batches)
    window = Window.check(
        tokens,
        costs,
        dp_size=dp_size,
        rows=rows,
        reference=None,
        constraints=constraints,
        objective=Objective() if objective is None else objective,
        features=features,
        holders=None,
        payload_bytes=None,
    )
    if window.objective.kind == "balance":
        return 0.0
    return window.in_cost_units(makespan_bound(window.problem(micro_batches)))
