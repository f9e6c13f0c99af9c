"""Least squares with coefficients that cannot be negative, without SciPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["nonnegative_least_squares"]

_TINY = np.finfo(np.float64).tiny


def nonnegative_least_squares(
    matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Minimise ``|matrix @ x - target|`` over ``x >= 0``.

    The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23. Columns
    are scaled to unit length first, because squared tokens and seconds differ by ten orders of magnitude.

    Args:
        matrix: float64 ``[m, k]``.
        target: float64 ``[m]``.

    Returns:
        float64 ``[k]``; 0 for columns of zeros.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = matrix / scale
    count = matrix.shape[1]
    solution = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 10 * np.finfo(np.float64).eps * max(matrix.shape) * float(np.linalg.norm(target))
    # Each round frees one column; the bound only guards against cycling through rounding errors.
    for _ in range(10 * count):
        slope = scaled.T @ (target - scaled @ solution)
        slope[free] = -np.inf
        if count == 0 or slope.max() <= tolerance:
            break
        free[int(np.argmax(slope))] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if (trial[free] > 0).all():
                solution = trial
                break
            # Walk towards the trial until the first coefficient meets 0, and fix that one there.
            blocked = np.flatnonzero(free & (trial <= 0))
            ratios = solution[blocked] / np.maximum(solution[blocked] - trial[blocked], _TINY)
            solution = np.maximum(solution + ratios.min() * (trial - solution), 0.0)
            free[blocked[ratios <= ratios.min()]] = False
            solution[~free] = 0.0
    return solution / scale
