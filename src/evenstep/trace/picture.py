"""timeline.png: a lane for each thread of each rank, coloured by the stage that was at work itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "own_time", "seen"]

# In the order of a micro-batch's way; spans of the loop itself follow in shades of grey.
STAGES = {
    "sampler": "#8d6a9f",
    "read": "#14505c",
    "gather": "#d9a441",
    "plan": "#d1495b",
    "exchange": "#2f8f9d",
    "pack": "#66a182",
    "pad": "#8fbf9f",
    "pin": "#b5d6b2",
    "copy": "#5b7db1",
    "broadcast": "#9db4d6",
    "shard": "#c4d1e6",
    "wait": "#fbe3d6",
}
_GREYS = ("#c9d0d6", "#8a96a1", "#5d6872")
_INK = "#1d2b36"
_LINE, _SHARE = 2000, 100  # of the picture: what is narrower, or less in all, is not seen


def draw(path: Path, trace: dict[str, Any]) -> None:
    """Draw a merged trace, from the first window on that was recorded from its beginning.

    What was under way before says more of when recording began than of the job.

    Args:
        path: The picture to write.
        trace: What `evenstep.trace.merge` returned.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lanes, names = _lanes(trace, first_window(trace))
    colors = _colors([name for pieces in lanes.values() for name, _, _ in pieces])
    figure, panel = plt.subplots(figsize=(12, 1.3 + 0.42 * len(lanes)), dpi=140, layout="constrained")
    try:
        for row, (lane, pieces) in enumerate(sorted(lanes.items())):
            for name in colors:
                bars = [(begin / 1e3, (end - begin) / 1e3) for piece, begin, end in pieces if piece == name]
                edge = 0.0 if name in STAGES else 0.8  # two micro-batches that follow each other are two
                panel.broken_barh(
                    bars, (row - 0.42, 0.84), facecolor=colors[name], edgecolor="white", linewidth=edge
                )
            if row and lane[0] != sorted(lanes)[row - 1][0]:
                panel.axhline(row - 0.5, color=_INK, linewidth=0.8)
        panel.set_yticks(range(len(lanes)), [names[lane] for lane in sorted(lanes)])
        panel.set_ylim(len(lanes) - 0.5, -0.5)
        _finish(panel, {name: color for name, color in colors.items() if name in seen(lanes.values())})
        figure.savefig(path)
    finally:
        plt.close(figure)


def first_window(trace: dict[str, Any]) -> float:
    """When the first window begins, in microseconds: before anything else its samples are chosen; 0 if none was."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return float(min((event["ts"] for event in spans if event["name"] == "sampler"), default=0.0))


def own_time(spans: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """When each stage worked itself, the spans inside its own left out.

    Args:
        spans: Name, begin and end of the spans of one thread, each inside or outside of each other one; of equal ones the
            later is inside.

    Returns:
        The same of pieces that do not overlap, in order.
    """
    pieces: list[tuple[str, float, float]] = []
    under_way: list[tuple[str, float]] = []  # name and end, outermost first
    now = 0.0

    def until(time: float) -> None:
        nonlocal now
        if under_way and time > now:
            pieces.append((under_way[-1][0], now, time))
        now = max(now, time)

    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while under_way and under_way[-1][1] <= begin:
            until(under_way[-1][1])
            under_way.pop()
        until(begin)
        under_way.append((name, end))
    while under_way:
        until(under_way[-1][1])
        under_way.pop()
    return pieces


def seen(lanes: Iterable[list[tuple[str, float, float]]]) -> set[str]:
    """The names that can be seen in the picture, of pieces by lane: once as wide as a line, or often enough.

    Most stages pass a micro-batch on in microseconds: in the legend they would be looked for in vain.
    """
    held = list(lanes)
    whole = max((end for pieces in held for _, _, end in pieces), default=0.0)
    names: set[str] = set()
    for pieces in held:
        total: dict[str, float] = defaultdict(float)
        for name, begin, end in pieces:
            total[name] += end - begin
            if (end - begin) * _LINE >= whole:
                names.add(name)
        names.update(name for name, time in total.items() if time * _SHARE >= whole)
    return names


Lane = tuple[int, bool, int]  # rank, whether it is behind the training loop's, thread


def _lanes(
    trace: dict[str, Any], since: float
) -> tuple[dict[Lane, list[tuple[str, float, float]]], dict[Lane, str]]:
    threads = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    spans: dict[Lane, list[tuple[str, float, float]]] = defaultdict(list)
    names: dict[Lane, str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rank, thread = event["pid"], event["tid"]
            name = threads.get((rank, thread), str(thread))
            begin, end = max(0.0, event["ts"] - since), event["ts"] + event["dur"] - since
            if end <= 0:
                continue
            lane = (rank, name != "training loop", thread)
            spans[lane].append((event["name"], begin, end))
            names[lane] = f"rank {rank}: {'loader' if name.startswith('evenstep-') else name}"
    return {lane: own_time(parts) for lane, parts in spans.items()}, names


def _colors(used: list[str]) -> dict[str, str]:
    others = [name for name in dict.fromkeys(used) if name not in STAGES]
    colors = {name: color for name, color in STAGES.items() if name in used}
    return {**colors, **{name: _GREYS[k % len(_GREYS)] for k, name in enumerate(others)}}


def _finish(panel: Axes, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    panel.set_xlabel("milliseconds", color=_INK)
    panel.set_xlim(left=0)
    panel.tick_params(length=0, labelcolor=_INK)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.legend(
        handles=[Patch(facecolor=color, label=name) for name, color in colors.items()],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=12,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.2,
    )
