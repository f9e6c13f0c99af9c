"""What is simulated: layouts, algorithms and costs, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from evenstep.cost import DEFAULT_COST, CostModel
from evenstep.plan import Algorithm

__all__ = ["Oversized", "Reference", "Settings", "Sync", "fitting", "usual_seq_len"]

Oversized = Literal["truncate", "split", "drop"]
Reference = Literal["shuffled", "sampler", "greedy"]
Sync = Literal["micro_batch", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to simulate.

    Attributes:
        seq_len: Tokens of a row.
        dp_sizes: Data-parallel ranks; each is simulated.
        windows: Micro-batches planned together; each up to ``accumulation_steps`` is simulated.
        algorithms: Planning algorithms; each is simulated.
        micro_batch_size: Rows of one rank's micro-batch.
        accumulation_steps: Micro-batches of a rank in an optimizer step.
        cost: Predicts the compute of a document.
        sync: Where ranks wait for each other: at every micro-batch or once a step.
        oversized: What happens to a document longer than a row.
        fill: A step ends at this share of its room; None means as full as it gets.
        reference: Where documents are before planning, and what layouts are compared with: ``"shuffled"``, packed rows in
            random order (a loader that packs well, or an external stream); ``"sampler"``, the same, but planned from where
            `TokenBudgetSampler` puts them, largest first; ``"greedy"``, rows that documents fill as they come, the next
            one wherever a document does not fit, dealt to the ranks in turn (what ``evenstep demo`` compares with).
        order: ``"shuffled"`` or ``"sequential"``, the order in which documents are read.
        seed: Of the shuffled order, and of the rows' order in the loader that is compared with.
        steps: Optimizer steps to sample for each dp size, spread evenly over an epoch.
        consecutive: Sample the first steps of the epoch instead.
        seconds: Sample fewer steps than that, but at least one of each dp size, once planning has taken this
            long; None means however long it takes.
        bytes_per_token: Payload that moves with a token.
        min_gain: The planner keeps its reference layout unless it gains more than this share.

    Raises:
        TypeError: A number is of the wrong type.
        ValueError: A value is out of range.
    """

    seq_len: int
    dp_sizes: tuple[int, ...] = (8, 64)
    windows: tuple[int, ...] = (1, 2, 4, 8)
    algorithms: tuple[Algorithm, ...] = ("refine", "auto")
    micro_batch_size: int = 1
    accumulation_steps: int = 8
    cost: CostModel = DEFAULT_COST
    sync: Sync = "micro_batch"
    oversized: Oversized = "truncate"
    fill: float | None = None
    reference: Reference = "shuffled"
    order: Literal["shuffled", "sequential"] = "shuffled"
    seed: int = 0
    steps: int = 5
    consecutive: bool = False
    seconds: float | None = None
    bytes_per_token: int = 8
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch_size", "accumulation_steps", "steps", "bytes_per_token"):
            _check_count(name, getattr(self, name))
        for name in ("dp_sizes", "windows", "algorithms"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name} is empty: nothing would be simulated; give at least one")
            if name != "algorithms":
                for value in values:
                    _check_count(name, value)
        choices: dict[str, tuple[str, ...]] = {
            "sync": get_args(Sync),
            "oversized": get_args(Oversized),
            "reference": get_args(Reference),
            "order": ("shuffled", "sequential"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for algorithm in self.algorithms:
            if algorithm not in get_args(Algorithm):
                raise ValueError(
                    f"algorithm {algorithm!r} is unknown, expected one of {', '.join(get_args(Algorithm))}"
                )
        if self.reference == "greedy" and (self.fill is not None or self.order != "shuffled"):
            raise ValueError(
                f"reference='greedy' fills rows with shuffled documents as they come; fill={self.fill!r} and "
                f"order={self.order!r} would mean nothing there, leave them away"
            )
        if self.fill is not None and not 0 < self.fill <= 1:
            raise ValueError(f"fill is {self.fill!r}, expected a share of a step's room in (0, 1]")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds!r}, expected a positive number or None")
        if len(self.cost.stages) != 1:
            raise ValueError(
                f"lengths alone say nothing about the stages {self.cost.stages}; give a cost of one stage"
            )
        if not min(self.windows) <= self.accumulation_steps:
            raise ValueError(
                f"no window of {self.windows} fits into a step of {self.accumulation_steps} micro-batches: "
                "a window never crosses an optimizer step"
            )

    @property
    def fitting_windows(self) -> tuple[int, ...]:
        """The windows that a step has room for, each once, ascending."""
        return tuple(sorted({window for window in self.windows if window <= self.accumulation_steps}))

    def rows(self, dp_size: int) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.micro_batch_size * dp_size * self.accumulation_steps


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected an integer")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected at least 1")


def usual_seq_len(lengths: npt.NDArray[np.int64]) -> int:
    """The smallest power of two, at least 1024, that holds 99% of the documents whole."""
    return 1 << max(10, math.ceil(math.log2(max(1, float(np.quantile(lengths, 0.99))))))


def fitting(
    lengths: npt.NDArray[np.int64], seq_len: int, oversized: Oversized, *, keep_empty: bool = False
) -> npt.NDArray[np.int64]:
    """``lengths`` made to fit into rows of ``seq_len`` tokens, without empty documents unless told otherwise."""
    if not keep_empty:
        lengths = lengths[lengths > 0]
    if oversized == "truncate":
        return np.minimum(lengths, seq_len)
    if oversized == "drop":
        return lengths[lengths <= seq_len]
    pieces = np.maximum(1, -(-lengths // seq_len))
    split = np.full(int(pieces.sum()), seq_len, dtype=np.int64)
    split[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_len
    return split
