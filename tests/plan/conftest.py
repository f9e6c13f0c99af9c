"""Random windows with a feasible reference layout, shared by the tests of planning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from evenstep.plan import PackingConstraints, Plan, plan_window


@dataclass
class Case:
    """Arguments of `plan_window` for one window."""

    tokens: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    dp_size: int
    micro_batches: int
    rows: int
    reference: npt.NDArray[np.int32]
    constraints: PackingConstraints
    features: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.dp_size * self.micro_batches * self.rows

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "costs": self.costs,
            "dp_size": self.dp_size,
            "micro_batches": self.micro_batches,
            "rows": self.rows,
            "reference": self.reference,
            "constraints": self.constraints,
            "features": self.features,
        } | changes

    def check(self, assignment: npt.NDArray[np.int32]) -> None:
        """Conservation and hard limits of a layout."""
        assert assignment.dtype == np.int32
        assert assignment.shape == self.tokens.shape
        assert ((assignment >= 0) & (assignment < self.num_rows)).all()
        limits = self.constraints
        oversized = self.tokens > limits.seq_len
        for row in range(self.num_rows):
            inside = np.flatnonzero(assignment == row)
            if len(inside) > 1:
                assert self.tokens[inside].sum() <= limits.seq_len
                assert not oversized[inside].any() or limits.oversized != "single"
            for name, limit in (limits.budgets or {}).items():
                assert self.features[name][inside].sum() <= limit
            if limits.max_segments is not None:
                assert len(inside) <= limits.max_segments


@st.composite
def _cases(draw: st.DrawFn, most_samples: int = 40, stages: int = 3, fancy: bool = True) -> Case:
    """A window built row by row, so that its reference layout is feasible by construction."""
    dp_size = draw(st.integers(1, 5))
    micro_batches = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 3))
    num_rows = dp_size * micro_batches * rows
    seq_len = draw(st.sampled_from([7, 64, 1000]))
    budget = draw(st.none() | st.integers(0, 50)) if fancy else None
    segments = draw(st.none() | st.integers(1, 4)) if fancy else None
    free = dict.fromkeys(range(num_rows), seq_len)
    spare = dict.fromkeys(range(num_rows), 50 if budget is None else budget)
    count = dict.fromkeys(range(num_rows), 0)
    tokens, images, reference = [], [], []
    for _ in range(draw(st.integers(0, most_samples))):
        row = draw(st.integers(0, num_rows - 1))
        if segments is not None and count[row] == segments:
            continue
        tokens.append(draw(st.integers(0, free[row])))
        images.append(draw(st.integers(0, spare[row])))
        reference.append(row)
        free[row] -= tokens[-1]
        spare[row] -= images[-1] if budget is not None else 0
        count[row] += 1
    size = len(tokens)
    kind = draw(st.sampled_from(["tokens", "quadratic", "free", "zero", "huge", "equal"]))
    column = np.array(tokens, dtype=np.int64)
    table: npt.NDArray[np.float64] = column.astype(np.float64)
    if kind == "quadratic":
        table = 7.5 * table + table**2 / 3
    elif kind == "free":
        table = np.array(draw(st.lists(st.floats(0, 1e9), min_size=size, max_size=size)), dtype=np.float64)
    elif kind == "zero":
        table = np.zeros(size)
    elif kind == "huge":
        table = table * 1e300
    elif kind == "equal":
        table = np.full(size, 3.7)
    width = draw(st.integers(1, stages))
    if width > 1:
        table = np.stack([table] + [np.roll(table, shift) * 0.5 for shift in range(1, width)], axis=-1)
    return Case(
        tokens=column,
        costs=table,
        dp_size=dp_size,
        micro_batches=micro_batches,
        rows=rows,
        reference=np.array(reference, dtype=np.int32),
        constraints=PackingConstraints(
            seq_len, budgets=None if budget is None else {"images": budget}, max_segments=segments
        ),
        features={"images": np.array(images, dtype=np.float64)},
    )


@pytest.fixture(scope="session")
def cases() -> Callable[..., st.SearchStrategy[Case]]:
    """Strategy for windows; ``most_samples``, ``stages`` and ``fancy`` (budgets, segments) bound it."""
    return _cases


def real_lengths(seed: int, rows: int, seq_len: int, fill: float) -> npt.NDArray[np.int64]:
    """Long-tailed document lengths that fill a share of ``rows`` rows."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(7.6, 1.1, 60 * rows), 1, seq_len).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), fill * rows * seq_len))]


@pytest.fixture(scope="session")
def draw_lengths() -> Callable[..., npt.NDArray[np.int64]]:
    return real_lengths


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """`plan_window` with a cost per token and two ranks, two micro-batches, one row of 100 tokens unless told."""

    def make(tokens: Any, costs: Any = None, **changes: Any) -> Plan:
        arguments: dict[str, Any] = {"dp_size": 2, "micro_batches": 2, "rows": 1}
        arguments |= {"constraints": PackingConstraints(100)} | changes
        return plan_window(tokens, np.asarray(tokens, dtype=float) if costs is None else costs, **arguments)

    return make
