"""Cost coefficients from measured micro-batch seconds, for hardware that no FLOP count predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.cost.fit_report import FitReport, report_fit
from evenstep.cost.nnls import nonnegative_least_squares
from evenstep.cost.terms import checked_weight, per_sample
from evenstep.samples import MetadataTable, SampleMetadata

__all__ = ["FittedCost", "fit_cost"]

MicroBatch = MetadataTable | Sequence[int | SampleMetadata] | npt.NDArray[Any]
_NONE = np.zeros(0)


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A cost model in measured seconds, as `fit_cost` returns it.

    Fit on one rank (or from a file) and give every rank the same numbers: ranks compare their models.

    Attributes:
        a: Seconds per token.
        b: Seconds per squared token of a document.
        features: Seconds per unit of each feature, as ``(name, seconds)`` pairs.
        padding: Seconds per padding token.
        overhead: Seconds that a micro-batch takes whatever is in it; no part of a sample's cost.
        report: Predicted against actual.
    """

    a: float
    b: float
    features: tuple[tuple[str, float], ...] = ()
    padding: float = 0.0
    overhead: float = 0.0
    report: FitReport | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("a", "b", "padding", "overhead"):
            object.__setattr__(self, name, checked_weight(name, getattr(self, name)))
        pairs = tuple((name, checked_weight(f"feature {name!r}", value)) for name, value in self.features)
        object.__setattr__(self, "features", pairs)

    @property
    def stages(self) -> tuple[str, ...]:
        """One stage: what was measured was the whole micro-batch."""
        return ("llm",)

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """Seconds of each sample, float64 ``[n]``."""
        squares = per_sample(table, np.square(table.documents, dtype=np.float64))
        costs = self.a * table.tokens + self.b * squares
        for name, seconds in self.features:
            if name in table.features:
                costs += seconds * table.features[name]
        return costs

    def predict(self, micro_batch: MicroBatch, *, padding: int = 0) -> float:
        """Seconds of one micro-batch with ``padding`` padding tokens."""
        return float(self.cost(_as_table(micro_batch)).sum() + self.padding * padding + self.overhead)


