"""What is measured about planning: quality beside peers, movement, speed, growth, and harm to a training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.bench.plan_cases import CASES, Case, Window
from evenstep.bench.plan_peers import PACKERS, Peer, heap_lpt
from evenstep.plan import Infeasible, PackingConstraints, Plan, lower_bound, plan_window, sum_of_makespans

__all__ = ["compare", "growth", "interference", "movement", "speed"]

Int = npt.NDArray[np.int64]
_SLOW = 1_000_000  # samples times rows above which a quadratic peer takes seconds: one window has to do
_SLOW_PEERS = ("Karp", "TRL", "Grain")


def compare(case: Case, seeds: range, peers: dict[str, Peer]) -> dict[str, Any]:
    """Imbalance (sum of makespans over sum of means) and time of each planner over the windows of ``seeds``.

    A peer's rows are grouped by cost like ours, which only helps it. Its result counts where it keeps the limit.
    """
    bounds: list[float] = []
    plans: dict[str, list[tuple[float, float]]] = {}
    beaten: list[str] = []
    failed: dict[str, str] = {}
    fallbacks = unpackable = samples = 0
    for seed in seeds:
        window = case.draw(seed)
        if case.fill and window.reference is None:  # first-fit decreasing found no packing: there may be none
            unpackable += 1
            continue
        samples = len(window.tokens)
        even = float(window.costs.sum()) / case.dp_size
        bounds.append(_bound(case, window) / even)
        scores: dict[str, float] = {}
        for name in ("auto", "lpt"):
            seconds, plan = _timed(partial(_plan, case, window, name))
            if plan is None:
                fallbacks += name == "auto"
                continue
            scores[name] = sum_of_makespans(plan.loads) / even
            plans.setdefault(name, []).append((scores[name], seconds))
            fallbacks += name == "auto" and "no algorithm" in plan.decision.reason
        for name, peer in peers.items():
            slow = any(part in name for part in _SLOW_PEERS) and samples * case.rows > _SLOW
            if (slow and len(bounds) > 1) or (not case.fill and name in PACKERS):
                continue
            try:
                seconds, row = _timed(partial(peer, window.tokens, window.costs, case.rows, case.seq_len))
            except Exception as error:  # another library's failure is a result, too
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            score = _peer_score(case, window, row) / even
            plans.setdefault(name, []).append((score, seconds))
            if score < scores.get("auto", np.inf) * (1 - 1e-12):
                beaten.append(name)
    ours = np.array([score for score, _ in plans.get("auto", [])])
    over = ours / np.array(bounds) if 0 < len(ours) == len(bounds) else np.array([np.nan])
    return {
        "case": case.name,
        "dp_size": case.dp_size,
        "micro_batches": case.micro_batches,
        "samples": samples,
        "draws": len(seeds),
        "unpackable": unpackable,
        "bound": median(bounds) if bounds else float("nan"),
        "over_bound_median": float(np.median(over)),
        "over_bound_max": float(over.max()),
        "fallbacks": fallbacks,
        "better_peers": sorted(set(beaten)),
        "failed_peers": failed,
        "planners": {name: _summary(results) for name, results in plans.items()},
    }


def _summary(results: list[tuple[float, float]]) -> dict[str, float | None]:
    kept = [score for score, _ in results if np.isfinite(score)]
    return {
        "imbalance": median(kept) if kept else None,
        "broke_limit": len(results) - len(kept),
        "seconds": median(seconds for _, seconds in results),
        "max_seconds": max(seconds for _, seconds in results),
    }


def _limits(case: Case) -> PackingConstraints:
    return PackingConstraints(case.seq_len)


def _bound(case: Case, window: Window) -> float:
    return lower_bound(
        window.tokens,
        window.costs,
        dp_size=case.dp_size,
        micro_batches=case.micro_batches,
        rows=1,
        constraints=_limits(case),
    )


def _plan(case: Case, window: Window, algorithm: Any, reference: Int | None = None) -> Plan | None:
    try:
        return plan_window(
            window.tokens,
            window.costs,
            dp_size=case.dp_size,
            micro_batches=case.micro_batches,
            rows=1,
            reference=reference,
            constraints=_limits(case),
            algorithm=algorithm,
        )
    except Infeasible:
        return None


def _timed(call: Callable[[], Any], clock: Callable[[], float] = perf_counter) -> tuple[float, Any]:
    start = clock()
    result = call()
    return clock() - start, result


def _peer_score(case: Case, window: Window, row: Int) -> float:
    if int(row.max(initial=0)) >= case.rows or np.bincount(row, window.tokens).max() > case.seq_len:
        return float("inf")
    load = -np.sort(-np.bincount(row, window.costs, minlength=case.rows))
    return float(load[:: case.dp_size].sum())


def movement(case: Case, seeds: range) -> dict[str, Any]:
    """Share of the tokens whose rank changes, and score over bound, for refine and auto from a reference layout."""
    rows: dict[str, list[tuple[float, float]]] = {"refine": [], "auto": []}
    for seed in seeds:
        window = case.draw(seed)
        if window.reference is None:
            continue
        bound = _bound(case, window)
        for name, results in rows.items():
            plan = _plan(case, window, name, window.reference)
            assert plan is not None
            moved = plan.decision.moved_tokens / int(window.tokens.sum())
            results.append((moved, sum_of_makespans(plan.loads) / bound))
    return {"case": case.name, "dp_size": case.dp_size, "micro_batches": case.micro_batches} | {
        name: {
            "moved_median": median(m for m, _ in results),
            "moved_max": max(m for m, _ in results),
            "over_bound_median": median(b for _, b in results),
            "over_bound_max": max(b for _, b in results),
        }
        for name, results in rows.items()
        if results
    }


def speed(seed: int, repeats: int = 15) -> dict[str, float]:
    """CPU seconds of a bare heap LPT, ``"lpt"`` and ``"auto"``: 8,572 samples into 1,024 rows, best of several."""
    case = CASES["8572-to-1024"]
    window = case.draw(seed)

    calls: dict[str, Callable[[], Any]] = {
        "heap": partial(heap_lpt, window.tokens, window.costs, case.rows, case.seq_len),
        "lpt": partial(_plan, case, window, "lpt"),
        "auto": partial(_plan, case, window, "auto"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):  # in turn, so that a busy moment is everybody's
        for name, call in calls.items():
            seconds[name].append(_timed(call, process_time)[0])
    bare, lpt, auto = (min(seconds[name]) for name in calls)
    return {
        "heap_lpt_seconds": bare,
        "lpt_seconds": lpt,
        "auto_seconds": auto,
        "lpt_ratio": lpt / bare,
        "auto_ratio": auto / bare,
    }


def growth(seed: int, sizes: Sequence[int] = (64, 256, 1024, 4096, 16384)) -> list[dict[str, float]]:
    """CPU seconds against samples, 61 samples a row, up to a million samples into 16,384 rows; best of several.

    Not wall time, because the largest windows take so long that a busy machine would bend the curve.
    """
    points = []
    for rows in sizes:
        case = Case("growth", CASES["named"].lengths, rows, 1, 1 << 40, 0, rows * 61)
        window = case.draw(seed)
        point: dict[str, float] = {"samples": len(window.tokens), "rows": rows}
        calls: dict[str, Callable[[], Any]] = {
            "heap_lpt": partial(heap_lpt, window.tokens, window.costs, rows, case.seq_len),
            "lpt": partial(_plan, case, window, "lpt"),
            "auto": partial(_plan, case, window, "auto"),
        }
        repeats = int(np.clip(4096 // rows, 1, 7))
        for name, call in calls.items():
            point[f"{name}_seconds"] = min(_timed(call, process_time)[0] for _ in range(repeats))
        points.append(point)
    return points


def interference(seed: int, runs: int = 20, seconds: float = 1.0) -> dict[str, float]:
    """How much a thread that launches small kernels slows down while another plans 4,300 samples once a second.

    Paired runs: the same number of small kernels with and without a plan beside them, in turn.
    """
    import torch

    case = CASES["named"]
    window = case.draw(seed)
    tensor = torch.ones(64)

    def launch(count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            tensor.add_(1.0)
        return perf_counter() - start

    count = int(20_000 * seconds / launch(20_000))
    ratios = []
    for _ in range(runs):
        alone = launch(count)
        planner = threading.Timer(0.2 * seconds, _plan, (case, window, "auto"))
        planner.start()
        beside = launch(count)
        planner.join()
        ratios.append(beside / alone - 1)
    return {
        "runs": runs,
        "step_seconds": seconds,
        "slowdown_median": median(ratios),
        "slowdown_max": max(ratios),
    }
