"""Puts the files that `evenstep.Timeline` wrote, one per rank, on one clock and into one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["merge"]


def merge(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """One trace of all ``paths``, which begins at 0; folders stand for their ``rank-*.json``.

    Raises:
        ValueError: There is no span, a file holds no timeline, or two files are of one rank.
        OSError: A file cannot be read, or is not there.
    """
    given = [Path(path) for path in paths]
    for path in given:
        if not path.exists():
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise FileNotFoundError(
                f"there is no file or folder {path}{where}: name files that evenstep.Timeline wrote, or the folder with its "
                "rank-*.json"
            )
    files = [
        file for path in given for file in (sorted(path.glob("rank-*.json")) if path.is_dir() else [path])
    ]
    owners: dict[int, Path] = {}
    events: list[dict[str, Any]] = []
    for file in files:
        found = _events(file)
        for rank in {event["pid"] for event in found}:
            if rank in owners:
                raise ValueError(
                    f"{owners[rank]} and {file} are both of rank {rank}: spans of two runs would lie over each other. "
                    "Merge the files of one run."
                )
            owners[rank] = file
        events += found
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        where = ", ".join(map(str, given)) or "nothing"
        raise ValueError(
            f"no spans in {where}: expected files of evenstep.Timeline, or a folder with its rank-*.json"
        )
    first = min(span["ts"] for span in spans)
    moved = [{**event, "ts": event["ts"] - first} if "ts" in event else event for event in events]
    return {"traceEvents": moved, "displayTimeUnit": "ms"}


def _events(file: Path) -> list[dict[str, Any]]:
    try:
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        for event in events:
            if event["ph"] == "X":
                event["ts"] + event["dur"] + event["pid"] + event["tid"]  # all of them numbers
            elif event["ph"] == "M":
                event["pid"] + event["tid"]
            else:
                raise KeyError(event["ph"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is no file of evenstep.Timeline ({type(error).__name__}: {error}); traces of torch.profiler are "
            "opened as they are, in Perfetto"
        ) from error
    return events
