"""Which samples make an optimizer step: pure functions of the cursor, equal on every rank."""

from evenstep.sampling.hashing import sample_seed
from evenstep.sampling.order import Order
from evenstep.sampling.permutation import KeyedPermutation
from evenstep.sampling.steps import Remainder, Sampler, Step, StepSampler
from evenstep.sampling.token_budget import TokenBudgetSampler

__all__ = [
    "KeyedPermutation",
    "Order",
    "Remainder",
    "Sampler",
    "Step",
    "StepSampler",
    "TokenBudgetSampler",
    "sample_seed",
]
