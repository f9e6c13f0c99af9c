"""Token-budget steps: laws of an epoch, whatever the lengths, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cursor import Cursor
from evenstep.errors import Infeasible
from evenstep.sampling import Step, TokenBudgetSampler

INDICES = [29, 181, 44, 36, 160, 39, 165, 138, 128, 185, 199]
ROWS = [1, 1, 1, 2, 0, 0, 2, 2, 2, 2, 2]
rows = st.integers(1, 9)
segments = st.none() | st.integers(1, 4)
PlainFirstFit = Callable[[list[int], int, int, int | None], list[int] | None]


def steps_of(sampler: TokenBudgetSampler, epoch: int = 0) -> list[Step]:
    steps, cursor = [], sampler.start().at_epoch(epoch)
    while (step := sampler.step_at(cursor)) is not None:
        steps.append(step)
        cursor = step.next_cursor
    return steps


def loads(sampler: TokenBudgetSampler, step: Step) -> npt.NDArray[np.int64]:
    real = step.indices >= 0
    tokens = np.minimum(sampler.lengths[step.indices[real]], sampler.seq_len)
    return np.bincount(step.rows[real], tokens, minlength=sampler.rows_per_step).astype(np.int64)


def test_a_step_of_far_more_samples_than_usual_is_read_whole() -> None:
    sampler = TokenBudgetSampler([1] * 3000 + [20] * 3000, rows_per_step=100, seq_len=20, order="sequential")
    step = sampler.step_at(sampler.start())
    assert step is not None
    assert step.indices.tolist() == list(range(2000))
    assert loads(sampler, step).tolist() == [20] * 100


def test_the_steps_of_an_epoch_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TokenBudgetSampler([3] * 50, rows_per_step=4, seq_len=10)
    count = sampler.steps_in(1)
    assert count == len(steps_of(sampler, 1))
    monkeypatch.setattr(TokenBudgetSampler, "_pack", None)
    assert sampler.steps_in(1) == count


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=80),
    rows=rows,
    order=st.sampled_from(["shuffled", "sequential"]),
    fill=st.none() | st.floats(0.05, 1),
    limit=segments,
    oversized=st.sampled_from(["single", "truncate"]),
    epoch=st.integers(0, 3),
)
def test_laws_of_an_epoch(
    lengths: list[int],
    rows: int,
    order: str,
    fill: float | None,
    limit: int | None,
    oversized: Literal["single", "truncate"],
    epoch: int,
) -> None:
    lengths[0] = max(lengths[0], 1)
    sampler = TokenBudgetSampler(
        lengths,
        rows_per_step=rows,
        seq_len=20,
        order=order,
        seed=3,
        remainder="pad",
        fill=fill,
        max_segments=limit,
        oversized=oversized,
    )
    steps = steps_of(sampler, epoch)
    assert len(steps) == sampler.steps_in(epoch)
    seen = np.concatenate([step.indices[step.indices >= 0] for step in steps])
    assert sorted(seen) == list(range(len(lengths))), "every sample exactly once"
    if order == "sequential":
        assert seen.tolist() == list(range(len(lengths)))
    for step in steps:
        assert step.indices.dtype == np.int64
        assert step.rows.dtype == np.int32
        with_tokens = step.indices[(step.indices >= 0) & (sampler.lengths[step.indices] > 0)]
        filled = loads(sampler, step)
        assert filled.max() <= 20
        assert np.count_nonzero(filled) == min(rows, len(with_tokens)), "no row empty while samples suffice"
        empty = np.flatnonzero(filled == 0)
        assert step.rows[step.indices < 0].tolist() == empty.tolist(), "one padding index per empty row"
        if limit is not None:
            counts = np.bincount(step.rows[np.isin(step.indices, with_tokens)], minlength=rows)
            assert counts.max() <= limit
        if fill is not None:
            last = sampler.lengths[with_tokens[-1]] if len(with_tokens) else 0
            short_of_it = len(with_tokens) <= rows or filled.sum() - min(last, 20) < fill * rows * 20
            assert short_of_it, "a step ends where fill is reached"


@given(lengths=st.lists(st.integers(0, 20), min_size=12, max_size=60), rows=st.integers(1, 4))
def test_drop_leaves_out_only_an_unfilled_last_step(
    plain_first_fit: PlainFirstFit, lengths: list[int], rows: int
) -> None:
    lengths[:rows] = [20] * rows
    kept = TokenBudgetSampler(lengths, rows_per_step=rows, seq_len=20)
    padded = TokenBudgetSampler(lengths, rows_per_step=rows, seq_len=20, remainder="pad")
    a, b = steps_of(kept), steps_of(padded)
    assert [s.indices.tolist() for s in a] == [s.indices.tolist() for s in b[: len(a)]]
    assert len(b) - len(a) in (0, 1)
    assert all((step.indices >= 0).all() for step in a)
    for step in b[len(a) :]:
        tokens = [lengths[i] for i in step.indices if i >= 0 and lengths[i] > 0]
        assert plain_first_fit(tokens, rows - 1, 20, None) is not None


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    rows=st.integers(1, 4),
    fill=st.none() | st.floats(0.05, 1),
    limit=segments,
)
def test_drop_leaves_at_least_one_step_or_is_refused(
    plain_first_fit: PlainFirstFit, lengths: list[int], rows: int, fill: float | None, limit: int | None
) -> None:
    lengths[0] = max(lengths[0], 1)

    tokens = [min(length, 20) for length in lengths if length]
    filled = fill is not None and sum(tokens) >= fill * rows * 20
    no_step = len(tokens) < rows or (not filled and plain_first_fit(tokens, rows - 1, 20, limit) is not None)
    refused: Any = pytest.raises(ValueError, match="would leave no step at all") if no_step else nullcontext()
    with refused:
        sampler = TokenBudgetSampler(
            lengths, rows_per_step=rows, seq_len=20, fill=fill, max_segments=limit, oversized="truncate"
        )
        assert len(sampler) > 0


def test_whole_rows_make_whole_steps() -> None:
    exact = TokenBudgetSampler([20] * 8, rows_per_step=4, seq_len=20)
    assert len(exact) == 2
    one_more = TokenBudgetSampler([20] * 9, rows_per_step=4, seq_len=20)
    assert len(one_more) == 2
    assert len(TokenBudgetSampler([20] * 9, rows_per_step=4, seq_len=20, remainder="pad")) == 3


@given(at=st.integers(0, 199), epoch=st.integers(0, 2))
def test_any_position_starts_a_step_of_the_same_order(at: int, epoch: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 64, 200)
    sampler = TokenBudgetSampler(lengths, rows_per_step=4, seq_len=64, remainder="pad")
    order = np.concatenate([step.indices[step.indices >= 0] for step in steps_of(sampler, epoch)])
    step = sampler.step_at(Cursor(epoch=epoch, consumed_samples=at, step=9))
    assert step is not None
    end = step.next_cursor.consumed_samples
    assert step.indices[step.indices >= 0].tolist() == order[at:end].tolist()
    assert step.next_cursor.step == 10


def test_a_remembered_step_still_takes_its_fields_from_the_cursor() -> None:
    sampler = TokenBudgetSampler([5] * 100, rows_per_step=2, seq_len=10, seed=8)
    first = sampler.step_at(Cursor(step=1, micro_batch=2, plan=3))
    again = sampler.step_at(Cursor(step=50, dp_size=4))
    assert first is not None
    assert again is not None
    assert again.indices.tolist() == first.indices.tolist()
    assert (first.next_cursor.step, first.next_cursor.micro_batch, first.next_cursor.plan) == (2, 0, 0)
    assert (again.next_cursor.step, again.next_cursor.dp_size) == (51, 4)
    assert first.next_cursor.global_batch_size == 2
    assert first.next_cursor.seed == 8


@given(
    data=st.data(),
    rows=rows,
    limit=segments,
    budget=st.integers(5, 12),
    order=st.sampled_from(["shuffled", "sequential"]),
)
def test_budgets_hold_in_every_row(
    data: st.DataObject, rows: int, limit: int | None, budget: int, order: str
) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=50)))
    patches = np.array(data.draw(st.lists(st.integers(0, 14), min_size=len(lengths), max_size=len(lengths))))
    sampler = TokenBudgetSampler(
        lengths,
        rows_per_step=rows,
        seq_len=20,
        order=order,
        remainder="pad",
        oversized="single",
        max_segments=limit,
        budgets={"patches": budget},
        features={"patches": patches},
    )
    steps = steps_of(sampler)
    seen = np.concatenate([step.indices[step.indices >= 0] for step in steps])
    assert sorted(seen) == list(range(len(lengths)))
    for step in steps:
        for row in range(rows):
            inside = step.indices[(step.rows == row) & (step.indices >= 0)]
            alone = len(inside) == 1
            assert alone or (lengths[inside].sum() <= 20 and patches[inside].sum() <= budget)
            assert limit is None or len(inside) <= limit


def test_budgets_above_all_sums_change_nothing() -> None:
    lengths = np.random.default_rng(3).integers(1, 64, 400)
    plain = TokenBudgetSampler(lengths, rows_per_step=4, seq_len=64)
    loose = TokenBudgetSampler(
        lengths, rows_per_step=4, seq_len=64, budgets={"images": 1e6}, features={"images": lengths * 0.5}
    )
    assert [(s.indices.tolist(), s.rows.tolist()) for s in steps_of(loose)] == [
        (s.indices.tolist(), s.rows.tolist()) for s in steps_of(plain)
    ]


def test_lognormal_lengths_fill_the_rows() -> None:
    """Next-fit of consecutive documents fills 0.90 on such lengths; dataset packers reach 0.99."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1.2, 20_000).astype(np.int64) + 1, 8192)
    sampler = TokenBudgetSampler(lengths, rows_per_step=64, seq_len=8192)
    steps = steps_of(sampler)
    assert len(steps) == len(sampler)
    filled = [loads(sampler, step).sum() / (64 * 8192) for step in steps[:-1]]
    assert np.mean(filled) > 0.99
    assert min(filled) > 0.98


