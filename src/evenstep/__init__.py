"""Balanced, packed and exactly resumable micro-batches for LLM and VLM training.

Names are imported when they are first asked for, so that what needs no torch, such as ``evenstep --help``, does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.build import build_loader
    from evenstep.comm import BatchSpec, DataPlane, TensorSpec
    from evenstep.config import LoaderConfig
    from evenstep.cost import CostModel, LinearQuadraticCost, StageCost, TransformerCost, fit_cost
    from evenstep.cursor import Cursor
    from evenstep.errors import (
        ConfigMismatch,
        Infeasible,
        RemoteRankError,
        SampleError,
        StateMismatch,
        WireFormatError,
    )
    from evenstep.loader import Loader
    from evenstep.packing import Shard, collate_rows, collate_varlen, pack_text
    from evenstep.plan import Objective, PackingConstraints, Plan, plan_window
    from evenstep.samples import BatchInfo, MetadataTable, SampleMetadata
    from evenstep.sampling import MixtureSampler, Step, StepSampler, TokenBudgetSampler
    from evenstep.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "BatchInfo",
    "BatchSpec",
    "ConfigMismatch",
    "CostModel",
    "Cursor",
    "DataPlane",
    "Infeasible",
    "LinearQuadraticCost",
    "Loader",
    "LoaderConfig",
    "MetadataTable",
    "MixtureSampler",
    "Objective",
    "PackingConstraints",
    "Plan",
    "RemoteRankError",
    "SampleError",
    "SampleMetadata",
    "Shard",
    "StageCost",
    "StateMismatch",
    "Step",
    "StepSampler",
    "TensorSpec",
    "Timeline",
    "TokenBudgetSampler",
    "TransformerCost",
    "WireFormatError",
    "build_loader",
    "collate_rows",
    "collate_varlen",
    "fit_cost",
    "pack_text",
    "plan_window",
]

# Where the names are from, and the rooms that are reached by `import evenstep` alone; what needs torch comes last.
_ROOMS = (
    "errors",
    "cursor",
    "samples",
    "topology",
    "cost",
    "plan",
    "sampling",
    "config",
    "packing",
    "comm",
    "device",
    "nodes",
    "loader",
    "timeline",
    "build",
)

_IMPORTS = RLock()  # threads that import torch and one of its modules at once may meet half of it

if not TYPE_CHECKING:  # a checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        with _IMPORTS:
            if name in _ROOMS:
                return import_module(f"evenstep.{name}")
            if name in __all__:
                for room in _ROOMS:
                    module = import_module(f"evenstep.{room}")
                    if name in module.__all__:
                        value = globals()[name] = getattr(module, name)
                        return value
        raise AttributeError(f"module 'evenstep' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_ROOMS, *__all__})
