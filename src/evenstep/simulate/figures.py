"""The outcome of a simulation in three pictures: efficiency, one step, the lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
import numpy.typing as npt

from evenstep.simulate.simulation import Outcome, Simulation, StepPicture
from evenstep.style import INK, MUTED, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_efficiency", "draw_lengths", "draw_step"]

P = ParamSpec("P")

_WORK = ("#2f6690", "#6aa3c8")
_WAIT = "#f3c6b8"
_LINES = ("#2f6690", "#d1495b", "#3a7d44", "#8f5aa8")


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib as mpl

        with mpl.rc_context(style(axes__titlesize=11, figure__dpi=110)):
            return draw(*args, **kwargs)

    return styled


def _figure(width: float, height: float, columns: int, rows: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    # The object interface, not pyplot: no global state, no display, no warning about open figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


@_styled
def draw_efficiency(simulation: Simulation) -> Figure:
    """Efficiency by window, one panel per dp size, one line per algorithm."""
    sizes = list(dict.fromkeys(outcome.dp_size for outcome in simulation.outcomes))
    columns = min(len(sizes), 4)
    rows = -(-len(sizes) // columns)
    figure, grid = _figure(max(7.6, 3.6 * columns), 3.4 * rows + 0.5, columns, rows, sharey=True)
    panels: list[Axes] = list(grid.flat)
    floor = min(outcome.efficiency for outcome in simulation.outcomes)
    for panel, dp_size in zip(panels, sizes, strict=False):
        outcomes = [outcome for outcome in simulation.outcomes if outcome.dp_size == dp_size]
        _efficiency_panel(panel, outcomes, simulation)
        panel.set_title(f"{dp_size} ranks")
        panel.set_ylim(max(0.0, floor - 0.08), 1.015)
        panel.set_xlabel("window (micro-batches planned together)")
    for panel in panels[len(sizes) :]:
        panel.remove()
    for row in grid:
        row[0].set_ylabel("efficiency (1 is perfect)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4 * columns))
    return figure


def _efficiency_panel(panel: Axes, outcomes: list[Outcome], simulation: Simulation) -> None:
    windows = simulation.settings.fitting_windows
    position = {window: place for place, window in enumerate(windows)}
    unplanned = [outcome for outcome in outcomes if not outcome.window]
    for outcome, dashes in zip(unplanned, ("--", ":"), strict=False):
        panel.axhline(outcome.efficiency, color=MUTED, linestyle=dashes, linewidth=1.6, label=outcome.layout)
    algorithms = list(dict.fromkeys(outcome.layout for outcome in outcomes if outcome.window))
    bounds: dict[int, float] = {}
    for number, algorithm in enumerate(algorithms):
        mine = [outcome for outcome in outcomes if outcome.layout == algorithm]
        panel.plot(
            [position[outcome.window] for outcome in mine],
            [outcome.efficiency for outcome in mine],
            color=_LINES[number % len(_LINES)],
            marker="o",
            markersize=6,
            linewidth=2,
            label=algorithm,
        )
        for outcome in mine:
            if outcome.bound_share is not None:
                ceiling = outcome.efficiency / outcome.bound_share
                bounds[outcome.window] = min(ceiling, bounds.get(outcome.window, 1.0))
    if bounds:
        places = [position[window] for window in bounds]
        panel.fill_between(places, list(bounds.values()), 2.0, color=INK, alpha=0.09, linewidth=0)
        panel.plot(places, list(bounds.values()), color=INK, linewidth=1, label="cannot be beaten")
    panel.set_xticks(range(len(windows)), [str(window) for window in windows])
    panel.set_xlim(-0.3, len(windows) - 0.7)


@_styled
def draw_step(picture: StepPicture) -> Figure:
    """One optimizer step as a timeline of its ranks, before and after balancing, on one time axis."""
    figure, grid = _figure(10.0, 5.6, 1, 2, sharex=True, sharey=True)
    even = float(picture.before.sum()) / picture.dp_size
    panels: list[Axes] = list(grid[:, 0])
    ends = []
    plural = "es" if picture.window > 1 else ""
    titles = (
        f"before: {picture.baseline}",
        f"after: {picture.algorithm!r}, windows of {picture.window} micro-batch{plural}",
    )
    for panel, loads, title in zip(panels, (picture.before, picture.after), titles, strict=True):
        ends.append(_timeline(panel, loads / even, waits_once=picture.sync == "step"))
        panel.set_title(f"{title}: takes {ends[-1]:.2f}")
        panel.set_ylabel("dp rank")
    for panel in panels:
        panel.axvline(1.0, color=INK, linewidth=1.2, linestyle="--")
        panel.set_xlim(0, max(ends) * 1.005)
        panel.set_ylim(picture.dp_size - 0.5, -0.5)
        panel.grid(False)
        panel.tick_params(left=False)
    panels[-1].set_xlabel("time, relative to a perfectly even step (dashed)")
    _step_legend(figure)
    return figure


def _timeline(panel: Axes, loads: npt.NDArray[np.float64], *, waits_once: bool) -> float:
    """Draw a bar per rank and micro-batch, and return when the last rank is done."""
    micro_batches, ranks = loads.shape
    height = 0.86 if ranks <= 24 else 1.0
    begin = np.zeros(ranks)
    for number, work in enumerate(loads):
        panel.barh(range(ranks), work, left=begin, height=height, color=_WORK[number % 2], linewidth=0)
        begin = begin + work
        if waits_once and number < micro_batches - 1:
            continue
        end = float(begin.max())
        panel.barh(range(ranks), end - begin, left=begin, height=height, color=_WAIT, linewidth=0)
        panel.axvline(end, color="white", linewidth=1.0)
        begin = np.full(ranks, end)
    return float(begin.max())


def _step_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_WORK[0], label="work, odd micro-batches"),
        Patch(color=_WORK[1], label="work, even micro-batches"),
        Patch(color=_WAIT, label="waiting for the slowest rank"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


@_styled
def draw_lengths(lengths: npt.NDArray[np.int64], seq_len: int) -> Figure:
    """Where the documents are, and where the tokens are, by length."""
    lengths = lengths[lengths > 0]
    figure, grid = _figure(10.0, 3.4, 1)
    panel: Axes = grid[0, 0]
    low, high = float(np.quantile(lengths, 0.001)), float(max(lengths.max(), seq_len))
    edges = np.geomspace(0.9 * low, 1.1 * high, 70)
    edges[0] = min(edges[0], 0.9 * float(lengths.min()))
    middle = np.sqrt(edges[1:] * edges[:-1])
    documents, _ = np.histogram(lengths, bins=edges)
    tokens, _ = np.histogram(lengths, bins=edges, weights=lengths.astype(np.float64))
    for counts, color, label in (
        (documents, _WORK[0], "share of the documents"),
        (tokens, "#d1495b", "share of the tokens"),
    ):
        share = counts / counts.sum()
        panel.fill_between(middle, share, step="mid", color=color, alpha=0.25, linewidth=0)
        panel.step(middle, share, where="mid", color=color, linewidth=1.6, label=label)
    panel.axvline(seq_len, color=INK, linewidth=1.2, linestyle="--", label=f"row of {seq_len:,} tokens")
    panel.set_xscale("log")
    panel.set_xlim(0.8 * low, 1.2 * high)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens of a document")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.set_title(
        f"{len(lengths):,} documents: median {np.median(lengths):,.0f} tokens, longest {lengths.max():,}"
    )
    panel.legend(loc="upper left")
    return figure
