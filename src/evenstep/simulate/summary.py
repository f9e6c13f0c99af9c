"""The outcome of a simulation in words, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evenstep.cost import DEFAULT_COST, LinearQuadraticCost, describe_cost
from evenstep.simulate.simulation import GREEDY, SAMPLER, SHUFFLED, Outcome, Simulation

__all__ = ["HEADER", "as_json", "as_text", "cells", "headlines", "legend", "setting_lines"]

HEADER = (
    "ranks",
    "layout",
    "window",
    "efficiency",
    "speed-up",
    "(smallest-largest)",
    "padding",
    "moved",
    "MiB/step",
    "plan ms",
    "of bound",
)

_PACKED = (
    f"{SHUFFLED}: what speed-ups are relative to. A loader that packs as tightly as evenstep (first-fit decreasing) and "
    "does not balance: no gain comes from fuller rows. --reference greedy compares with a loader that fills rows as "
    "documents come, as evenstep demo does, which leaves more to gain.",
    f"{SAMPLER}: the same rows as TokenBudgetSampler orders them, the largest documents side by side, not planned either; "
    "what evenstep's own sampler has before planning.",
)
_GREEDY = (
    f"{GREEDY}: what speed-ups are relative to. Shuffled documents fill row after row, one that does not fit opens the next "
    "row, and rows go to the ranks in turn: an ordinary loader that packs, and what evenstep demo compares with. Without "
    "--reference greedy the rows that are compared with are packed tighter, which leaves less to gain.",
)


def headlines(simulation: Simulation) -> list[str]:
    """What would be gained at each dp size, one sentence each."""
    lines = []
    for dp_size in _sizes(simulation):
        best = simulation.best(dp_size)
        before, *others = simulation.unplanned(dp_size)
        beside = "".join(f" ({best.speedup / o.speedup:.2f}x than the {o.layout})" for o in others)
        micro_batches = f"{best.window} micro-batch{'es' if best.window > 1 else ''}"
        gained = best.speedup >= 1.005  # else it is shown as 1.00x
        gain = f"{best.speedup:.2f}x faster steps" if gained else f"no gain ({best.speedup:.2f}x)"
        lines.append(
            f"{dp_size} ranks: {gain} with {best.layout!r} over windows of {micro_batches}"
            f"{' than' if gained else ', compared with'} the {before.layout}{beside}: ranks do useful work {best.efficiency:.1%} of the time instead of {before.efficiency:.1%}."
        )
    return [*lines, *simulation.skipped]


def setting_lines(simulation: Simulation) -> list[str]:
    """What was simulated, one fact a line."""
    settings = simulation.settings
    sync = "micro-batch" if settings.sync == "micro_batch" else "step"
    treated = {"truncate": "cut to it", "split": "split into pieces", "drop": "left out"}[settings.oversized]
    lines = [
        f"{simulation.documents:,} documents, {simulation.tokens:,} tokens take part; rows of {settings.seq_len:,} tokens",
        f"{settings.accumulation_steps} micro-batches of {settings.micro_batch_size} row(s) a rank and step; "
        f"ranks wait for each other once per {sync}",
        f"cost {describe_cost(settings.cost)}",
    ]
    cost = settings.cost
    if isinstance(cost, LinearQuadraticCost) and (cost.a, cost.b) == (DEFAULT_COST.a, DEFAULT_COST.b):
        lines.append("  assumed: a dense transformer of width 4096; give yours with --model or --cost")
    if simulation.oversized:
        lines.append(
            f"{simulation.oversized:,} documents are longer than a row: {treated} (--oversized {settings.oversized})"
        )
    if simulation.empty:
        lines.append(f"{simulation.empty:,} documents are empty: left out")
    baselines = [simulation.unplanned(size)[0] for size in _sizes(simulation)]
    sampled = ", ".join(
        f"{outcome.steps} step{'s' if outcome.steps > 1 else ''} at {outcome.dp_size} ranks"
        for outcome in baselines
    )
    where = "from the beginning of" if settings.consecutive else "over"
    lines.append(f"sampled {where} an epoch ({settings.order}, seed {settings.seed}): {sampled}")
    lonely = [str(o.dp_size) for o in baselines if o.steps == 1]
    if lonely:
        lines.append(
            f"warning: a single step was sampled at {' and '.join(lonely)} ranks, and another may gain more or less; more "
            "documents, --steps or --seconds sample more"
        )
    return lines


def legend(simulation: Simulation) -> list[str]:
    """How to read the table."""
    reference = {"shuffled": SHUFFLED, "sampler": SAMPLER, "greedy": GREEDY}[simulation.settings.reference]
    lines = [
        *(_GREEDY if reference == GREEDY else _PACKED),
        "efficiency: sum of mean rank costs over sum of makespans, 1 is perfect. (smallest-largest): over the "
        "sampled steps.",
        f"moved: share of the tokens that leave the rank that has them in the {reference} (none travels where "
        "lengths are known ahead). of bound: lower bound over makespans, 100% cannot be beaten within these windows.",
        "Predicted from the cost model, not measured.",
    ]
    if (
        simulation.settings.sync == "step"
        and min(simulation.settings.windows) < simulation.settings.accumulation_steps
    ):
        lines.append(
            "Where ranks wait once per step, a window that is shorter than the step does not see the ranks' other "
            "micro-batches, and can even lose; plan the whole step."
        )
    return lines


def cells(outcome: Outcome) -> tuple[str, ...]:
    """The texts of one row of the table, under `HEADER`."""
    planned = outcome.window > 0
    return (
        str(outcome.dp_size),
        outcome.layout,
        str(outcome.window) if planned else "-",
        f"{outcome.efficiency:.3f}",
        f"{outcome.speedup:.2f}x",
        f"({outcome.slowest:.2f}-{outcome.fastest:.2f})",
        f"{outcome.padding:.1%}",
        f"{outcome.moved_tokens:.1%}" if planned else "-",
        f"{outcome.moved_bytes / 2**20:.1f}" if planned else "-",
        f"{outcome.plan_seconds * 1e3:.1f}" if planned else "-",
        f"{outcome.bound_share:.1%}" if outcome.bound_share is not None else "-",
    )


def as_text(simulation: Simulation) -> str:
    """Settings, table, legend and headlines for a terminal."""
    rows = [HEADER, *map(cells, simulation.outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    table: list[str] = []
    previous = ""
    for number, row in enumerate(rows):
        if number and previous not in ("", row[0]):
            table.append("")
        previous = row[0] if number else ""
        texts = [
            text.ljust(width) if column == 1 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        table.append("  ".join(texts).rstrip())
        if not number:
            table.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    parts = [setting_lines(simulation), table, legend(simulation), headlines(simulation)]
    return "\n\n".join("\n".join(part) for part in parts)


def as_json(simulation: Simulation) -> dict[str, Any]:
    """Everything as plain values; ``bound_share`` is null where no bound is known."""
    settings = asdict(simulation.settings) | {"cost": describe_cost(simulation.settings.cost)}
    return {
        "settings": settings,
        "documents": simulation.documents,
        "empty": simulation.empty,
        "oversized": simulation.oversized,
        "tokens": simulation.tokens,
        "outcomes": [asdict(outcome) for outcome in simulation.outcomes],
        "best": {str(dp_size): asdict(simulation.best(dp_size)) for dp_size in _sizes(simulation)},
        "skipped": list(simulation.skipped),
    }


def _sizes(simulation: Simulation) -> list[int]:
    return list(dict.fromkeys(outcome.dp_size for outcome in simulation.outcomes))
