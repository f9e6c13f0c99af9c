"""The timelines of several ranks as one file and one picture: ``evenstep trace FOLDER``.

Which file does what:

    merge.py           the files of several ranks on one clock
    picture.py         drawn: a lane for each thread
    sample_job.py      a small job to look at, where no files are given
    command.py         the command line
"""

from __future__ import annotations

from evenstep.trace.command import add_arguments, run
from evenstep.trace.merge import merge

__all__ = ["add_arguments", "merge", "run"]
