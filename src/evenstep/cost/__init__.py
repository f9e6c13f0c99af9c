"""What a sample costs to train on, predicted from its metadata.

A cost model turns a `MetadataTable` of ``n`` samples into float64 ``[n]``, or ``[n, stages]`` where a
model has stages that end with a collective each (vision encoder, language model). Units are free, FLOPs
or seconds, but all stages of one model share them: the planner adds them up.

    model.py        the protocol; linear and quadratic terms, stages
    feature.py      a model of a feature instead of the tokens
    marginal.py     a model for padded rows
    transformer.py  FLOPs of a transformer from its dimensions
    terms.py        sums over the documents of a sample, checks of numbers
    calibrate.py    coefficients from measured seconds
    fit_report.py   what such a fit is worth
    nnls.py         the solver behind it
"""

from __future__ import annotations

from evenstep.cost.calibrate import FittedCost, fit_cost
from evenstep.cost.feature import FeatureCost
from evenstep.cost.fit_report import FitReport
from evenstep.cost.marginal import MarginalCost
from evenstep.cost.model import (
    DEFAULT_COST,
    CostModel,
    LinearQuadraticCost,
    StageCost,
    checked_costs,
    describe_cost,
    padding_cost,
)
from evenstep.cost.transformer import TransformerCost

__all__ = [
    "DEFAULT_COST",
    "CostModel",
    "FeatureCost",
    "FitReport",
    "FittedCost",
    "LinearQuadraticCost",
    "MarginalCost",
    "StageCost",
    "TransformerCost",
    "checked_costs",
    "describe_cost",
    "fit_cost",
    "padding_cost",
]
