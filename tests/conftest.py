"""What holds for every test: reproducible examples and one torch thread."""

from __future__ import annotations

import os
import signal

import torch
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other work than about the test.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("dev", _UNTIMED)
settings.register_profile("ci", _UNTIMED, max_examples=100, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# Tests that run side by side, and ranks that are threads, would only fight for the cores.
torch.set_num_threads(1)

# A shell has jobs in the background ignore Ctrl-C, and their children inherit that: tests of interrupts would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)
