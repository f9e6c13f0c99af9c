"""Sampled optimizer steps of a dataset, laid out by every algorithm over every window."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenstep.cost import padding_cost
from evenstep.plan import Algorithm, Objective, PackingConstraints, plan_window
from evenstep.plan.metrics import moved, rank_of
from evenstep.progress import Progress, no_progress
from evenstep.simulate.outcome import Outcome, Simulation, StepPicture
from evenstep.simulate.settings import Settings, fitting
from evenstep.simulate.steps import GREEDY, SAMPLER, SHUFFLED, SampledStep, sampled_steps

__all__ = ["GREEDY", "SAMPLER", "SHUFFLED", "Outcome", "Simulation", "StepPicture", "simulate"]

_REFERENCES = {"shuffled": SHUFFLED, "sampler": SAMPLER, "greedy": GREEDY}
_DRAWABLE = 64  # ranks that can be told apart in a picture


@dataclass(frozen=True, slots=True)
class _Layout:
    """One step laid out: rank costs ``[micro_batches, dp_size]`` and what it took."""

    loads: npt.NDArray[np.float64]
    bound: float = 0.0
    moved: int = 0
    seconds: tuple[float, ...] = ()


def simulate(
    lengths: npt.NDArray[np.int64], settings: Settings, *, progress: Progress = no_progress
) -> Simulation:
    """Lay out sampled steps of documents of ``lengths`` (int64 ``[n]``) in every way that ``settings`` names.

    A step is what `TokenBudgetSampler` makes of consecutive documents (or a greedy loader, which `Settings.reference` asks
    for), so that all layouts of a dp size hold the same documents, and are compared step by step.

    Raises:
        ValueError: The documents do not fill one step of any dp size, or all of them cost 0.
    """
    # Empty documents have their place in the order of a greedy loader, as they have in its dataset.
    greedy = settings.reference == "greedy"
    fit = fitting(lengths, settings.seq_len, settings.oversized, keep_empty=greedy)
    outcomes: list[Outcome] = []
    pictures: list[StepPicture] = []
    skipped: list[str] = []
    sizes = sorted(set(settings.dp_sizes))
    plans = settings.steps * len(settings.fitting_windows) * len(settings.algorithms)
    begun = time.perf_counter()
    with progress("planning", len(sizes) * plans) as advance:
        for number, dp_size in enumerate(sizes):
            steps = sampled_steps(fit, settings, dp_size)
            if steps:
                left = (settings.seconds or math.inf) - (time.perf_counter() - begun)
                found, picture = _every_layout(
                    steps, settings, dp_size, left / (len(sizes) - number), advance
                )
                outcomes += found
                pictures.append(picture)
                advance(plans - found[0].steps * plans // settings.steps)
            else:
                room = settings.rows(dp_size) * settings.seq_len
                skipped.append(
                    f"{dp_size} ranks were skipped: a step has {settings.rows(dp_size):,} rows with room for "
                    f"{room:,} tokens, and {len(fit):,} documents with {int(fit.sum()):,} tokens do not fill it"
                )
                advance(plans)
    if not outcomes:
        raise ValueError(
            ". ".join(skipped)
            + f". Rows hold seq_len={settings.seq_len:,} tokens (default of --seq-len: the power of two that "
            f"holds 99% of the documents){_left_out(lengths, fit, settings)}"
        )
    drawable = [picture for picture in pictures if picture.dp_size <= _DRAWABLE] or pictures[:1]
    return Simulation(
        settings=settings,
        documents=len(lengths),
        empty=int(np.count_nonzero(lengths == 0)),
        oversized=int(np.count_nonzero(lengths > settings.seq_len)),
        tokens=int(fit.sum()),
        outcomes=tuple(outcomes),
        picture=drawable[-1],
        skipped=tuple(skipped),
    )


def _left_out(lengths: npt.NDArray[np.int64], fit: npt.NDArray[np.int64], settings: Settings) -> str:
    """What became of documents longer than a row, and what would fill a step."""
    longer, lost = int(np.count_nonzero(lengths > settings.seq_len)), int(lengths.sum() - fit.sum())
    told, pieces = "", ""
    if lost:
        verb = {"truncate": "cut to it", "drop": "left out"}.get(settings.oversized, settings.oversized)
        told = (
            f", and {longer:,} longer document{'s were' if longer > 1 else ' was'} {verb} (--oversized "
            f"{settings.oversized}), which lost {lost:,} tokens"
        )
        pieces = ", pieces of long documents (--oversized split)"
    return f"{told}. Simulate fewer ranks (--dp-sizes), shorter rows (--seq-len){pieces} or a longer file"


def _every_layout(
    steps: list[SampledStep], settings: Settings, dp_size: int, seconds: float, advance: Callable[[int], None]
) -> tuple[list[Outcome], StepPicture]:
    planned: dict[tuple[int, Algorithm], list[_Layout]] = {
        (window, algorithm): [] for window in settings.fitting_windows for algorithm in settings.algorithms
    }
    begun = time.perf_counter()
    for done, step in enumerate(steps):
        if done and (time.perf_counter() - begun) * (done + 1) / done > seconds:
            steps = steps[:done]
            break
        for (window, algorithm), layouts in planned.items():
            layouts.append(_planned(step, settings, dp_size, window, algorithm))
            advance(1)
    names = list(steps[0].layouts)
    unplanned = {
        name: [_unplanned(step, step.layouts[name], settings, dp_size) for step in steps] for name in names
    }
    before = unplanned[names[0]]
    outcomes = [
        _outcome(settings, dp_size, name, 0, steps, layouts, before) for name, layouts in unplanned.items()
    ]
    best, after = 0.0, (0, "", before[0].loads)
    for (window, algorithm), layouts in planned.items():
        outcome = _outcome(settings, dp_size, algorithm, window, steps, layouts, before)
        outcomes.append(outcome)
        if outcome.speedup > best:
            best, after = outcome.speedup, (window, algorithm, layouts[0].loads)
    padding = _padded_micro_batch(settings)
    return outcomes, StepPicture(
        sync=settings.sync,
        dp_size=dp_size,
        window=after[0],
        algorithm=after[1],
        baseline=names[0],
        before=before[0].loads + padding,
        after=after[2] + padding,
    )


def _padded_micro_batch(settings: Settings) -> float:
    """What a rank's micro-batch costs if it is all padding; documents cost the difference to it."""
    return float(padding_cost(settings.cost)[0]) * settings.seq_len * settings.micro_batch_size