def test_identity_follows_the_lengths() -> None:
    a = TokenBudgetSampler([5, 6, 7], rows_per_step=1, seq_len=10).start()
    assert (
        a.stream
        == TokenBudgetSampler(np.array([5, 6, 7], np.int32), rows_per_step=1, seq_len=10).start().stream
    )
    assert a.stream != TokenBudgetSampler([5, 6, 8], rows_per_step=1, seq_len=10).start().stream
    assert (a.dataset_size, a.order, a.seed, a.global_batch_size) == (3, "shuffled", 0, 1)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"lengths": [3, 11, 12]},
            Infeasible,
            "sample 1 has 11 tokens, a row holds seq_len=10: it fits nowhere. Raise seq_len, split the sample "
            "(evenstep.datasets.SplitDocuments), or pass oversized='single' or 'truncate'",
        ),
        ({"lengths": []}, ValueError, "lengths is empty: a sampler needs at least one sample"),
        ({"lengths": [4, -2]}, ValueError, "lengths[1] is -2: a sample has 0 or more tokens"),
        (
            {"lengths": [4.0, 2.0]},
            TypeError,
            "lengths is float64 [2]: expected a one-dimensional array of integers, the tokens of each sample; pass "
            "lengths.astype(np.int64)",
        ),
        ({"fill": 0}, ValueError, "fill is 0: expected a fraction of the step's tokens in (0, 1], or None"),
        (
            {"lengths": [4, 0], "rows_per_step": 2},
            ValueError,
            "1 samples with tokens cannot fill 2 rows: remainder='drop' would leave no step at all; make the "
            "step smaller, or use 'pad'",
        ),
        (
            {"lengths": [3] * 64, "rows_per_step": 4, "seq_len": 128},
            ValueError,
            "64 samples with 192 tokens fit into 2 of the 4 rows of 128 tokens that a step has: remainder='drop' "
            "would leave no step at all; make the step smaller (rows_per_step or seq_len), or use 'pad'",
        ),
        (
            {"budgets": {"patches": 4}, "features": {"patches": [1.0, 5.0]}},
            Infeasible,
            "sample 1 has patches=5.0, the budget of a row is 4: it fits nowhere. Raise the budget, or pass "
            "oversized='single'",
        ),
        (
            {"budgets": {"patches": 4}, "features": {"images": [1, 2]}},
            ValueError,
            "budgets names 'patches', features has ['images']: pass a column for each budget",
        ),
        (
            {"budgets": {"patches": 4}, "features": {"patches": [1]}},
            TypeError,
            "features['patches'] is int64 [1]: expected one number per sample, [2]",
        ),
        (
            {"budgets": {"patches": 4}, "features": {"patches": [1, float("nan")]}},
            ValueError,
            "features['patches'] holds a negative or non-finite number: no row can add them up",
        ),
        ({"remainder": "wrap"}, ValueError, "remainder is 'wrap': expected one of 'drop', 'pad'"),
        (
            {"oversized": "cut"},
            ValueError,
            "oversized is 'cut': expected one of 'error', 'single', 'truncate'",
        ),
    ],
)
def test_bad_arguments(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        TokenBudgetSampler(**{"lengths": [4, 2], "rows_per_step": 1, "seq_len": 10, **kwargs})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_an_order_outside_the_lengths() -> None:
    class Shifted:
        def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return positions + 1 + epoch

    sampler = TokenBudgetSampler([5, 5], rows_per_step=1, seq_len=10, order=Shifted())
    with pytest.raises(ValueError, match=r"^the order gave index 2 in epoch 0, but lengths has 2 entries: "):
        sampler.step_at(Cursor())


def test_a_token_budget_never_changes() -> None:
    """Golden values: whoever changes them breaks every saved position."""
    lengths = [i * i % 61 for i in range(200)]
    sampler = TokenBudgetSampler(lengths, rows_per_step=3, seq_len=100, seed=3)
    step = sampler.step_at(Cursor(epoch=1, consumed_samples=20))
    assert step is not None
    assert step.indices.tolist() == INDICES
    assert step.rows.tolist() == ROWS
