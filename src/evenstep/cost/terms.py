"""The per-document sums that every cost model is made of."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from evenstep.samples import MetadataTable

__all__ = ["checked_count", "checked_weight", "document_pairs", "per_sample"]


def per_sample(table: MetadataTable, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum float64 ``[documents]`` over the documents of each sample: float64 ``[n]``."""
    counts = np.diff(table.document_offsets)
    if len(values) == len(counts) and bool((counts == 1).all()):
        return values
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, weights=values, minlength=len(counts)).astype(np.float64, copy=False)


def document_pairs(
    lengths: npt.NDArray[np.int64], *, causal: bool, window: int | None = None
) -> npt.NDArray[np.float64]:
    """(query, key) pairs that attention inside each document computes, float64 like ``lengths``.

    Full attention has L^2 of them, causal L (L + 1) / 2. A sliding ``window`` of W (each query sees its own
    position and the W - 1 before it, and as many after it where attention is not causal) cuts off the
    triangle of L - W positions on the left, and on the right as well without causality.
    """
    length = lengths.astype(np.float64)
    left_out = np.zeros_like(length)
    if window is not None:
        beyond = np.maximum(length - window, 0.0)
        left_out = beyond * (beyond + 1.0) / 2.0
    if causal:
        return length * (length + 1.0) / 2.0 - left_out
    return length * length - 2.0 * left_out


def checked_weight(name: str, value: object) -> float:
    """``value`` as a float, or an error that names it: a weight is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name} is {value!r}: samples would get a cost that cannot be balanced; "
            "give a finite number that is not negative"
        )
    return float(value)


def checked_count(name: str, value: object, *, least: int = 0) -> int:
    """``value`` as an int, or an error that names it: a dimension is an integer >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected an integer")
    if value < least:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")
    return int(value)