def fit_cost(
    samples: Sequence[MicroBatch | int | SampleMetadata] | MetadataTable | npt.NDArray[Any],
    seconds: npt.ArrayLike,
    *,
    features: Sequence[str] = (),
    padding: npt.ArrayLike | None = None,
    overhead: bool = True,
) -> FittedCost:
    """Fit ``seconds = overhead + a * tokens + b * sum of squared document lengths`` to measurements.

    Every coefficient is at least 0: non-negative least squares (Lawson and Hanson, "Solving Least Squares
    Problems", 1974, chapter 23), so that noise cannot make a longer sample cheaper. Measure forward and
    backward of single micro-batches of different shapes with the device synchronised, after warm-up.

    Args:
        samples: What each of ``m`` micro-batches held: a `MetadataTable`, or the length or `SampleMetadata`
            of each of its samples. Where each held one sample, that alone will do (one `MetadataTable` of all,
            or their lengths ``[m]``).
        seconds: How long each took, float ``[m]``, positive.
        features: Feature columns that cost something of their own.
        padding: Padding tokens of each micro-batch, ``[m]``, where the model computed them; None leaves the
            term out.
        overhead: Whether a micro-batch has a cost of its own. Without the term, constant work such as
            launching kernels would be booked on tokens.

    Returns:
        The model, with ``report`` holding predicted against actual.

    Raises:
        TypeError: A micro-batch is not of a type above, or ``features`` is one name.
        ValueError: Lengths differ, a measurement is not a positive number, a feature is not finite, padding is no number >= 0, there are fewer micro-batches than
            coefficients, or nothing that was measured explains the seconds.
    """
    if isinstance(samples, MetadataTable):
        samples = [samples.take(np.array([k])) for k in range(len(samples))]
    tables = [_as_table(micro_batch) for micro_batch in samples]
    actual = np.asarray(seconds, dtype=np.float64)
    _check_measurements(len(tables), actual)
    columns = {
        "tokens": _sums([table.tokens for table in tables]),
        "pairs": _sums([np.square(table.documents, dtype=np.float64) for table in tables]),
    }
    if isinstance(features, str):
        raise TypeError(f"features is {features!r}, expected a sequence of names, such as [{features!r}]")
    for name in features:
        if name in columns or name in ("padding", "overhead"):
            raise ValueError(f"feature {name!r} has the name of a built-in term or is given twice; rename it")
        columns[name] = _sums([table.features.get(name, _NONE) for table in tables])
    if padding is not None:
        columns["padding"] = np.asarray(padding, dtype=np.float64)
        if columns["padding"].shape != actual.shape:
            raise ValueError(
                f"padding has shape {columns['padding'].shape} for {len(actual)} micro-batches; "
                "give one number of padding tokens for each"
            )
        bad = ~(np.isfinite(columns["padding"]) & (columns["padding"] >= 0))
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(
                f"padding[{first}] is {float(columns['padding'][first])!r}, expected a number of padding tokens >= 0; "
                "leave failed measurements out"
            )
    if overhead:
        columns["overhead"] = np.ones(len(tables))
    if len(tables) < len(columns):
        raise ValueError(
            f"{len(tables)} micro-batches cannot tell {len(columns)} coefficients ({', '.join(columns)}) apart; "
            "measure at least as many of different shapes, better ten times as many"
        )
    for name in features:
        bad = ~np.isfinite(columns[name])
        if bad.any():
            raise ValueError(
                f"feature {name!r} sums to {float(columns[name][bad][0])!r} in micro-batch {int(np.argmax(bad))}, expected "
                "a finite number"
            )
    matrix = np.column_stack(list(columns.values()))
    solution = nonnegative_least_squares(matrix, actual)
    if not solution.any():
        raise ValueError("no coefficient explains the measured seconds: the micro-batches are all empty")
    report = report_fit(tuple(columns), matrix, solution, actual)
    found = report.coefficients
    return FittedCost(
        a=found["tokens"],
        b=found["pairs"],
        features=tuple((name, found[name]) for name in features),
        padding=found.get("padding", 0.0),
        overhead=found.get("overhead", 0.0),
        report=report,
    )


def _as_table(micro_batch: MicroBatch | int | SampleMetadata) -> MetadataTable:
    if isinstance(micro_batch, MetadataTable):
        return micro_batch
    if isinstance(micro_batch, (int, np.integer, SampleMetadata)) and not isinstance(micro_batch, bool):
        micro_batch = [micro_batch]
    unlike = f"a micro-batch is {micro_batch!r}, expected a MetadataTable or a sequence of sample lengths or of SampleMetadata"
    if isinstance(micro_batch, Sequence) and any(isinstance(s, SampleMetadata) for s in micro_batch):
        records = [s if isinstance(s, SampleMetadata) else _of_length(s) for s in micro_batch]
        if None in records:
            raise TypeError(unlike)
        return MetadataTable.from_samples([record for record in records if record is not None])
    lengths = np.asarray(micro_batch)
    if lengths.ndim != 1 or (lengths.size and not np.issubdtype(lengths.dtype, np.integer)):
        raise TypeError(unlike)
    if (lengths < 0).any():
        raise ValueError(f"a micro-batch holds a sample of {int(lengths.min())} tokens, expected at least 0")
    return MetadataTable.from_tokens(lengths.astype(np.int64))


def _of_length(length: object) -> SampleMetadata | None:
    """A sample of which only the length is given; None if that is no length."""
    known = isinstance(length, int | np.integer) and not isinstance(length, bool) and length >= 0
    return SampleMetadata(int(length)) if known else None  # type: ignore[call-overload]  # an integer


def _sums(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return np.array([column.sum() for column in columns], dtype=np.float64)


def _check_measurements(count: int, seconds: npt.NDArray[np.float64]) -> None:
    if seconds.shape != (count,):
        raise ValueError(
            f"seconds has shape {seconds.shape} for {count} micro-batches; give one measurement for each"
        )
    bad = ~(np.isfinite(seconds) & (seconds > 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(
            f"seconds[{first}] is {float(seconds[first])!r}: no micro-batch takes that long; give finite, "
            "positive seconds and leave failed measurements out"
        )
