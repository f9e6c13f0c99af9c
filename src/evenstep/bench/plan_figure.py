"""How planning time grows with the window, as a picture beside the curve it should follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from evenstep.style import GRID, INK, MUTED, style

__all__ = ["save_growth"]

_UNDATED: Any = {"Date": None, "Creator": None}  # equal figures are equal files
_LINES = (
    ("heap_lpt", "bare heap LPT", MUTED, "s"),
    ("lpt", '"lpt"', "#3a7d44", "o"),
    ("auto", '"auto"', "#2f6690", "o"),
)


def save_growth(points: list[dict[str, float]], machine: str, path: Path) -> None:
    """CPU seconds over samples on two logarithmic axes, with n log n through the largest window of ``"auto"``.

    Args:
        points: What `evenstep.bench.plan_measures.growth` returns.
        machine: One line on where it was measured.
        path: Where the picture goes; its suffix says which format it has.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    samples = np.array([point["samples"] for point in points])
    with mpl.rc_context(style(axes__titleweight="normal", savefig__dpi=150)):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        panel = figure.subplots()
        fine = np.geomspace(samples[0], samples[-1], 60)
        ideal = fine * np.log(fine)
        scale = points[-1]["auto_seconds"] / ideal[-1]
        panel.plot(fine, ideal * scale, color=INK, linewidth=1.2, linestyle="--", label="n log n")
        for key, label, color, marker in _LINES:
            seconds = [point[f"{key}_seconds"] for point in points]
            panel.plot(samples, seconds, color=color, marker=marker, markersize=5, linewidth=2, label=label)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.grid(visible=True, color=GRID)
        panel.set_axisbelow(True)
        panel.set_xlabel("samples of a window (61 a row)")
        panel.set_ylabel("CPU seconds to plan it")
        last = points[-1]
        panel.set_title(
            f"{int(last['samples']):,} samples into {int(last['rows']):,} rows: {last['auto_seconds']:.1f} s"
        )
        panel.legend(loc="upper left")
        figure.text(
            1.0, 0.0, machine.partition(", python")[0], ha="right", va="bottom", fontsize=8, color=MUTED
        )
        figure.savefig(path, metadata=_UNDATED if path.suffix == ".svg" else {"Software": None})
