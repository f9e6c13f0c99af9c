"""balance.png: ranks as lanes, micro-batches as bars on one time axis, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from evenstep.demo.records import StepRecord

__all__ = ["draw"]

_WORK = ("#14505c", "#2f8f9d")  # micro-batches alternate, so that neighbours can be told apart
_WAIT = "#fbe3d6"
_WAIT_EDGE = "#e0764a"
_INK = "#1d2b36"
_FAINT = "#7b8a97"
_SAVED = "#2c8a57"
_TOP, _BOTTOM, _BETWEEN = 1.35, 0.62, 0.78  # inches: title and legend, axis label, second title


def draw(path: Path, reference: StepRecord, balanced: StepRecord, title: str) -> None:
    """Draw one optimizer step in both layouts from the seconds its micro-batches took.

    A micro-batch ends on every rank when its slowest rank ends it; what the others wait is drawn too.

    Args:
        path: The PNG file to write.
        reference: The step in the reference layout.
        balanced: The same step balanced.
        title: What all steps together brought.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ranks = reference.compute.shape[1]
    lanes = max(ranks * min(0.45, 5.0 / ranks), 0.9)
    height = _TOP + _BETWEEN + _BOTTOM + 2 * lanes
    end = max(reference.computed_makespan, balanced.computed_makespan)
    figure, axes = plt.subplots(2, 1, figsize=(11, height), dpi=160, sharex=True, facecolor="white")
    try:
        _lanes(axes[0], reference, end, "Reference layout")
        _lanes(axes[1], balanced, end, "Balanced")
        _saved(axes[1], balanced.computed_makespan, reference.computed_makespan)
        axes[1].set_xlabel("processor seconds of one optimizer step", color=_INK, labelpad=6)
        _head(figure, height, title, reference.step)
        figure.subplots_adjust(
            left=0.065,
            right=0.975,
            top=1 - _TOP / height,
            bottom=_BOTTOM / height,
            hspace=_BETWEEN / lanes,
        )
        figure.savefig(path)
    finally:
        plt.close(figure)


def _lanes(axes: Any, record: StepRecord, end: float, title: str) -> None:
    work = record.compute
    spans = work.max(axis=1)
    starts = np.cumsum(spans) - spans
    micro_batches, ranks = work.shape
    lanes = np.arange(ranks)
    for m in range(micro_batches):
        axes.barh(lanes, work[m], left=starts[m], height=0.78, color=_WORK[m % 2], linewidth=0)
        axes.barh(
            lanes,
            spans[m] - work[m],
            left=starts[m] + work[m],
            height=0.78,
            color=_WAIT,
            edgecolor=_WAIT_EDGE,
            hatch="/////",
            linewidth=0,
        )
    for meeting in (starts + spans).tolist():
        axes.axvline(meeting, color="white", linewidth=2.4)
        axes.axvline(meeting, color=_INK, linewidth=0.9)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=6)
    lost = 1 - record.measured_efficiency
    axes.set_title(
        f"{spans.sum():.1f} s, {lost:.0%} of it waiting", loc="right", fontsize=11, color=_INK, pad=6
    )
    names = [f"rank {rank}" for rank in range(ranks)] if ranks <= 16 else [""] * ranks
    axes.set_yticks(range(ranks), names)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xlim(0, end * 1.006)
    axes.tick_params(length=0, colors=_INK, labelbottom=True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6ebef", linewidth=0.8)


def _saved(axes: Any, new: float, old: float) -> None:
    """The time that is no longer needed, where there is room to write it."""
    if old - new < 0.05 * old:
        return
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    axes.annotate(
        "",
        xy=(new, middle),
        xytext=(old, middle),
        arrowprops={"arrowstyle": "->", "color": _SAVED, "lw": 1.8},
    )
    axes.text(
        (new + old) / 2, middle - 0.08, f"{old - new:.1f} s saved", ha="center", va="bottom", color=_SAVED,
        fontsize=11, fontweight="bold",
    )  # fmt: skip


def _head(figure: Any, height: float, title: str, step: int) -> None:
    from matplotlib.patches import Patch

    left = 0.065
    figure.text(
        left,
        1 - 0.22 / height,
        title,
        ha="left",
        va="top",
        fontsize=17,
        fontweight="bold",
        color=_INK,
    )
    figure.text(
        left,
        1 - 0.58 / height,
        f"Step {step} in both layouts: the same samples in the same number of rows, the same loss",
        ha="left",
        va="top",
        fontsize=11,
        color=_FAINT,
    )
    handles = [
        Patch(facecolor=_WORK[1], label="computing, a bar a micro-batch"),
        Patch(facecolor=_WAIT, edgecolor=_WAIT_EDGE, hatch="/////", linewidth=0, label="waiting"),
    ]
    figure.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(0.981, 1 - 0.16 / height), frameon=False, ncols=2,
        fontsize=10.5, labelcolor=_INK, handlelength=1.6, columnspacing=1.4, borderaxespad=0,
    )  # fmt: skip
