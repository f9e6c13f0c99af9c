"""Equal inputs give equal plans, in any process, and the digest covers what decides them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from evenstep.plan import Objective, PackingConstraints, Plan, plan_window


def test_the_digest_covers_what_decides_the_plan(make_plan: Callable[..., Plan]) -> None:
    base: dict[str, Any] = {
        "tokens": [10, 20, 30, 40],
        "costs": [1.0, 2.0, 3.0, 4.0],
        "reference": [0, 1, 2, 3],
    }
    changes: list[dict[str, Any]] = [
        {},
        {"tokens": [10, 20, 30, 41]},
        {"costs": [1.0, 2.0, 3.0, 4.5]},
        {"reference": [1, 0, 2, 3]},
        {"min_gain": 0.1},
        {"algorithm": "lpt"},
        {"constraints": PackingConstraints(101)},
        {"constraints": PackingConstraints(100, max_segments=9)},
        {"objective": Objective(sync="step")},
        {"payload_bytes": [1, 1, 1, 1]},
        {"holders": [0, 0, 0, 0]},
    ]
    digests = [make_plan(**(base | change)).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert digests[0] == make_plan(**base).digest


_CHILD = """
import numpy as np
from evenstep.plan import PackingConstraints, plan_window
rng = np.random.default_rng(7)
tokens = rng.integers(1, 4000, 900)
costs = tokens * 0.37 + tokens.astype(float) ** 2 / 17
reference = np.arange(900) % 640
plan = plan_window(tokens, costs, dp_size=16, micro_batches=10, rows=4, reference=None,
                   holders=reference % 16, constraints=PackingConstraints(8192))
print(plan.digest)
"""


def test_other_processes_make_the_same_plan() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", _CHILD],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        ).stdout
        for seed in ("0", "1")
    ]
    assert runs[0] == runs[1]
    assert int(runs[0]) > 0


def test_a_plan_can_be_made_in_another_process() -> None:
    arguments: dict[str, Any] = {
        "tokens": np.arange(1, 40),
        "costs": np.arange(39.0),
        "dp_size": 4,
        "micro_batches": 2,
    }
    arguments |= {"rows": 1, "constraints": PackingConstraints(200, budgets={"images": 300})}
    arguments |= {"features": {"images": np.arange(39.0)}, "objective": Objective(sync="step")}
    here = plan_window(**arguments)
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        there = pool.submit(plan_window, **arguments).result(timeout=120)
    np.testing.assert_array_equal(here.assignment, there.assignment)
    assert (here.digest, here.decision) == (there.digest, there.decision)