def _unplanned(step: SampledStep, row: npt.NDArray[np.int32], settings: Settings, dp_size: int) -> _Layout:
    slots = settings.accumulation_steps * dp_size
    loads = np.bincount(row // settings.micro_batch_size, weights=step.costs, minlength=slots)
    return _Layout(loads.astype(np.float64).reshape(-1, dp_size))


def _planned(
    step: SampledStep, settings: Settings, dp_size: int, window: int, algorithm: Algorithm
) -> _Layout:
    per_micro_batch = settings.micro_batch_size * dp_size
    row = step.layouts[_REFERENCES[settings.reference]]
    micro_batch = row // per_micro_batch
    loads, seconds, moved_tokens, bound = [], [], 0, 0.0
    for begin in range(0, settings.accumulation_steps, window):
        size = min(window, settings.accumulation_steps - begin)
        inside = (micro_batch >= begin) & (micro_batch < begin + size)
        tokens, reference = step.tokens[inside], row[inside] - begin * per_micro_batch
        started = time.perf_counter()
        plan = plan_window(
            tokens,
            step.costs[inside],
            dp_size=dp_size,
            micro_batches=size,
            rows=settings.micro_batch_size,
            reference=reference,
            constraints=PackingConstraints(settings.seq_len),
            objective=Objective(sync=settings.sync),
            algorithm=algorithm,
            min_gain=settings.min_gain,
        )
        seconds.append(time.perf_counter() - started)
        holders = rank_of(reference, dp_size=dp_size, rows=settings.micro_batch_size)
        leaves = moved(plan.assignment, holders, dp_size=dp_size, rows=settings.micro_batch_size)
        moved_tokens += int(tokens[leaves].sum())
        loads.append(plan.loads)
        bound += plan.decision.lower_bound
    if settings.sync == "step" and len(loads) > 1:
        bound = float(step.costs.sum()) / dp_size  # bounds of windows do not add up where ranks wait once
    return _Layout(np.concatenate(loads), bound, moved_tokens, tuple(seconds))


def _outcome(
    settings: Settings,
    dp_size: int,
    name: str,
    window: int,
    steps: list[SampledStep],
    layouts: list[_Layout],
    baseline: list[_Layout],
) -> Outcome:
    objective = Objective(sync=settings.sync)
    floor = _padded_micro_batch(settings) * settings.accumulation_steps
    spans = np.array([objective.score(layout.loads) for layout in layouts]) + floor
    before = np.array([objective.score(layout.loads) for layout in baseline]) + floor
    means = np.array([layout.loads.sum() for layout in layouts]) / dp_size + floor
    bounds = np.array([layout.bound for layout in layouts])
    tokens = np.array([step.tokens.sum() for step in steps])
    gone = np.array([layout.moved for layout in layouts])
    seconds = [second for layout in layouts for second in layout.seconds]
    ratios = before / spans
    return Outcome(
        dp_size=dp_size,
        layout=name,
        window=window,
        efficiency=float(means.sum() / spans.sum()),
        speedup=float(before.sum() / spans.sum()),
        slowest=float(ratios.min()),
        fastest=float(ratios.max()),
        padding=float(1 - tokens.mean() / (settings.rows(dp_size) * settings.seq_len)),
        moved_tokens=float(gone.sum() / tokens.sum()),
        moved_bytes=float(gone.mean() * settings.bytes_per_token),
        plan_seconds=float(np.median(seconds)) if seconds else 0.0,
        bound_share=float((bounds.sum() + floor * len(steps)) / spans.sum()) if bounds.any() else None,
        steps=len(steps),
        windows=len(seconds),
    )
