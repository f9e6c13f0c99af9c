"""The gate: which candidate is taken, whether the reference layout stays, and the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from evenstep.errors import Infeasible
from evenstep.plan.bounds import makespan_bound
from evenstep.plan.matching import match_holders
from evenstep.plan.plan import Decision
from evenstep.plan.portfolio import run_portfolio
from evenstep.plan.problem import Int, Problem
from evenstep.plan.repair import fill_empty_rows
from evenstep.plan.window import Window

__all__ = ["decide"]


def decide(
    window: Window, problem: Problem, micro_batches: int, algorithm: str, min_gain: float
) -> tuple[Int, Decision]:
    """The layout to use, as rows of ``problem``, and the decision that explains it.

    Raises:
        Infeasible: No algorithm found a layout, and there is no feasible reference layout to keep.
    """
    bound = makespan_bound(problem)
    lower = window.in_cost_units(bound) if window.objective.kind == "makespan" else 0.0
    value = window.tokens if window.payload_bytes is None else window.payload_bytes
    candidates, failures = run_portfolio(problem, algorithm, window.holders, value, bound)
    scores = {name: window.score(row, problem) for name, row in candidates.items()}
    # Of equally good layouts the refined one, because it moves the least.
    best = min(scores, key=lambda name: (scores[name], name != "refine")) if scores else None
    original = _original(window, micro_batches)
    gain = 0.0
    if best is not None and original:
        gain = (original - scores[best]) / original
    kept = _keep(problem, best, gain, min_gain)
    if kept is not None and problem.reference is not None:
        name, row, reason = "reference", problem.reference.copy(), kept
        fill_empty_rows(problem, row)
        filled = int((row != problem.reference).sum())
        if filled:
            reason += f" {filled} samples went into rows that it left empty."
    elif best is None:
        raise _nothing_fits(window, problem, failures)
    else:
        name, row = best, candidates[best]
        if window.holders is not None:
            row = match_holders(problem, row, window.holders, value)
        reason = _taken(window, micro_batches, name, original, scores[name], gain, lower)
    assert len(row) == window.size, "a plan lost samples"
    assert problem.broken_row(row) is None, "a plan broke a hard limit"
    floor, advice = _advice(window, problem, micro_batches)
    moved = np.zeros(window.size, dtype=np.bool_)
    if window.holders is not None:
        moved = window.to_flat(row, micro_batches) // window.rows % window.dp_size != window.holders
    payload = window.payload_bytes
    return row, Decision(
        algorithm=name,
        reason=reason,
        original=None if original is None else window.in_cost_units(original),
        candidate=None if best is None else window.in_cost_units(scores[best]),
        gain=gain,
        scores={name: window.in_cost_units(score) for name, score in scores.items()},
        failures=failures,
        lower_bound=lower,
        floor_sample=floor,
        moved_samples=int(moved.sum()),
        moved_tokens=int(window.tokens[moved].sum()),
        moved_bytes=0 if payload is None else int(payload[moved].sum()),
        num_samples=window.size,
        num_tokens=int(window.tokens.sum()),
        advice=advice,
    )


def _original(window: Window, micro_batches: int) -> float | None:
    if window.reference is None:
        return None
    own = window.problem(max(micro_batches, window.reference_micro_batches))
    assert own.reference is not None
    return window.score(own.reference, own)


def _keep(problem: Problem, best: str | None, gain: float, min_gain: float) -> str | None:
    """Why the reference layout stays, or None if it does not."""
    if problem.reference is None:
        return None
    if problem.broken_row(problem.reference) is not None:
        return None
    if gain > min_gain:
        return None
    if gain <= 0:
        return f"The reference layout was kept: the best candidate ({best}) is no better."
    return (
        f"The reference layout was kept: {best} would gain {gain:.2%}, "
        f"which is not above min_gain={min_gain:.2%}."
    )


def _taken(
    window: Window,
    micro_batches: int,
    name: str,
    original: float | None,
    score: float,
    gain: float,
    bound: float,
) -> str:
    score = window.in_cost_units(score)
    # Where there is a bound, how much is left tells whether a longer search could pay.
    beside = f", {max(score / bound - 1, 0.0):.2%} above the lower bound" if 0 < bound < math.inf else ""
    if original is None:
        return f"{name} scored best with {score:.6g}{beside}."
    if micro_batches < window.reference_micro_batches:
        return f"{name} needs {micro_batches} micro-batches instead of {window.reference_micro_batches}."
    return f"{name} lowers the score from {window.in_cost_units(original):.6g} to {score:.6g} ({gain:.2%}){beside}."


def _advice(window: Window, problem: Problem, micro_batches: int) -> tuple[int, str]:
    """The sample that sets the floor of a micro-batch, or -1, and what would help."""
    total, size = int(problem.work.sum()), problem.size
    if not size or total == 0:
        return -1, ""
    largest = int(problem.work.argmax())
    giants = int((problem.work * problem.slots > total).sum())
    if not giants:
        return -1, ""
    share = int(problem.work[largest]) * problem.slots / total
    words = (
        f"Sample {largest} ({int(window.tokens[largest])} tokens) alone costs {share:.2f}x a rank's fair share of a "
        "micro-batch: no plan makes its micro-batch shorter."
    )
    short = -giants % problem.ranks
    if window.objective.sync == "step" or not short:
        return largest, words
    window_hint = micro_batches * -(-problem.ranks // giants) if giants < problem.ranks else 2 * micro_batches
    return largest, (
        f"{words} A window of about {window_hint} micro-batches would bring enough such samples together to fill "
        f"a micro-batch of all {problem.ranks} ranks (here there are {giants})."
    )


def _nothing_fits(window: Window, problem: Problem, failures: Mapping[str, str]) -> Infeasible:
    used, rows = window.weights.sum(axis=1), problem.num_rows
    tightest = int(np.argmax(used / np.maximum(window.limits * rows, 1)))
    name, limit = window.names[tightest], int(window.limits[tightest])
    in_tokens = name == "seq_len"
    failed = "; ".join(f"{algorithm}: {why}" for algorithm, why in sorted(failures.items()))

    def told(units: int) -> str:
        budget = (window.constraints.budgets or {}).get(name)
        return f"{units:,}" if budget is None else f"{units * (budget / max(limit, 1)):.11g}"

    if int(used[tightest]) > limit * rows:
        return Infeasible(
            f"{window.size} samples need {told(int(used[tightest]))} {'tokens' if in_tokens else f'of {name}'} and the "
            f"{rows} rows of this window hold {told(limit * rows)}: no packing exists. Plan fewer samples "
            "(global_batch_size), or more micro-batches (accumulation_steps; 'auto' takes as many as are needed) or rows "
            f"(micro_batch_size), or {'longer rows (seq_len)' if in_tokens else f'raise the limit of {name}'}"
        )
    largest = int(window.weights[tightest].argmax())
    return Infeasible(
        f"no packing was found for {window.size} samples in {rows} rows: they fill {name} to "
        f"{int(used[tightest]) / (limit * rows):.1%}, and sample {largest} alone takes "
        f"{told(int(window.weights[tightest, largest]))} of {told(limit)} ({failed}). Plan more micro-batches or rows, "
        f"or raise the limit"
    )
