"""What a cost model is, how several make stages, and what is checked of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from evenstep.cost.terms import checked_weight, per_sample
from evenstep.samples import MetadataTable

__all__ = [
    "DEFAULT_COST",
    "CostModel",
    "LinearQuadraticCost",
    "StageCost",
    "check_model",
    "checked_costs",
    "describe_cost",
    "padding_cost",
    "stages_of",
]


@runtime_checkable
class CostModel(Protocol):
    """Predicts the compute of samples; a pure, vectorised function of their metadata.

    ``repr`` of a model is logged and compared between ranks, so it must be complete and the same in every
    process. A model may also have ``padding``: what one padding token costs (see `padding_cost`). Where a model
    has only ``cost``, the columns of what it returns are its stages.
    """

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages; a model of one stage costs float64 ``[n]``, of more ``[n, stages]``."""

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """Finite costs >= 0 of the ``n`` samples of ``table``: float64 ``[n]`` or ``[n, stages]``."""


@dataclass(frozen=True, slots=True)
class LinearQuadraticCost:
    """``a * tokens + b * sum of squared document lengths``, the shape of a transformer's compute.

    The default is that of a dense transformer of hidden size 4096 (7B class) with a feed-forward of four
    times that: a token takes 24 h^2 FLOPs of matrix products a layer, a (query, key) pair 4 h, so the cost
    is proportional to ``6 h L + L^2`` with ``6 h = 24576``. Only the ratio of ``a`` and ``b`` changes a plan.

    Attributes:
        a: Cost of one token.
        b: Cost of one (query, key) pair inside a document.
        padding: Cost of one padding token; 0 for batches without padding (`collate_varlen`), ``a`` where
            rows are padded and the model computes the padding.

    Raises:
        TypeError: A field is no number.
        ValueError: A field is negative, infinite or NaN.
    """

    a: float = 24576.0
    b: float = 1.0
    padding: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a", "b", "padding"):
            object.__setattr__(self, name, checked_weight(name, getattr(self, name)))

    @property
    def stages(self) -> tuple[str, ...]:
        """One stage, the language model."""
        return ("llm",)

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """float64 ``[n]``, in the unit of ``a`` and ``b``."""
        squares = per_sample(table, np.square(table.documents, dtype=np.float64))
        return self.a * table.tokens + self.b * squares


DEFAULT_COST = LinearQuadraticCost()
"""What `build_loader` balances by where no cost model is given."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """One cost model per stage, in the order of the mapping.

    Every stage ends with a collective of its own, so the planner balances each. All models must share one
    unit (FLOPs of both, or seconds of both): their makespans are added up.

    Attributes:
        models: Model of each stage, for example ``{"llm": LinearQuadraticCost(), "encoder":
            FeatureCost("patches", TransformerCost(...), group=256)}``. Each has one stage itself.

    Raises:
        TypeError: ``models`` is no mapping of names to cost models.
        ValueError: It is empty, or a model has several stages.
    """

    models: Mapping[str, CostModel]

    def __post_init__(self) -> None:
        if not isinstance(self.models, Mapping):
            raise TypeError(
                f"models is {self.models!r}, expected a mapping of stage names to cost models, "
                'such as {"llm": LinearQuadraticCost()}'
            )
        if not self.models:
            raise ValueError("models is empty: nothing would be balanced; give at least one stage")
        for name, model in self.models.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"stage name {name!r} is not a non-empty string")
            check_model(f"the model of stage {name!r}", model)
            if len(stages_of(model)) != 1:
                raise ValueError(
                    f"the model of stage {name!r} has the stages {stages_of(model)}: stages cannot be nested; "
                    "give each of them a name of its own"
                )
        object.__setattr__(self, "models", dict(self.models))

    @property
    def stages(self) -> tuple[str, ...]:
        """The names, in the order of the columns."""
        return tuple(self.models)

    @property
    def padding(self) -> tuple[float, ...]:
        """What one padding token costs in each stage."""
        return tuple(float(padding_cost(model)[0]) for model in self.models.values())

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """float64 ``[n, stages]``; ``[n]`` where there is one stage."""
        columns = [model.cost(table) for model in self.models.values()]
        return columns[0] if len(columns) == 1 else np.column_stack(columns)


def stages_of(model: CostModel) -> tuple[str, ...]:
    """The stages that ``model`` names; one, the language model, where it names none."""
    return tuple(getattr(model, "stages", ("llm",)))


def padding_cost(model: CostModel) -> npt.NDArray[np.float64]:
    """What one padding token costs in each stage of ``model``: float64 ``[stages]``.

    It is the model's ``padding`` (a number, or one per stage), 0 for models that have none: padding that is
    cut away before the model runs, as in variable-length batches, costs nothing.
    """
    padding = np.asarray(getattr(model, "padding", 0.0), dtype=np.float64)
    return np.zeros(len(stages_of(model))) + padding


def checked_costs(model: CostModel, table: MetadataTable) -> npt.NDArray[np.float64]:
    """The costs of ``table``, after a check that ``model`` keeps its contract.

    Returns:
        float64 ``[n]`` or ``[n, stages]``, contiguous.

    Raises:
        ValueError: The shape is not ``[n]`` or ``[n, stages]`` of its stages, or a cost is negative, infinite or NaN; the
            message names the model and the sample.
    """
    costs = np.ascontiguousarray(model.cost(table), dtype=np.float64)
    if costs.ndim not in (1, 2) or len(costs) != len(table) or (costs.ndim == 2 and not costs.shape[1]):
        raise ValueError(
            f"{model!r} returned costs of shape {costs.shape} for {len(table)} samples, expected "
            f"[{len(table)}] or [{len(table)}, stages]: one cost (or one per stage) for every sample"
        )
    bad = ~(np.isfinite(costs) & (costs >= 0))
    if bad.any():
        first = int(np.argmax(bad.reshape(len(costs), -1).any(axis=1)))
        raise ValueError(
            f"{model!r} gives sample {first} of the table ({int(table.tokens[first])} tokens) the cost "
            f"{costs[first].tolist()!r}: it cannot be balanced; costs are finite and not negative"
        )
    columns = costs.shape[1] if costs.ndim == 2 else 1
    if hasattr(model, "stages") and columns != len(model.stages):
        raise ValueError(
            f"{model!r} returned costs of shape {costs.shape}, {columns} for each sample, but its stages are "
            f"{tuple(model.stages)}: return one column for each of its {len(model.stages)} stages"
        )
    return costs


def describe_cost(model: CostModel) -> str:
    """``repr(model)`` without memory addresses, so that it can be compared between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(model))


def check_model(name: str, model: object) -> None:
    """Refuse what cannot tell costs.

    Raises:
        TypeError: ``model`` lacks ``cost``, or is the class instead of an object of it.
    """
    if not callable(getattr(model, "cost", None)) or isinstance(model, type):
        raise TypeError(
            f"{name} is {model!r}, expected a cost model: an object with cost(table), such as LinearQuadraticCost()"
        )
