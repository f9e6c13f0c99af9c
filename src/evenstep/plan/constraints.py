"""What a packed row must never exceed, checked once where it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from evenstep.budget import checked_budgets

__all__ = ["PackingConstraints"]

Oversized = Literal["error", "single", "truncate"]
_OVERSIZED = ("error", "single", "truncate")


@dataclass(frozen=True, slots=True)
class PackingConstraints:
    """Hard limits of one packed row.

    Attributes:
        seq_len: Tokens that fit into a row; positive.
        oversized: What to do with a sample above a limit. ``"error"`` raises `Infeasible`, ``"single"`` gives it a
            row of its own, ``"truncate"`` counts it as ``seq_len`` tokens (a budget cannot be truncated).
        budgets: Largest sum of a named feature in one row, for example ``{"patches": 16384}``; fractions count to
            less than 2e-12 of the budget, so that ten times 0.1 fill 1.0.
        max_segments: Largest number of samples in one row; None means no limit.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    seq_len: int
    oversized: Oversized = "error"
    budgets: Mapping[str, float] | None = None
    max_segments: int | None = None

    def __post_init__(self) -> None:
        self._set_count("seq_len", "the tokens that fit into a row")
        if self.oversized not in _OVERSIZED:
            raise ValueError(
                f"oversized={self.oversized!r} is not a policy for samples above a limit; "
                f"use one of {', '.join(map(repr, _OVERSIZED))}"
            )
        if self.max_segments is not None:
            self._set_count("max_segments", "the samples that fit into a row, or None")
        object.__setattr__(self, "budgets", MappingProxyType(checked_budgets(self.budgets)))

    def __reduce__(self) -> tuple[type[PackingConstraints], tuple[object, ...]]:
        return type(self), (self.seq_len, self.oversized, dict(self.budgets or {}), self.max_segments)

    def _set_count(self, name: str, meaning: str) -> None:
        """Refuse what is no positive integer; NumPy's become Python's, so that equal limits have equal texts."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected an integer: {meaning}")
        if value <= 0:
            raise ValueError(f"{name} is {value}, expected a positive integer: {meaning}")
        object.__setattr__(self, name, int(value))
