"""The main job: trains a small model on real text, before and after balancing, and checks every claim.

Which file does what:

    options.py     the command line
    command.py     the demo from start to end
    corpus.py      the documents: files of text
    tokens.py      their tokens on disk, cut to pieces that fit a row
    greedy.py      the reference layout: what an ordinary packed sampler gives
    settings.py    how large everything is
    launch.py      starts local ranks
    model.py       a small GPT with attention inside each document
    calibrate.py   times it: what the cost model is fitted to
    train.py       the training loop and its loader
    compare.py     run by the ranks of the first launch: both layouts, then the stop
    resume.py      run by the ranks of the second: the rest, and the ledger of samples
    records.py     what was measured of a step
    checks.py      what is claimed of all of it
    tables.py      printed; picture.py: drawn; report.py: written to disk
"""

from __future__ import annotations

import argparse

from evenstep.demo.options import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run the demo; the exit code is 0 if every check passed, 1 if one failed, 2 if it could not start."""
    from evenstep.demo.command import run as start

    return start(args)
