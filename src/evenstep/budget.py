"""A budget in whole numbers, so that samplers and planner never disagree whether samples fit into a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import numpy as np
import numpy.typing as npt

from evenstep.shown import shown

__all__ = ["budget_units", "checked_budgets", "units_of"]

_BITS = 40  # of a budget: sums over a window stay exact in int64, and those of a row in float64


def checked_budgets(budgets: Mapping[str, float] | None) -> dict[str, float]:
    """A copy in the order of the names, with floats, so that equal budgets look equal on every rank.

    Raises:
        TypeError: It is no mapping of names to numbers.
        ValueError: A limit is negative or not finite.
    """
    if budgets is None:
        return {}
    if not isinstance(budgets, Mapping):
        raise TypeError(
            f"budgets is {shown(budgets)}: expected a limit for each feature, such as {{'patches': 16384}}, or None"
        )
    for name, limit in budgets.items():
        if not isinstance(name, str):
            raise TypeError(
                f"budgets has the key {shown(name)}: expected names of features, such as 'patches'"
            )
        if isinstance(limit, bool) or not isinstance(limit, Real):
            raise TypeError(f"budgets[{name!r}] is {limit!r} ({type(limit).__name__}), expected a number")
        if not math.isfinite(limit) or limit < 0:
            raise ValueError(
                f"budgets[{name!r}] is {limit!r}, so no row could hold a sample; use a finite limit >= 0"
            )
    return {name: float(budgets[name]) for name in sorted(budgets)}


def budget_units(limit: float) -> int:
    """``limit`` (finite, >= 0) in units of 2**-40 of the next power of two above it, rounded up."""
    return int(np.ceil(np.ldexp(limit, _shift(limit))))


def units_of(amounts: npt.ArrayLike, limit: float) -> npt.NDArray[np.int64]:
    """What samples take of a budget of ``limit``, in its units.

    Rounded down, as floating-point numbers cannot hold most fractions: ten times 0.1 fill a budget of 1.0, though ten
    doubles of 0.1 sum to more. So a row exceeds its budget by less than 2e-12 of it per sample, and whole numbers stay
    exact. What takes no part of a unit takes nothing, except of a budget of 0, which only 0 fits.

    Args:
        amounts: Finite numbers ``[n]`` >= 0.
        limit: Finite, >= 0.

    Returns:
        int64 ``[n]``; above ``budget_units(limit)`` where one sample alone is above the budget.
    """
    column = np.asarray(amounts, dtype=np.float64)
    if limit == 0:
        return np.asarray(column > 0, dtype=np.int64)
    # Cut before it is scaled: more than twice the budget is too much, however much it is.
    return np.ldexp(np.minimum(column, 4.0 * limit), _shift(limit)).astype(np.int64)


def _shift(limit: float) -> int:
    return _BITS - int(np.frexp(limit)[1]) if limit else 0
