"""``evenstep trace``: the command line of timelines."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from evenstep.trace.merge import merge

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``evenstep trace`` to ``parser``."""
    parser.description = (
        "One timeline of all ranks, for ui.perfetto.dev or chrome://tracing, from the files that evenstep.Timeline "
        "wrote. Without files a small job runs on this machine and is recorded."
    )
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="files, or folders with rank-*.json"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("timeline.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it, too (.png, .svg or .pdf)")
    job = parser.add_argument_group("the small job")
    job.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    job.add_argument(
        "--steps", type=int, default=4, metavar="N", help="optimizer steps (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Merge or record what ``args`` say, write it, and return the exit status."""
    try:
        _check(args)
        if args.files:
            trace = merge(args.files)
        else:
            from evenstep.testing import run_ranks
            from evenstep.trace.sample_job import record

            with tempfile.TemporaryDirectory() as folder:
                run_ranks(record, args.ranks, args.steps, Path(folder))
                trace = merge([folder])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(trace))
        if args.picture is not None:
            from evenstep.trace.picture import draw

            draw(args.picture, trace)
    except (OSError, ImportError, ValueError) as error:
        print(f"evenstep trace: {error}", file=sys.stderr)
        return 2
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ranks = {event["pid"] for event in spans}
    drawn = "" if args.picture is None else f" and {args.picture}"
    print(
        f"wrote {args.out}{drawn}: {len(spans)} spans of {len(ranks)} rank{'s'[: len(ranks) > 1]}; open it in "
        "https://ui.perfetto.dev or chrome://tracing"
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse before the work, not after it."""
    for name in ("ranks", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: at least 1 is needed")
    if args.picture is None:
        return
    if args.picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"--picture {args.picture} ends with {args.picture.suffix!r}, expected .png, .svg or .pdf"
        )
    if find_spec("matplotlib") is None:
        raise ImportError(
            "--picture draws with matplotlib, which is not installed; pip install 'evenstep[cli]', or leave --picture "
            "away for the file alone"
        )
