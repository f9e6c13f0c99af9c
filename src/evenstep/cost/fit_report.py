"""What a fit of cost coefficients is worth, so that nobody balances by noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FitReport", "report_fit"]

_ALIKE = 0.01  # relative spread below which a quantity cannot be told from the overhead of a micro-batch


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well the fitted coefficients explain the measured seconds; ``print`` it for a table.

    Attributes:
        actual: Measured seconds, float64 ``[m]``.
        predicted: Seconds that the fit predicts, float64 ``[m]``.
        r2: Share of the variance of ``actual`` that is explained; 1 is perfect, 0 no better than the mean.
        coefficients: Seconds per unit: ``tokens``, ``pairs``, each feature, ``padding``, ``overhead``.
        standard_errors: Of each coefficient; NaN where it is at its bound of 0 or nothing is left to tell it.
        shares: Part of the predicted seconds that each coefficient stands for; they sum to 1.
        notes: What the measurements could not tell, in words.
    """

    actual: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.float64]
    r2: float
    coefficients: Mapping[str, float]
    standard_errors: Mapping[str, float]
    shares: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def largest_error(self) -> float:
        """Largest ``|predicted - actual| / actual`` of a micro-batch."""
        return float(np.max(np.abs(self.predicted - self.actual) / self.actual))

    @property
    def median_error(self) -> float:
        """Median of ``|predicted - actual| / actual``."""
        return float(np.median(np.abs(self.predicted - self.actual) / self.actual))

    def __str__(self) -> str:
        lines = [
            f"fit of {len(self.actual)} micro-batches: R^2 {self.r2:.4f}, error of a micro-batch "
            f"{self.median_error:.1%} (median), {self.largest_error:.1%} (largest)",
            f"{'term':<12}{'seconds/unit':>14}{'std. error':>12}{'share':>8}",
        ]
        lines += [
            f"{name:<12}{value:>14.4g}{self.standard_errors[name]:>12.2g}{self.shares[name]:>8.1%}"
            for name, value in self.coefficients.items()
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def report_fit(
    names: tuple[str, ...],
    matrix: npt.NDArray[np.float64],
    solution: npt.NDArray[np.float64],
    actual: npt.NDArray[np.float64],
) -> FitReport:
    """Compare ``matrix @ solution`` (float64 ``[m, k]`` and ``[k]``) with ``actual`` (``[m]``)."""
    predicted = matrix @ solution
    left = float(np.square(actual - predicted).sum())
    spread = float(np.square(actual - actual.mean()).sum())
    parts = matrix.mean(axis=0) * solution
    return FitReport(
        actual=actual,
        predicted=predicted,
        r2=1.0 - left / spread if spread > 0 else float(left == 0),
        coefficients=dict(zip(names, solution.tolist(), strict=True)),
        standard_errors=dict(zip(names, _standard_errors(matrix, solution, left).tolist(), strict=True)),
        shares=dict(zip(names, (parts / parts.sum()).tolist(), strict=True)),
        notes=tuple(_notes(names, matrix, solution)),
    )


def _standard_errors(
    matrix: npt.NDArray[np.float64], solution: npt.NDArray[np.float64], left: float
) -> npt.NDArray[np.float64]:
    errors = np.full(len(solution), np.nan)
    active = solution > 0
    freedom = len(matrix) - int(active.sum())
    used = matrix[:, active]
    scale = used.max(axis=0)
    if freedom < 1 or np.linalg.matrix_rank(used / scale) < used.shape[1]:
        return errors
    covariance = np.linalg.inv((used / scale).T @ (used / scale)) * (left / freedom)
    errors[active] = np.sqrt(np.diag(covariance)) / scale
    return errors


def _notes(
    names: tuple[str, ...], matrix: npt.NDArray[np.float64], solution: npt.NDArray[np.float64]
) -> list[str]:
    notes = []
    for position, name in enumerate(names):
        column = matrix[:, position]
        if name == "overhead":
            continue
        if not column.any():
            notes.append(f"no micro-batch has any {name}: its coefficient is 0 because nothing tells it")
        elif "overhead" in names and np.ptp(column) < _ALIKE * column.max():
            notes.append(
                f"every micro-batch has nearly the same {name}: its coefficient and the overhead cannot be told "
                "apart; measure micro-batches of different fill"
            )
        elif solution[position] == 0:
            notes.append(f"{name} is at its bound of 0: the measurements show no cost of it")
    return notes
