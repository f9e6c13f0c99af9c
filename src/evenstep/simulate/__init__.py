"""What balance would bring, from a file of lengths alone: ``evenstep simulate LENGTHS``.

Which file does what:

    lengths.py          the formats that lengths come in
    settings.py         what is simulated
    steps.py            optimizer steps, sampled over an epoch
    outcome.py          what is found out
    simulation.py       the same steps, laid out by every algorithm over every window
    summary.py          the outcome in words, as a table and as JSON
    figures.py          the outcome in pictures
    report.py           all of it as one HTML file
    command.py          the command line
"""

from __future__ import annotations

from evenstep.simulate.command import add_arguments, run
from evenstep.simulate.lengths import read_lengths
from evenstep.simulate.outcome import Outcome, Simulation
from evenstep.simulate.settings import Settings
from evenstep.simulate.simulation import simulate

__all__ = ["Outcome", "Settings", "Simulation", "add_arguments", "read_lengths", "run", "simulate"]
