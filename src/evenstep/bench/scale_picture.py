"""Draws `evenstep bench scale`: how even steps are, what a plan takes, and where groups begin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.style import INK, MUTED, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLORS = ("#d1495b", "#8f5aa8", "#3a7d44", "#2f6690", "#c98a1b")


def draw(path: Path, result: dict[str, Any]) -> None:
    """Write what `measure` of `evenstep.bench.scale` returned to ``path``, as .png or .svg."""
    import matplotlib as mpl

    # The object interface, not pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(style(font__size=9, axes__titlesize=10)):
        figure = Figure(figsize=(11.0, 3.7), layout="constrained")
        FigureCanvasAgg(figure)
        even, seconds, step = figure.subplots(1, 3)
        _imbalance(even, result["jobs"])
        _seconds(seconds, result)
        _steps(step, result)
        sizes = [job["dp_size"] for job in result["jobs"]]
        for panel in (even, seconds, step):
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=40)
            panel.minorticks_off()
            panel.set_xlabel("data-parallel ranks")
            panel.legend(fontsize=8, loc="upper left")
        figure.savefig(path)


def _lines(jobs: Sequence[dict[str, Any]], key: str) -> list[tuple[str, list[int], list[float]]]:
    """``key`` over the ranks of a job: over all ranks by either algorithm, then in groups, the smallest last."""
    found: dict[tuple[int, str], tuple[list[int], list[float]]] = {}
    for job in jobs:
        for way in job["ways"]:
            whole = way["group"] == job["dp_size"]
            line = found.setdefault((0 if whole else -way["group"], way["algorithm"]), ([], []))
            line[0].append(job["dp_size"])
            line[1].append(way[key])
    return [
        (f"groups of {-size:,}" if size else f"all ranks, {algorithm}", xs, ys)
        for (size, algorithm), (xs, ys) in sorted(found.items(), key=lambda item: (-item[0][0], item[0][1]))
    ]


def _imbalance(panel: Axes, jobs: Sequence[dict[str, Any]]) -> None:
    for color, (name, xs, ys) in zip(_COLORS, _lines(jobs, "imbalance"), strict=False):
        panel.plot(xs, ys, color=color, marker="o", markersize=4, label=name)
    panel.set_title("Imbalance (before: " + _range([job["unbalanced"] for job in jobs]) + ")")
    panel.set_ylabel("slowest rank over mean; 1 is perfect")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _seconds(panel: Axes, result: dict[str, Any]) -> None:
    for color, algorithm in zip(_COLORS, ("auto", "refine", "lpt"), strict=False):
        rows = result["planning"]
        panel.plot(
            [row["dp_size"] for row in rows],
            [row["seconds"][algorithm] for row in rows],
            color=color,
            label=f"plan, {algorithm}",
        )
        for row in rows:
            guessed = algorithm in row["extrapolated"]
            face = "white" if guessed else color
            panel.plot(row["dp_size"], row["seconds"][algorithm], "o", color=color, markersize=4, mfc=face)
    ways = [job["ways"][0] for job in result["jobs"]]
    panel.plot(
        [job["dp_size"] for job in result["jobs"]],
        [sum(way["talk_seconds"].values()) for way in ways],
        color=MUTED,
        linestyle=":",
        label="collectives (model)",
    )
    panel.axhline(result["step_seconds"], color=INK, linewidth=1, linestyle="--", label="an even step")
    panel.set_yscale("log")
    panel.set_ylim(top=200 * panel.get_ylim()[1])  # room for the legend
    panel.set_title("Seconds for all ranks together")


def _steps(panel: Axes, result: dict[str, Any]) -> None:
    most = 1.35 * result["step_seconds"]
    for color, (name, xs, ys) in zip(_COLORS, _lines(result["jobs"], "step_seconds"), strict=False):
        panel.plot(xs, ys, color=color, marker="o", markersize=4, label=name)
    begin = result["groups_begin"]
    if begin is not None:
        panel.axvline(begin, color=INK, linewidth=1, linestyle="--")
        panel.text(begin, result["step_seconds"], f" groups begin: {begin:,}", va="bottom", fontsize=8)
    panel.set_ylim(result["step_seconds"], most)
    panel.set_title("Predicted step")
    panel.set_ylabel("seconds")
