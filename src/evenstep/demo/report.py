"""The results on disk: every figure in summary.json, and the picture that shows the stragglers go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evenstep import __version__
from evenstep.demo.checks import LEAST_CORE, Check, SpeedUp, core_share
from evenstep.demo.compare import Comparison
from evenstep.demo.picture import draw
from evenstep.demo.records import StepRecord, moved_tokens
from evenstep.demo.settings import Settings
from evenstep.demo.tokens import Pieces

__all__ = ["draw_balance", "write_summary"]


def write_summary(
    settings: Settings,
    pieces: Pieces,
    comparison: Comparison,
    resumed: list[StepRecord],
    checks: list[Check],
    seconds: float,
) -> None:
    """Write ``summary.json``: what ran, what was measured, what was checked."""
    speed_up = SpeedUp.of(comparison.reference, comparison.balanced)
    summary = {
        "version": __version__,
        "passed": all(check.passed is not False for check in checks),
        "seconds": seconds,
        "settings": {
            "ranks": settings.ranks,
            "resumed_ranks": settings.resumed_ranks,
            "seq_len": settings.seq_len,
            "micro_batches": settings.micro_batches,
            "compared_steps": settings.compared_steps,
            "resumed_steps": settings.resumed_steps,
            "seed": settings.seed,
        },
        "corpus": {
            "documents": len(pieces.store.lengths),
            "empty": int((pieces.store.lengths == 0).sum()),
            "split": pieces.split,
            "samples": int((pieces.lengths > 0).sum()),
            "tokens": int(pieces.lengths.sum()),
            "bytes": pieces.store.bytes,
            "undecodable": pieces.store.undecodable,
        },
        "cost": {
            "seconds_per_token": comparison.cost.a,
            "seconds_per_pair": comparison.cost.b,
        },
        "speed_up": {
            "predicted": speed_up.predicted,
            "measured": speed_up.measured,
            "computed": speed_up.computed,
            "kept": speed_up.kept,
            "kept_computed": speed_up.kept_computed,
            "core_share": core_share([*comparison.reference, *comparison.balanced]),
        },
        "checks": {check.name: {"passed": check.passed, "text": check.text} for check in checks},
        "reference": [_step(record) for record in comparison.reference],
        "balanced": [
            {**_step(after), "moved_tokens": moved_tokens(before, after)}
            for before, after in zip(comparison.reference, comparison.balanced, strict=False)
        ],
        "resumed": [_step(record) for record in resumed],
    }
    (settings.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _step(record: StepRecord) -> dict[str, Any]:
    """Plain values of one step; tables are ``[micro_batch][rank]``."""
    return {
        "step": record.step,
        "seconds": record.seconds,
        "loss": record.loss,
        "tokens": int(record.tokens.sum()),
        "tokens_per_second": record.tokens_per_second,
        "padding": int(record.padding.sum()),
        "efficiency_predicted": record.predicted_efficiency,
        "efficiency_measured": record.measured_efficiency,
        "makespan_predicted": record.makespan,
        "compute_seconds": record.compute.tolist(),
        "elapsed_seconds": record.elapsed.tolist(),
        "predicted_seconds": record.predicted.tolist(),
    }


def draw_balance(path: Path, comparison: Comparison) -> None:
    """Draw ``balance.png``: the step of median gain, before and after."""
    pairs = list(zip(comparison.reference, comparison.balanced, strict=False))
    pairs.sort(key=lambda pair: pair[0].makespan / pair[1].makespan)
    speed_up = SpeedUp.of(comparison.reference, comparison.balanced)
    title = f"{speed_up.measured:.2f}x measured, {speed_up.predicted:.2f}x predicted"
    if core_share([*comparison.reference, *comparison.balanced]) < LEAST_CORE:
        title = f"{speed_up.computed:.2f}x by processor time, {speed_up.predicted:.2f}x predicted"
    draw(path, *pairs[len(pairs) // 2], title)
