"""How our pictures look: the colours of text, axes and grid, as settings of matplotlib."""

from __future__ import annotations

from typing import Any

__all__ = ["GRID", "INK", "MUTED", "style"]

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"


def style(**changes: Any) -> Any:
    """Settings for ``matplotlib.rc_context``, whose type names each of them.

    Args:
        changes: Settings that one picture has otherwise, dots written as two underscores: ``font__size=9``.
    """
    settings: dict[str, Any] = {
        "font.size": 10,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "savefig.dpi": 110,
        "svg.fonttype": "none",
        "svg.hashsalt": "evenstep",  # equal figures are equal files
    }
    return {**settings, **{name.replace("__", "."): value for name, value in changes.items()}}
