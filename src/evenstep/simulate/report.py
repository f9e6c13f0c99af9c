"""The whole outcome as one HTML file that needs nothing else, and its pictures as PNG files."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evenstep.simulate.figures import draw_efficiency, draw_lengths, draw_step
from evenstep.simulate.simulation import Simulation
from evenstep.simulate.summary import HEADER, cells, headlines, legend, setting_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_report"]

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.gain { font-size: 1.1rem; margin: .3rem 0; } .facts, .legend { color: #52606d; font-size: .9rem; }
img { max-width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
th { border-bottom: 2px solid #7b8794; } tr.first td { border-top: 1px solid #cbd2d9; }
tr.best td { background: #e3eef6; font-weight: 600; } tr.plain td { color: #7b8794; }
"""


def write_report(
    path: Path, simulation: Simulation, lengths: npt.NDArray[np.int64], *, source: str
) -> list[Path]:
    """Write the report to ``path`` and each picture beside it.

    Args:
        path: ``.html`` for the report and its pictures, ``.png`` for the pictures alone.
        simulation: The outcome.
        lengths: All documents, int64 ``[n]``, as they were read.
        source: Name of their file, for the title.

    Returns:
        The files written.

    Raises:
        ValueError: ``path`` ends with neither.
    """
    if path.suffix.lower() not in (".html", ".png"):
        raise ValueError(f"{path} ends with {path.suffix!r}: a report is written as .html or .png")
    pictures = {
        "efficiency": _png(draw_efficiency(simulation)),
        "step": _png(draw_step(simulation.picture)),
        "lengths": _png(draw_lengths(lengths, simulation.settings.seq_len)),
    }
    written = []
    if path.suffix.lower() == ".html":
        path.write_text(_page(simulation, pictures, source), encoding="utf-8")
        written.append(path)
    for name, png in pictures.items():
        target = path.with_name(f"{path.stem}-{name}.png")
        target.write_bytes(png)
        written.append(target)
    return written


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _page(simulation: Simulation, pictures: dict[str, bytes], source: str) -> str:
    title = f"evenstep simulate: {html.escape(source)}"
    gains = "".join(f'<p class="gain">{html.escape(line)}</p>' for line in headlines(simulation))
    facts = "".join(f"<li>{html.escape(line)}</li>" for line in setting_lines(simulation))
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in legend(simulation))
    step = simulation.picture
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_CSS}</style></head><body>
<h1>{title}</h1>
{gains}
<h2>One optimizer step at {step.dp_size} ranks</h2>
{_image(pictures["step"], "timeline of the ranks before and after balancing")}
<h2>Which window, at how many ranks</h2>
{_image(pictures["efficiency"], "efficiency by window, dp size and algorithm")}
<div class="scroll">{_table(simulation)}</div>
<ul class="legend">{notes}</ul>
<h2>The documents</h2>
{_image(pictures["lengths"], "distribution of document lengths")}
<h2>What was simulated</h2>
<ul class="facts">{facts}</ul>
</body></html>
"""


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _table(simulation: Simulation) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADER)
    body = []
    previous = 0
    for outcome in simulation.outcomes:
        marks = ["first"] if outcome.dp_size != previous else []
        if outcome.window == 0:
            marks.append("plain")
        if outcome == simulation.best(outcome.dp_size):
            marks.append("best")
        previous = outcome.dp_size
        texts = "".join(f"<td>{html.escape(text)}</td>" for text in cells(outcome))
        body.append(f'<tr class="{" ".join(marks)}">{texts}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
