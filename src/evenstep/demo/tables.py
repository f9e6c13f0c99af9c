"""What the demo prints: the corpus as a table, and a line for every step as it ends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import numpy as np

from evenstep.cost import LinearQuadraticCost
from evenstep.demo.checks import LEAST_CORE, SpeedUp
from evenstep.demo.records import StepRecord, moved_tokens
from evenstep.demo.settings import Settings
from evenstep.demo.tokens import Pieces

__all__ = [
    "corpus_table",
    "predicted_again",
    "print_busy",
    "print_heading",
    "print_pair",
    "print_resumed",
    "simulate_words",
]

_COLUMNS = "{:>4}  {:<9}  {:>7}  {:>8}  {:>9}  {:>9}  {:>7}  {:>7}  {:>8}"

_REORDERED = "      (nothing moved between ranks: each put its own samples into other micro-batches)"


def corpus_table(pieces: Pieces, seq_len: int) -> str:
    """Documents, tokens, percentiles, and what became of empty and of long documents."""
    store = pieces.store
    lengths = store.lengths
    total = int(lengths.sum())
    marks = np.percentile(lengths, (50, 90, 99, 100), method="lower").astype(int)
    empty = int((lengths == 0).sum())
    parts = int((pieces.lengths > 0).sum()) - (len(lengths) - empty) + pieces.split
    rows = [
        ("documents", f"{len(lengths):,}"),
        (
            "tokens",
            f"{total:,} ({store.bytes / max(total, 1):.2f} bytes each, vocabulary {store.vocabulary:,})",
        ),
        ("tokens a document", "median {:,}, 90% {:,}, 99% {:,}, longest {:,}".format(*marks)),
        ("dropped", f"{empty:,} empty documents"),
        (
            "split",
            f"{pieces.split:,} documents longer than a row of {seq_len:,} tokens, into {parts:,} pieces",
        ),
        ("samples", f"{int((pieces.lengths > 0).sum()):,}"),
        ("undecodable bytes", f"{store.undecodable:,}, each read as U+FFFD"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def print_heading(cost: LinearQuadraticCost) -> None:
    """The cost model that was measured, and the heads of the columns."""
    ratio = cost.a / cost.b if cost.b else float("inf")
    print(
        f"  measured cost: {cost.a * 1e6:.1f} us a token + {cost.b * 1e9:.2f} ns a pair of tokens in a document"
        f" (equal at {ratio:,.0f} tokens)\n"
    )
    print(_COLUMNS.format("", "", "", "", "efficiency", "", "moved", "", "").rstrip())
    names = ("step", "layout", "seconds", "tokens/s", "predicted", "measured", "tokens", "padding", "loss")
    print(_COLUMNS.format(*names), flush=True)


def print_pair(reference: StepRecord, balanced: StepRecord) -> None:
    """The same step in both layouts."""
    moved = moved_tokens(reference, balanced) / int(balanced.tokens.sum())
    print(_line("reference", reference, "-"))
    print(_line("balanced", balanced, f"{moved:.1%}"), flush=True)
    if not moved and balanced.predicted_efficiency > reference.predicted_efficiency:
        print(_REORDERED, flush=True)


def print_busy(share: float) -> None:
    """Say which clock decides, if the ranks had too small a ``share`` of a core for the wall's."""
    if share < LEAST_CORE:
        print(
            f"  this machine is busy: each rank had only {share:.0%} of a core, so that seconds and tokens/s measure "
            "other programs too; processor time decides",
            flush=True,
        )


def print_resumed(record: StepRecord) -> None:
    """A step after the stop."""
    print(_line(f"{record.compute.shape[1]} ranks", record, "-"), flush=True)


def predicted_again(
    settings: Settings,
    cost: LinearQuadraticCost,
    reference: Sequence[StepRecord],
    balanced: Sequence[StepRecord],
) -> str:
    """What the speed-up is relative to, and the command that predicts the same from lengths alone."""
    promised = SpeedUp.of(reference, balanced).predicted
    return (
        f"The {promised:.2f}x that is predicted is relative to greedy rows: shuffled documents fill row after row, one that "
        "does not fit\nopens the next, rows go to the ranks in turn. From lengths and this cost alone, the same figure:\n"
        f"  evenstep {shlex.join(simulate_words(settings, cost))}"
    )


def simulate_words(settings: Settings, cost: LinearQuadraticCost) -> list[str]:
    """The arguments of ``evenstep`` for the simulation of the steps that are compared."""
    options: dict[str, object] = {
        "--seq-len": settings.seq_len,
        "--oversized": "split",
        "--reference": "greedy",
        "--dp-sizes": settings.ranks,
        "--windows": settings.micro_batches,
        "--algorithms": "auto",
        "--steps": settings.compared_steps,
        "--seed": settings.seed,
        "--cost": f"{cost.a:.5g},{cost.b:.5g}",
    }
    words = [str(word) for option in options.items() for word in option]
    return ["simulate", str(settings.lengths), *words, "--consecutive"]


def _line(layout: str, record: StepRecord, moved: str) -> str:
    return _COLUMNS.format(
        record.step,
        layout,
        f"{record.seconds:.2f}",
        f"{record.tokens_per_second:,.0f}",
        f"{record.predicted_efficiency:.3f}",
        f"{record.measured_efficiency:.3f}",
        moved,
        f"{record.padding_share:.1%}",
        f"{record.loss:.5f}",
    )
