"""One small simulation that several files look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from evenstep.simulate import Settings, Simulation, simulate


@pytest.fixture(scope="session")
def lengths() -> npt.NDArray[np.int64]:
    """Documents of 0 to about 6,000 tokens; some empty, some longer than a row of 2,048."""
    rng = np.random.default_rng(7)
    drawn = rng.lognormal(5.5, 1.0, size=4000).astype(np.int64)
    drawn[::500] = 0
    drawn[::900] = 5000
    return drawn


@pytest.fixture(scope="session")
def simulation(lengths: npt.NDArray[np.int64]) -> Simulation:
    return simulate(
        lengths,
        Settings(
            seq_len=2048,
            dp_sizes=(4, 2, 4, 5000),
            windows=(1, 4, 99),
            algorithms=("lpt", "auto"),
            accumulation_steps=4,
            steps=3,
        ),
    )
