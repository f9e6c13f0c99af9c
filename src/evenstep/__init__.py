"""Balanced, packed and exactly resumable micro-batches for LLM and VLM training."""

from __future__ import annotations

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
