"""The main job: trains a small model on real text, before and after balancing, and checks every claim."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep demo``."""
    from evenstep.demo.command import add_arguments as add

    add(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; the exit code is 0 if every check passed, 1 if one failed, 2 if it could not start."""
    from evenstep.demo.command import run as start

    return start(args)
