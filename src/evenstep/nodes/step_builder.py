"""Makes local steps of any stream of samples: rows filled first-fit, nothing lost, resumed exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from evenstep.budget import budget_units, units_of
from evenstep.config import LoaderConfig
from evenstep.errors import Infeasible, SampleError
from evenstep.nodes.describe import Describer
from evenstep.nodes.local_streams import PaddingRow
from evenstep.nodes.stage import call
from evenstep.nodes.streams import open_stream, pass_epoch_on
from evenstep.nodes.turn import Turn
from evenstep.plan import PackingConstraints
from evenstep.samples import SampleMetadata

__all__ = ["StepBuilder"]

log: logging.Logger = logging.getLogger("evenstep")

Amounts = npt.NDArray[np.int64]  # of tokens, segments and each budget, in its units
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sample that has been pulled and not yet handed out."""

    number: int
    sample: Any
    needs: Amounts


class StepBuilder(BaseNode[list[list[Any]]]):
    """A stream of samples in, local steps of ``rows`` rows out: the source of an `ExternalStepReader`.

    Each sample goes to the first row with room for it, in the order of the stream. One that fits nowhere waits for
    the next step, where it is placed before all younger ones; a step is complete when ``look_ahead`` samples wait.
    So a sample moves by a step or few, and none is dropped; the last steps of a stream may have rows
    without samples, each a `PaddingRow`.

    Its state holds no payload: it is the position of the source before the oldest sample that still waits, and
    which of the samples after it have been handed out. A resume pulls those again.

    Args:
        source: A torchdata node or any iterable of samples, as for `ExternalStepReader`.
        seq_len: Tokens of a row.
        rows: Rows of a step: micro-batch size times accumulation steps.
        look_ahead: Samples that wait at most; more fill rows better and take memory.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        oversized: A sample longer than ``seq_len``: ``"error"``, ``"single"`` (a row of its own, also for one above a
            budget) or ``"truncate"`` (it takes a whole row; the packer cuts it).
        budgets: Hard limits per row on sums of features, besides tokens.
        max_segments: Most samples in one row.
        on_sample_error: A sample that cannot be measured, or that a policy refuses: ``"raise"`` or ``"skip"``.

    Attributes:
        skipped: Samples left out since it was built.

    Raises:
        Infeasible: While iterating: a sample is above a budget, and ``oversized`` is not ``"single"``.
        ValueError: A number is out of range.

    Example:
        >>> from evenstep.nodes import StepBuilder
        >>> samples = [{"input_ids": list(range(n))} for n in (6, 5, 4, 3, 2, 9)]
        >>> builder = StepBuilder(samples, seq_len=10, rows=2, look_ahead=1)
        >>> [[[len(s["input_ids"]) for s in row] for row in step] for step in builder]
        [[[6, 4], [5, 3, 2]], [[9], []]]
    """

    def __init__(
        self,
        source: Any,
        seq_len: int,
        rows: int,
        *,
        look_ahead: int = 64,
        metadata_fn: Callable[[Any], Any] | None = None,
        oversized: str = "error",
        budgets: dict[str, float] | None = None,
        max_segments: int | None = None,
        on_sample_error: str = "raise",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
        for name, value in (("rows", rows), ("look_ahead", look_ahead)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}={value!r}, expected an integer >= 1")
        config = LoaderConfig(
            seq_len=seq_len,
            oversized=oversized,  # type: ignore[arg-type]  # checked there
            budgets=budgets,
            max_segments=max_segments,
            on_sample_error=on_sample_error,  # type: ignore[arg-type]  # checked there
        )
        self.rows: int = int(rows)
        self.seq_len: int = config.seq_len
        self.external = source
        self.skipped: int = 0
        self._skips = config.on_sample_error == "skip"
        self._look_ahead = look_ahead
        self._describe = Describer(config, metadata_fn)
        self._limits: PackingConstraints = config.constraints()
        self._budgets = config.budgets or {}
        self._row: Amounts = np.array(
            [
                seq_len,
                max_segments or _NO_LIMIT,
                *(budget_units(limit) for limit in self._budgets.values()),
            ]
        )
        self._stream = open_stream(source, "samples")
        self._waiting: list[_Waiting] = []
        self._marks: list[tuple[int, Any]] = []  # the stream's position before the sample of that number
        self._handed: set[int] = set()  # numbers since the first mark
        self._pulled = 0
        self._ended = False
        self._epoch: int | None = None
        self._turn = Turn()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the stream again, or go to ``initial_state``."""
        with self._turn.reset():
            super().reset(initial_state)
            self._go_to(initial_state)

    def _go_to(self, initial_state: dict[str, Any] | None) -> None:
        self._waiting, self._handed, self._pulled, self._ended = [], set(), 0, False
        if initial_state is None:
            self._stream.begin(self._epoch)
            self._marks = [(0, self._stream.state())]
            return
        missing = [key for key in ("source", "pulled", "handed", "marks") if key not in initial_state]
        if missing:
            raise ValueError(f"this is not the state of a StepBuilder: missing keys {missing}")
        self._stream.load(initial_state["source"])
        self._marks = []
        handed, marks = int(initial_state["handed"], 16), initial_state["marks"].split()
        for number in range(initial_state["pulled"] + 1):
            if str(number) in marks:
                self._marks.append((number, self._stream.state()))
            if number == initial_state["pulled"]:
                break
            known = handed >> number & 1
            if known:
                self._handed.add(number)
            sample = self._pull(known=bool(known))
            if sample is not None:
                self._waiting.append(sample)

    def set_epoch(self, epoch: int) -> None:
        """Pass a new epoch on to the source, where it has ``set_epoch``."""
        self._epoch = epoch
        pass_epoch_on(self.external, epoch)

    def get_state(self) -> dict[str, Any]:
        """Where the source stood before the oldest waiting sample, and what was handed out of those behind it."""
        base, position = self._marks[0]
        return {
            "source": position,
            "pulled": self._pulled - base,
            "handed": f"{sum(1 << (number - base) for number in self._handed):x}",
            "marks": " ".join(str(number - base) for number, _ in self._marks),
        }

    def next(self) -> list[list[Any]]:
        """The next step."""
        return self._turn.pull(self._next)

    def _next(self) -> list[list[Any]]:
        mark = None
        if self._pulled > self._marks[-1][0] and not self._ended:
            mark = self._pulled, call("the source's state", self._stream.state)
        rows: list[list[Any]] = [[] for _ in range(self.rows)]
        room = np.tile(self._row, (self.rows, 1))
        waiting: list[_Waiting] = []
        placed: list[int] = []

        def place(item: _Waiting) -> None:
            row = self._first_fit(room, item)
            if row is None:
                waiting.append(item)
            else:
                rows[row].append(item.sample)
                placed.append(item.number)

        for item in self._waiting:
            place(item)
        while len(waiting) < self._look_ahead and ((room[:, 0] >= 1) & (room[:, 1] >= 1)).any():
            pulled = self._pull()
            if pulled is None:
                break
            place(pulled)
        if mark is not None and self._pulled > mark[0]:
            self._marks.append(mark)
        if not placed:
            raise StopIteration
        self._waiting = waiting
        self._handed.update(placed)
        self._forget()
        return [row or PaddingRow() for row in rows]

    def _pull(self, *, known: bool = False) -> _Waiting | None:
        """The next sample that can be used; None at the end, or of a ``known`` one that was handed out or left out."""
        while not self._ended:
            try:
                sample = self._stream.next()
            except StopIteration:
                self._ended = True
                return None
            number = self._pulled
            if known:
                self._pulled += 1
                return None
            try:
                needs = self._needs(number, self._describe(sample).metadata)
            except Infeasible as error:
                self._leave_out(number, error, error)
            except Exception as error:
                told = (
                    f"sample {number} since the stream was begun or loaded: {type(error).__name__}: {error}"
                )
                failed = SampleError(told, number)
                failed.__cause__ = error
                self._leave_out(number, error, failed)
            else:
                self._pulled += 1
                return _Waiting(number, sample, needs)
        return None

    def _leave_out(self, number: int, error: Exception, failed: Exception) -> None:
        """Skip a sample for good (a resume passes over it), or raise ``failed``."""
        if not self._skips:
            raise failed
        log.warning(
            "evenstep: sample %d since the stream was begun or loaded is skipped: %s: %s",
            number,
            type(error).__name__,
            error,
        )
        self.skipped += 1
        self._pulled += 1
        self._handed.add(number)

    def _needs(self, number: int, metadata: SampleMetadata) -> Amounts:
        """What a sample takes of a row: all of its tokens where it must be alone."""
        tokens, features = min(metadata.tokens, self.seq_len), metadata.features
        needs = [units_of(features.get(name, 0.0), limit) for name, limit in self._budgets.items()]
        found: Amounts = np.array([tokens, 1, *needs])
        over = found > self._row
        if not over.any():
            return found
        if self._limits.oversized != "single":
            name = list(self._budgets)[int(over.argmax()) - 2]
            raise Infeasible(
                f"sample {number} has {name}={features[name]}, the budget of a row is {self._budgets[name]}: it "
                "fits no row. Raise the budget, leave the sample out, or choose oversized='single'."
            )
        return np.array([self.seq_len if tokens else 0, 1, *np.minimum(found, self._row)[2:]])

    def _first_fit(self, room: Amounts, item: _Waiting) -> int | None:
        fits = np.asarray((room >= item.needs).all(axis=1))
        row = int(fits.argmax())
        if not fits[row]:
            return None
        room[row] -= item.needs
        return row

    def _forget(self) -> None:
        """Marks before which nothing waits, and what was handed out before them."""
        oldest = min((item.number for item in self._waiting), default=self._pulled)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.pop(0)
        # A stream that has ended may stand at its beginning again: what it says of itself is no position behind the last.
        if oldest == self._pulled and self._marks[-1][0] < oldest and not self._ended:
            self._marks = [(self._pulled, call("the source's state", self._stream.state))]
        base = self._marks[0][0]
        self._handed = {number for number in self._handed if number >= base}
