"""What each sample of a dataset takes of a row, known ahead and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.budget import budget_units, checked_budgets, units_of
from evenstep.errors import Infeasible

__all__ = ["RowNeeds"]

_I64 = npt.NDArray[np.int64]


class RowNeeds:
    """Tokens and budgeted features of every sample, with the policy for oversized ones applied on reading.

    Args:
        lengths: Tokens, integers ``[n]``, each >= 0.
        seq_len: Tokens of a row.
        oversized: ``"error"``, ``"single"`` or ``"truncate"``.
        features: A column of numbers >= 0, ``[n]``, for each budget.
        budgets: Largest sum of each feature in a row.

    Attributes:
        budgets: What a row holds of each budget, in its units (`evenstep.budget`).
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        seq_len: int,
        oversized: str,
        features: Mapping[str, npt.ArrayLike],
        budgets: Mapping[str, float],
    ) -> None:
        self.seq_len = seq_len
        self.lengths: npt.NDArray[np.integer[Any]] = _checked_lengths(lengths)
        limits = checked_budgets(budgets)
        self._limits = tuple(limits.values())
        self.budgets: tuple[int, ...] = tuple(budget_units(limit) for limit in self._limits)
        if oversized == "error" and self.lengths.max() > seq_len:
            at = int(np.argmax(self.lengths > seq_len))
            raise Infeasible(
                f"sample {at} has {int(self.lengths[at])} tokens, a row holds seq_len={seq_len}: it fits nowhere. "
                "Raise seq_len, split the sample (evenstep.datasets.SplitDocuments), or pass oversized='single' or 'truncate'"
            )
        self._columns = [_checked_column(name, features, len(self.lengths)) for name in limits]
        for (name, limit), most, column in zip(limits.items(), self.budgets, self._columns, strict=True):
            if oversized != "single" and units_of(column.max(), limit) > most:
                at = int(np.argmax(units_of(column, limit) > most))
                raise Infeasible(
                    f"sample {at} has {name}={column[at]!s}, the budget of a row is {budgets[name]}: it fits nowhere. Raise "
                    "the budget, or pass oversized='single'"
                )

    def at(self, indices: _I64) -> tuple[_I64, _I64 | None]:
        """What the samples ``indices`` (int64 ``[n]``) take of a row.

        Returns:
            Tokens, int64 ``[n]``, at most ``seq_len``, and features in units of the budgets, int64
            ``[len(budgets), n]``, at most these, or None without budgets. A sample above a budget takes all the
            tokens of a row.
        """
        tokens = np.minimum(self.lengths[indices], self.seq_len).astype(np.int64)
        if not self.budgets:
            return tokens, None
        needs = np.stack(
            [units_of(c[indices], limit) for c, limit in zip(self._columns, self._limits, strict=True)]
        )
        most = np.array(self.budgets)[:, None]
        tokens[(needs > most).any(axis=0) & (tokens > 0)] = self.seq_len
        return tokens, np.minimum(needs, most)


def _checked_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    array = np.asarray(lengths)
    if array.ndim == 1 and not len(array):
        raise ValueError("lengths is empty: a sampler needs at least one sample")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"lengths is {array.dtype} {list(array.shape)}: expected a one-dimensional array of integers, the "
            f"tokens of each sample{'; pass lengths.astype(np.int64)' * (array.ndim == 1)}"
        )
    if array.min() < 0:
        at = int(array.argmin())
        raise ValueError(f"lengths[{at}] is {int(array[at])}: a sample has 0 or more tokens")
    return array


def _checked_column(name: str, features: Mapping[str, npt.ArrayLike], size: int) -> npt.NDArray[Any]:
    if name not in features:
        raise ValueError(
            f"budgets names {name!r}, features has {sorted(features)}: pass a column for each budget"
        )
    column = np.asarray(features[name])
    if column.shape != (size,) or column.dtype.kind not in "iuf":
        raise TypeError(
            f"features[{name!r}] is {column.dtype} {list(column.shape)}: expected one number per sample, [{size}]"
        )
    if not (column.min() >= 0 and np.isfinite(column.max())):
        raise ValueError(f"features[{name!r}] holds a negative or non-finite number: no row can add them up")
    return column
