"""The options of ``evenstep demo``, which its help shows without waiting for torch."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep demo``."""
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=2,
        metavar="N",
        help="data-parallel ranks to start (default: %(default)s)",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="folder of text files (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: under a minute, speed is not checked"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("evenstep-demo"),
        metavar="DIR",
        help="folder of the results (default: ./%(default)s)",
    )


def _ranks(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks from 1 to 64")
    return int(text)
