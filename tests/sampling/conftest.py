"""First-fit-decreasing as anybody would write it, which the fast one and the sampler are compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def _plain_first_fit(lengths: list[int], rows: int, capacity: int, limit: int | None) -> list[int] | None:
    room, used, placed = [capacity] * rows, [0] * rows, [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [r for r in range(rows) if room[r] >= lengths[i] and (limit is None or used[r] < limit)]
        if not fits:
            return None
        placed[i] = fits[0]
        room[fits[0]] -= lengths[i]
        used[fits[0]] += 1
    return placed


@pytest.fixture(scope="session")
def plain_first_fit() -> Callable[[list[int], int, int, int | None], list[int] | None]:
    """``(lengths, rows, capacity, limit of samples in a row) -> row of each``; None where one does not fit."""
    return _plain_first_fit
