"""What the demo claims, each as a check that can fail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenstep.demo.records import StepRecord
from evenstep.demo.resume import Ledger

__all__ = ["Check", "SpeedUp", "check_ledger", "check_losses", "check_promise", "check_speed", "core_share"]

LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order, amplified by a few optimizer steps
LEAST_PROMISE = 1.2
LEAST_KEPT = 0.85
LEAST_CORE = 0.9  # of a core for each rank: below that, wall time measures the other programs


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, whether it holds, and the figures behind it.

    Attributes:
        name: Short name, a key of ``summary.json``.
        passed: Whether it holds; None if it was not checked.
        text: One sentence with the figures, and the reason if it failed or was not checked.
    """

    name: str
    passed: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Reference over balanced, on the same steps.

    Attributes:
        predicted: By the sums of predicted makespans.
        measured: By the sums of wall seconds.
        computed: By the sums of makespans in processor seconds.
        kept: Median over the steps of measured over predicted; one disturbed step does not move it.
        kept_computed: The same of computed over predicted.
    """

    predicted: float
    measured: float
    computed: float
    kept: float
    kept_computed: float

    @classmethod
    def of(cls, reference: Sequence[StepRecord], balanced: Sequence[StepRecord]) -> SpeedUp:
        """Compare the steps that both have."""
        pairs = list(zip(reference, balanced, strict=False))

        def ratio(seconds: Callable[[StepRecord], float]) -> float:
            return sum(seconds(before) for before, _ in pairs) / sum(seconds(after) for _, after in pairs)

        def kept(seconds: Callable[[StepRecord], float]) -> float:
            return statistics.median(
                seconds(before) / seconds(after) * after.makespan / before.makespan for before, after in pairs
            )

        return cls(
            predicted=ratio(lambda record: record.makespan),
            measured=ratio(lambda record: record.seconds),
            computed=ratio(lambda record: record.computed_makespan),
            kept=kept(lambda record: record.seconds),
            kept_computed=kept(lambda record: record.computed_makespan),
        )


def core_share(records: Sequence[StepRecord]) -> float:
    """Share of a core that the ranks had while they computed; below 1 something else used their cores."""
    return sum(float(r.compute.sum()) for r in records) / sum(float(r.elapsed.sum()) for r in records)


def check_promise(speed_up: SpeedUp, *, skip: str = "") -> Check:
    """The predicted makespans promise enough to be worth measuring."""
    text = f"predicted makespans promise {speed_up.predicted:.2f}x (at least {LEAST_PROMISE}x)"
    return _speed_check("promise", speed_up.predicted >= LEAST_PROMISE, text, skip)


def check_speed(speed_up: SpeedUp, *, share: float, skip: str = "") -> Check:
    """The clock confirms what the makespans promise.

    Args:
        speed_up: What was measured.
        share: Share of a core that the ranks had. With too little of it wall time measures other programs,
            and the processor's own clock decides.
        skip: Why nothing can be said, if so.
    """
    wall = share >= LEAST_CORE
    kept = speed_up.kept if wall else speed_up.kept_computed
    figure = f"measured {speed_up.measured:.2f}x"
    if not wall:
        figure = (
            f"measured {speed_up.computed:.2f}x by processor time ({speed_up.measured:.2f}x by the wall clock, but "
            f"each rank had only {share:.0%} of a core)"
        )
    text = f"{figure}; the median step keeps {kept:.0%} of its promise (at least {LEAST_KEPT:.0%})"
    return _speed_check("speed_up", kept >= LEAST_KEPT, text, skip)


def _speed_check(name: str, passed: bool, text: str, skip: str) -> Check:
    return Check(name, None, f"{text}; not checked: {skip}") if skip else Check(name, passed, text)


def check_losses(name: str, first: Sequence[StepRecord], second: Sequence[StepRecord], what: str) -> Check:
    """Two runs over the same steps have the same loss at each."""
    if [record.step for record in first] != [record.step for record in second] or not first:
        steps = [[record.step for record in records] for records in (first, second)]
        return Check(name, False, f"{what}: the runs trained the steps {steps[0]} and {steps[1]}")
    differences = [_difference(a.loss, b.loss) for a, b in zip(first, second, strict=True)]
    worst = max(differences)
    at = first[differences.index(worst)].step
    text = (
        f"{what}: the losses of {len(first)} step{'s'[: len(first) > 1]} differ by at most {worst:.1e} (at step {at}; "
        f"tolerance {LOSS_TOLERANCE:.0e})"
    )
    return Check(name, worst <= LOSS_TOLERANCE, text)


def _difference(first: float, second: float) -> float:
    difference = abs(first - second) / abs(first)
    return difference if math.isfinite(difference) else math.inf


def check_ledger(ledger: Ledger, *, ranks: Sequence[int], stopped_after: str) -> Check:
    """Every sample exactly once, over both launches."""
    text = (
        f"stopped after {stopped_after}, went on with {ranks[1]} ranks instead of {ranks[0]}: of "
        f"{ledger.expected:,} samples {len(ledger.skipped)} were skipped, {len(ledger.repeated)} repeated, "
        f"{len(ledger.foreign)} came from elsewhere"
    )
    return Check("ledger", ledger.exact, text)
