"""Plan a window: run the portfolio, judge it, and let the gate decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from evenstep.errors import Infeasible
from evenstep.plan.bounds import makespan_bound
from evenstep.plan.constraints import PackingConstraints
from evenstep.plan.grouping import group_like_costs
from evenstep.plan.lpt import lpt
from evenstep.plan.objective import Objective
from evenstep.plan.packing import first_fit
from evenstep.plan.plan import Decision, Plan, digest_of
from evenstep.plan.problem import Int, Problem, row_weights
from evenstep.plan.repair import fill_empty_rows, place_left_over
from evenstep.plan.window import Window, check_positive, feature_columns

__all__ = ["Algorithm", "lower_bound", "plan_window", "reference_layout"]

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
        algorithm: ``"auto"`` takes the best of the others by the objective.
        min_gain: The reference layout is kept unless ``(original - candidate) / original`` exceeds this.
        features: Columns ``[n]`` that ``constraints.budgets`` names.
        holders: Dp rank that holds each sample, ``[n]``; default: its rank in the reference layout.
        payload_bytes: Payload of each sample, ``[n]``, so that the plan moves few bytes rather than few tokens.

    Raises:
        Infeasible: No layout obeys the constraints, or none was found.
        TypeError: An argument has the wrong type.
        ValueError: An argument has the wrong shape or range.
    """
    goal = Objective() if objective is None else objective
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
        objective=goal,
        features=features,
        holders=holders,
        payload_bytes=payload_bytes,
    )
    if micro_batches is not None:
        check_positive("micro_batches", micro_batches)
    count = _fewest_micro_batches(window) if micro_batches is None else int(micro_batches)
    flat, decision = _decide(window, count, algorithm, min_gain)
    return Plan(
        assignment=flat.astype(np.int32),
        loads=window.loads(flat, count),
        decision=decision,
        digest=_digest(window, flat, count, algorithm, min_gain),
        dp_size=dp_size,
        micro_batches=count,
        rows=rows,
    )


def _decide(window: Window, count: int, algorithm: Algorithm, min_gain: float) -> tuple[Int, Decision]:
    problem = window.problem(count)
    reference = problem.reference
    candidates, failures = _candidates(problem, algorithm)
    scores = {name: window.objective.score(problem.loads(row)) for name, row in candidates.items()}
    kept = reference is not None and problem.broken_row(reference) is None
    original = window.objective.score(problem.loads(reference)) if reference is not None else None
    best = min(scores, key=scores.__getitem__) if scores else None
    gain = 0.0
    if best is not None and original:
        gain = (original - scores[best]) / original
    if reference is not None and kept and (best is None or not gain > min_gain):
        why = (
            "no algorithm found a feasible layout"
            if best is None
            else f"the gain of {gain:.2%} is not above {min_gain:.2%}"
        )
        name, row, reason = "reference", reference, f"The reference layout was kept: {why}."
    elif best is None:
        raise _nothing_fits(window, problem, failures)
    else:
        name, row, reason = best, candidates[best], f"{best} was taken."
    return window.to_flat(row, count), Decision(
        algorithm=name,
        reason=reason,
        original=original,
        candidate=None if best is None else scores[best],
        gain=gain,
        scores=scores,
        failures=failures,
        num_samples=window.size,
        num_tokens=int(window.tokens.sum()),
    )


def _candidates(problem: Problem, algorithm: Algorithm) -> tuple[dict[str, Int], dict[str, str]]:
    order = np.argsort(-problem.work, kind="stable")
    row, left_over = lpt(problem, order)
    if not place_left_over(problem, row, left_over):
        return {}, {"lpt": f"{len(left_over)} samples found no row with room"}
    fill_empty_rows(problem, row)
    return {"lpt": group_like_costs(problem, row)}, {}


def _nothing_fits(window: Window, problem: Problem, failures: Mapping[str, str]) -> Infeasible:
    total, room = int(window.weights[0].sum()), problem.num_rows * window.constraints.seq_len
    return Infeasible(
        f"{window.size} samples with {total} tokens found no place in {problem.num_rows} rows of "
        f"seq_len={window.constraints.seq_len} ({room} tokens)"
    )


def _fewest_micro_batches(window: Window) -> int:
    if window.reference is not None:
        return int(window.reference.max(initial=0)) // (window.dp_size * window.rows) + 1
    bins = int(first_fit(window.weights, window.limits).max(initial=0)) + 1
    return -(-bins // (window.dp_size * window.rows))


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
    """A bound on the sum of makespans that no plan of this window can beat, in the unit of the costs.

    Args: as for `plan_window`.
    """
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
    return makespan_bound(window.problem(micro_batches))


def reference_layout(
    tokens: npt.ArrayLike,
    *,
    dp_size: int,
    rows: int,
    constraints: PackingConstraints,
    features: Mapping[str, npt.ArrayLike] | None = None,
) -> tuple[npt.NDArray[np.int32], int]:
    """The layout of a step that is a number of samples, before balancing.

    Dp rank d holds the d-th contiguous block of the samples, packed first-fit into rows.

    Args:
        tokens: Tokens of each sample, integers ``[n]``.
        dp_size: Data-parallel ranks.
        rows: Rows of one rank's micro-batch.
        constraints: Hard limits of a row.
        features: Columns ``[n]`` that ``constraints.budgets`` names.

    Returns:
        Flat row of each sample, int32 ``[n]``, and the micro-batches of every rank: the maximum over ranks, at least 1.

    Raises:
        Infeasible: A sample exceeds a limit that the policy does not allow.
    """
    check_positive("dp_size", dp_size)
    check_positive("rows", rows)
    column = np.asarray(tokens, dtype=np.int64)
    weights, limits, _ = row_weights(column, feature_columns(features, constraints, len(column)), constraints)
    # The first n % dp_size blocks are one sample longer.
    edges = np.arange(dp_size + 1) * (len(column) // dp_size) + np.minimum(
        np.arange(dp_size + 1), len(column) % dp_size
    )
    flat = np.zeros(len(column), dtype=np.int64)
    micro_batches = 1
    for rank, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        local = first_fit(weights[:, start:stop], limits)
        micro_batches = max(micro_batches, -(-(int(local.max(initial=-1)) + 1) // rows))
        flat[start:stop] = (local // rows * dp_size + rank) * rows + local % rows
    return flat.astype(np.int32), micro_batches
