"""Fitted coefficients: the truth is found again, and the solver is optimal."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evenstep.cost import FittedCost, fit_cost
from evenstep.cost.nnls import nonnegative_least_squares
from evenstep.samples import MetadataTable, SampleMetadata

weights = st.floats(1e-9, 1e-3)


def measured(a: float, b: float, overhead: float, seed: int = 0) -> tuple[list[list[int]], list[float]]:
    rng = np.random.default_rng(seed)
    batches = [rng.integers(1, 4000, size=rng.integers(1, 9)).tolist() for _ in range(30)]
    seconds = [overhead + a * sum(batch) + b * sum(x * x for x in batch) for batch in batches]
    return batches, seconds


@given(
    st.tuples(st.integers(1, 8), st.integers(1, 5)).flatmap(
        lambda shape: st.tuples(
            arrays(np.float64, shape, elements=st.integers(-5, 5)),
            arrays(np.float64, shape[0], elements=st.integers(-9, 9)),
        )
    )
)
@example(
    (np.array([[1.0, 3, 1], [3, 1, 2], [2, 3, 2]]), np.array([5.0, 5, 4]))
)  # the first freed is fixed again
def test_no_other_coefficients_fit_better(
    problem: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
) -> None:
    matrix, target = problem
    solution = nonnegative_least_squares(matrix, target)
    assert (solution >= 0).all()
    # Karush-Kuhn-Tucker: no slope where a coefficient is free, none that a fixed one could descend.
    slope = matrix.T @ (target - matrix @ solution)
    assert (slope <= 1e-8).all()
    assert (np.abs(slope[solution > 0]) <= 1e-8).all()


def test_a_measurement_of_one_sample_needs_no_list_around_it() -> None:
    lengths = np.arange(1, 31) * 100
    seconds = 0.01 + 1e-6 * lengths + 1e-9 * lengths**2.0
    expected = fit_cost([[int(n)] for n in lengths], seconds)
    assert fit_cost(lengths, seconds) == expected
    assert fit_cost([int(n) for n in lengths], seconds) == expected
    assert fit_cost([SampleMetadata(int(n)) for n in lengths], seconds) == expected
    assert fit_cost(MetadataTable.from_tokens(lengths), seconds) == expected


@given(a=weights, b=st.floats(1e-13, 1e-8), overhead=st.floats(1e-4, 1.0), seed=st.integers(0, 1000))
def test_exact_measurements_give_the_coefficients_back(
    a: float, b: float, overhead: float, seed: int
) -> None:
    batches, seconds = measured(a, b, overhead, seed)
    fit = fit_cost(batches, seconds)
    largest = max(seconds)
    # A coefficient is found as exactly as the seconds it stands for stand out of all seconds.
    assert fit.a == pytest.approx(a, rel=1e-9, abs=1e-9 * largest / max(map(sum, batches)))
    assert fit.b == pytest.approx(b, rel=1e-9, abs=1e-9 * largest / max(map(sum, batches)) ** 2)
    assert fit.overhead == pytest.approx(overhead, rel=1e-9, abs=1e-9 * largest)
    assert [fit.predict(batch) for batch in batches] == pytest.approx(seconds, rel=1e-9)


def test_report_compares_predicted_with_actual() -> None:
    batches, seconds = measured(2e-6, 1e-9, 0.01)
    noise = np.random.default_rng(1).normal(1.0, 0.02, size=len(seconds))
    fit = fit_cost(batches, np.array(seconds) * noise)
    report = fit.report
    assert report is not None
    assert list(report.coefficients) == ["tokens", "pairs", "overhead"]
    assert report.predicted.tolist() == pytest.approx([fit.predict(batch) for batch in batches])
    left = (
        np.square(report.actual - report.predicted).sum()
        / np.square(report.actual - report.actual.mean()).sum()
    )
    assert report.r2 == pytest.approx(1 - left)
    assert 0.97 < report.r2 < 1
    assert sum(report.shares.values()) == pytest.approx(1)
    for name, truth in {"tokens": 2e-6, "pairs": 1e-9, "overhead": 0.01}.items():
        assert abs(report.coefficients[name] - truth) < 4 * report.standard_errors[name]
    assert report.median_error < report.largest_error < 0.1
    assert report.notes == ()
    lines = str(report).splitlines()
    assert lines[0] == (
        f"fit of 30 micro-batches: R^2 {report.r2:.4f}, error of a micro-batch {report.median_error:.1%} "
        f"(median), {report.largest_error:.1%} (largest)"
    )
    assert [line.split()[0] for line in lines[1:]] == ["term", "tokens", "pairs", "overhead"]


def test_noise_cannot_make_longer_samples_cheaper() -> None:
    fit = fit_cost([[10], [20], [30], [40]], [4.0, 3.0, 2.0, 1.0])
    assert (fit.a, fit.b, fit.overhead) == (0.0, 0.0, 2.5)
    assert fit.report is not None
    assert fit.report.notes == (
        "tokens is at its bound of 0: the measurements show no cost of it",
        "pairs is at its bound of 0: the measurements show no cost of it",
    )
    assert np.isnan(fit.report.standard_errors["tokens"])


def test_full_rows_are_told_apart_from_overhead_only_with_other_fills() -> None:
    fit = fit_cost([[100], [50, 50], [25, 75], [10, 90]], [3.0, 2.0, 2.25, 2.64])
    assert fit.report is not None
    assert fit.report.notes[0] == (
        "every micro-batch has nearly the same tokens: its coefficient and the overhead cannot be told "
        "apart; measure micro-batches of different fill"
    )


def test_what_no_micro_batch_has_is_told() -> None:
    fit = fit_cost([[1], [2], [4], [8]], [1.0, 2.0, 4.0, 8.0], features=["patches"])
    assert dict(fit.features) == {"patches": 0.0}
    assert fit.report is not None
    assert "no micro-batch has any patches: its coefficient is 0 because nothing tells it" in fit.report.notes


def test_as_many_measurements_as_coefficients_leave_nothing_to_tell_errors_by() -> None:
    fit = fit_cost([[1], [2], [4]], [2.0 + 1 + 1, 2.0 + 2 + 4, 2.0 + 4 + 16])
    assert (fit.a, fit.b, fit.overhead) == pytest.approx((1, 1, 2))
    assert fit.stages == ("llm",)  # what was measured was the whole micro-batch
    assert fit.report is not None
    assert np.isnan(list(fit.report.standard_errors.values())).all()


def test_features_and_padding_have_coefficients_of_their_own() -> None:
    rng = np.random.default_rng(3)
    tables, seconds, padding = [], [], rng.integers(0, 1000, size=20)
    for pad in padding.tolist():
        tokens, patches = rng.integers(1, 1000, size=4), rng.integers(0, 500, size=4)
        records = [
            SampleMetadata(int(t), {"patches": float(p)}) for t, p in zip(tokens, patches, strict=True)
        ]
        tables.append(records if pad % 2 else MetadataTable.from_samples(records))
        seconds.append(
            0.5 + 1e-3 * tokens.sum() + 1e-6 * (tokens**2).sum() + 2e-3 * patches.sum() + 5e-4 * pad
        )
    tables.append(MetadataTable.from_tokens([10, 20]))  # text only: no column of patches at all
    seconds.append(0.5 + 1e-3 * 30 + 1e-6 * 500)
    fit = fit_cost(tables, seconds, features=["patches"], padding=[*padding, 0])
    assert fit.a == pytest.approx(1e-3)
    assert fit.b == pytest.approx(1e-6)
    assert dict(fit.features) == pytest.approx({"patches": 2e-3})
    assert fit.padding == pytest.approx(5e-4)
    assert fit.overhead == pytest.approx(0.5)
    assert fit.predict([SampleMetadata(100, {"patches": 10})], padding=20) == pytest.approx(
        0.5 + 0.1 + 0.01 + 0.03
    )


def test_lengths_and_records_may_stand_side_by_side() -> None:
    seconds = [1.0, 2.0, 3.0, 5.0]
    mixed: list[list[int | SampleMetadata]] = [[SampleMetadata(10), 1000], [5], [7, SampleMetadata(8)], [20]]
    assert fit_cost(mixed, seconds) == fit_cost([[10, 1000], [5], [7, 8], [20]], seconds)


def test_documents_count_by_themselves() -> None:
    whole = FittedCost(0.0, 1.0).cost(MetadataTable.from_samples([SampleMetadata(10, documents=[4, 6])]))
    assert whole.tolist() == [52.0]


def test_repr_is_complete_and_short() -> None:
    batches, seconds = measured(2e-6, 1e-9, 0.01)
    fit = fit_cost(batches, seconds)
    assert eval(repr(fit)) == fit
    assert len(repr(fit)) < 200


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: fit_cost([[1], [2]], [1.0]),
        ValueError,
        "seconds has shape (1,) for 2 micro-batches; give one measurement for each",
    ),
    (
        lambda: fit_cost([[1], [2], [3]], [1.0, float("nan"), 1.0]),
        ValueError,
        "seconds[1] is nan: no micro-batch takes that long; give finite, positive seconds and leave failed "
        "measurements out",
    ),
    (
        lambda: fit_cost([[1], [2]], [1.0, 2.0]),
        ValueError,
        "2 micro-batches cannot tell 3 coefficients (tokens, pairs, overhead) apart; "
        "measure at least as many of different shapes, better ten times as many",
    ),
    (
        lambda: fit_cost([[], []], [1.0, 2.0], overhead=False),
        ValueError,
        "no coefficient explains the measured seconds: the micro-batches are all empty",
    ),
    (
        lambda: fit_cost([[1.5], [2], [3]], [1.0, 2.0, 3.0]),  # type: ignore[list-item]
        TypeError,
        "a micro-batch is [1.5], expected a MetadataTable or a sequence of sample lengths or of SampleMetadata",
    ),
    (
        lambda: fit_cost([[-3], [2], [3]], [1.0, 2.0, 3.0]),
        ValueError,
        "a micro-batch holds a sample of -3 tokens, expected at least 0",
    ),
    (
        lambda: fit_cost([[1], [2], [3]], [1.0, 2.0, 3.0], features=["tokens"]),
        ValueError,
        "feature 'tokens' has the name of a built-in term or is given twice; rename it",
    ),
    (
        lambda: fit_cost([[1], [2], [3]], [1.0, 2.0, 3.0], padding=[1]),
        ValueError,
        "padding has shape (1,) for 3 micro-batches; give one number of padding tokens for each",
    ),
    (
        lambda: fit_cost([[1], [2], [3]], [1.0, 2.0, 3.0], padding=[1, float("nan"), 3]),
        ValueError,
        "padding[1] is nan, expected a number of padding tokens >= 0; leave failed measurements out",
    ),
    (
        lambda: fit_cost([[1], [2], [3]], [1.0, 2.0, 3.0], padding=[1, 2, -3]),
        ValueError,
        "padding[2] is -3.0, expected a number of padding tokens >= 0; leave failed measurements out",
    ),
    (
        lambda: fit_cost([[1], [2], [3]], [1.0, 2.0, 3.0], features="patches"),
        TypeError,
        "features is 'patches', expected a sequence of names, such as ['patches']",
    ),
    (
        lambda: fit_cost(
            [[SampleMetadata(1, {"patches": float("nan")})], [2], [3], [4]],
            [1.0, 2.0, 3.0, 4.0],
            features=["patches"],
        ),
        ValueError,
        "feature 'patches' sums to nan in micro-batch 0, expected a finite number",
    ),
    (
        lambda: fit_cost([[SampleMetadata(1), 2.5]], [1.0]),  # type: ignore[list-item]
        TypeError,
        "a micro-batch is [SampleMetadata(tokens=1, features={}, loss_tokens=None, documents=None), 2.5], expected a "
        "MetadataTable or a sequence of sample lengths or of SampleMetadata",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message[:32] for _, _, message in BAD])
def test_bad_measurements_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
