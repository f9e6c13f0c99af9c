"""Tools to test evenstep, and code that uses it, on one machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.testing.conformance import assert_node_conforms
from evenstep.testing.equality import assert_same
from evenstep.testing.outcomes import Outcome, RankDied, RanksFailed
from evenstep.testing.ranks import run_ranks, run_ranks_outcomes
from evenstep.testing.simulated_device import SimulatedDevice, SimulatedTensor
from evenstep.testing.world import SimulatedWorld

if TYPE_CHECKING:
    from evenstep.testing.packs import PackCheckFailed, check_pack
    from evenstep.testing.strategies import batches, plans, rows, samples, windows

__all__ = [
    "Outcome",
    "PackCheckFailed",
    "RankDied",
    "RanksFailed",
    "SimulatedDevice",
    "SimulatedTensor",
    "SimulatedWorld",
    "assert_node_conforms",
    "assert_same",
    "batches",
    "check_pack",
    "plans",
    "rows",
    "run_ranks",
    "run_ranks_outcomes",
    "samples",
    "windows",
]

# These need hypothesis, which who only runs ranks need not have.
_LAZY = {
    "PackCheckFailed": "packs",
    "check_pack": "packs",
    "batches": "strategies",
    "plans": "strategies",
    "rows": "strategies",
    "samples": "strategies",
    "windows": "strategies",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
