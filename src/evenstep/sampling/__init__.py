"""Which samples make an optimizer step: pure functions of the cursor, equal on every rank."""

from evenstep.sampling.adapters import TorchSamplerAdapter
from evenstep.sampling.hashing import sample_seed
from evenstep.sampling.mixture import MixtureOrder, MixtureSampler
from evenstep.sampling.order import Order
from evenstep.sampling.permutation import KeyedPermutation
from evenstep.sampling.rank_local import LocalStep, LocalStepSource, RankLocalBatchSampler
from evenstep.sampling.steps import Remainder, Sampler, Step, StepSampler
from evenstep.sampling.token_budget import TokenBudgetSampler

__all__ = [
    "KeyedPermutation",
    "LocalStep",
    "LocalStepSource",
    "MixtureOrder",
    "MixtureSampler",
    "Order",
    "RankLocalBatchSampler",
    "Remainder",
    "Sampler",
    "Step",
    "StepSampler",
    "TokenBudgetSampler",
    "TorchSamplerAdapter",
    "sample_seed",
]
