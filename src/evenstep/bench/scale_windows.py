"""One optimizer step of a large job, and what balancing it in groups of any size takes: planned, not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from time import thread_time
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from evenstep.bench.lengths import LONG_CONTEXT, draw_from
from evenstep.comm.codec import PayloadCodec
from evenstep.comm.columns import Columns
from evenstep.plan import PackingConstraints, plan_window
from evenstep.plan.metrics import rank_of, sum_of_means

__all__ = ["SEQ_LEN", "Algorithm", "Planned", "Step", "Traffic", "Window"]

Int = npt.NDArray[np.int64]
Algorithm = Literal["lpt", "refine", "auto"]
SEQ_LEN = 32_768
_PREAMBLE = 64  # bytes in front of each segment of an exchange
_PLAN_HEAD = 32  # bytes in front of the assignment in a plan's broadcast


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a plan moves; bytes are those of the codec, with the head of each segment.

    Attributes:
        sent: Bytes that each rank sends in the step, int64 ``[ranks]``.
        busiest: The most bytes that a rank sends or receives in each micro-batch, int64 ``[micro_batches]``.
        buffers: The most bytes that a rank sends and receives in one micro-batch.
        peers: Ranks that a rank sends samples to in a micro-batch, on average.
        moved_share: Share of the tokens that change rank.
    """

    sent: Int
    busiest: Int
    buffers: int
    peers: float
    moved_share: float


@dataclass(frozen=True, slots=True)
class Planned:
    """One window, planned: processor seconds here, loads float64 ``[micro_batches, ranks]``, and what moves."""

    seconds: float
    loads: npt.NDArray[np.float64]
    bound: float
    traffic: Traffic


@dataclass(frozen=True)
class Step:
    """Documents of an optimizer step in greedy rows; consecutive ranks hold consecutive documents.

    So the step of fewer ranks is the beginning of that of more, and a group's window is a run of documents.

    Attributes:
        tokens: int64 ``[n]``.
        rows: Row of each document, int64 ``[n]``: rank ``row // micro_batches`` holds it.
        dp_size: Data-parallel ranks.
        micro_batches: Micro-batches of a rank, one row each.
    """

    tokens: Int
    rows: Int
    dp_size: int
    micro_batches: int

    @classmethod
    def draw(cls, dp_size: int, micro_batches: int, seed: int) -> Step:
        """Documents of the long-context lengths; one that does not fit a row any more opens the next."""
        count = dp_size * micro_batches
        lengths = draw_from(LONG_CONTEXT, np.random.default_rng(seed), 12 * count + 1000, SEQ_LEN)
        ends = np.cumsum(lengths)
        bounds = np.zeros(count + 1, dtype=np.int64)
        for row in range(count):  # each begins where the one before has ended
            before = int(ends[bounds[row] - 1]) if row else 0
            bounds[row + 1] = np.searchsorted(ends, before + SEQ_LEN, side="right")
        return cls(
            lengths[: bounds[-1]], np.repeat(np.arange(count), np.diff(bounds)), dp_size, micro_batches
        )

    def windows(self, ranks: int, dp_size: int) -> Iterator[Window]:
        """The windows of the groups of ``ranks`` among the first ``dp_size`` ranks."""
        for first in range(0, dp_size, ranks):
            rows = np.array([first, first + ranks]) * self.micro_batches
            begin, end = np.searchsorted(self.rows, rows)
            own = self.rows[begin:end] - rows[0]
            yield Window(
                self.tokens[begin:end],
                own // self.micro_batches,
                own % self.micro_batches,
                ranks,
                self.micro_batches,
            )


@dataclass(frozen=True)
class Window:
    """What one balance group plans.

    Attributes:
        tokens: int64 ``[n]``.
        holders: Rank of the group that read each document, int64 ``[n]``, ascending.
        micro_batch: Its micro-batch before balancing, int64 ``[n]``.
        ranks: Ranks of the group.
        micro_batches: Micro-batches of the window.
    """

    tokens: Int
    holders: Int
    micro_batch: Int
    ranks: int
    micro_batches: int

    @cached_property
    def costs(self) -> npt.NDArray[np.float64]:
        """Of a dense 4096-wide transformer, in units of its attention FLOPs; float64 ``[n]``."""
        return np.asarray(24576.0 * self.tokens + self.tokens.astype(np.float64) ** 2)

    @property
    def reference(self) -> Int:
        """Flat row before balancing, int64 ``[n]``."""
        return self.micro_batch * self.ranks + self.holders

    @property
    def reference_loads(self) -> npt.NDArray[np.float64]:
        """Rank costs before balancing, float64 ``[micro_batches, ranks]``."""
        slots = self.micro_batches * self.ranks
        loads = np.bincount(self.reference, self.costs, minlength=slots).astype(np.float64)
        return loads.reshape(-1, self.ranks)

    def plan(self, algorithm: Algorithm) -> Planned:
        """Plan it as a loader would, and count what would move."""
        constraints = PackingConstraints(SEQ_LEN)
        begin = thread_time()
        plan = plan_window(
            self.tokens,
            self.costs,
            dp_size=self.ranks,
            micro_batches=self.micro_batches,
            rows=1,
            reference=self.reference,
            constraints=constraints,
            algorithm=algorithm,
        )
        seconds = thread_time() - begin
        bound = plan.decision.lower_bound / sum_of_means(plan.loads)
        return Planned(seconds, plan.loads, bound, self._traffic(plan.assignment))

    def _traffic(self, assignment: npt.NDArray[np.int32]) -> Traffic:
        targets = rank_of(assignment, dp_size=self.ranks, rows=1).astype(np.int64)
        leaves = np.flatnonzero(targets != self.holders)
        micro_batch = assignment[leaves] // self.ranks
        segment = (micro_batch * self.ranks + self.holders[leaves]) * self.ranks + targets[leaves]
        segments, of_segment = np.unique(segment, return_inverse=True)
        nbytes, head = _payload_bytes(self.tokens[leaves])
        sizes = np.bincount(of_segment, nbytes, minlength=len(segments)) + head
        sender, receiver = segments // self.ranks, segments % self.ranks
        slots = self.micro_batches * self.ranks
        out = np.bincount(sender, sizes, minlength=slots).reshape(-1, self.ranks).astype(np.int64)
        into = np.bincount(
            sender // self.ranks * self.ranks + receiver, sizes, minlength=slots
        ).reshape(-1, self.ranks).astype(np.int64)  # fmt: skip
        return Traffic(
            sent=out.sum(axis=0),
            busiest=np.maximum(out, into).max(axis=1),
            buffers=int((out + into).max()),
            peers=len(segments) / slots,
            moved_share=float(self.tokens[leaves].sum() / self.tokens.sum()),
        )

    def columns(self) -> list[Columns]:
        """The metadata columns that each rank of the group gathers."""
        order = np.arange(len(self.tokens), dtype=np.int64)
        rows, nbytes = self.reference.astype(np.int32), _payload_bytes(self.tokens)[0]
        bounds = np.searchsorted(self.holders, np.arange(self.ranks + 1)).tolist()
        return [
            Columns(
                order=order[a:b],
                rows=rows[a:b],
                tokens=self.tokens[a:b],
                loss_tokens=self.tokens[a:b] - 1,
                nbytes=nbytes[a:b],
                structures=np.full(b - a, 7, dtype=np.int64),
                costs=self.costs[a:b, None],
                features=np.empty((b - a, 0)),
            )
            for a, b in pairwise(bounds)
        ]

    def plan_bytes(self) -> int:
        """Bytes of the plan's broadcast."""
        return _PLAN_HEAD + 4 * len(self.tokens)

    def merge_seconds(self, columns: list[Columns]) -> float:
        """Processor seconds to put gathered columns in window order, as every rank of the group does."""
        packed = [np.frombuffer(part.pack(), dtype=np.uint8) for part in columns]
        begin = thread_time()
        parts = [Columns.unpack(row, len(part), 1, ()) for row, part in zip(packed, columns, strict=True)]
        Columns.gather(parts)
        return thread_time() - begin


def _payload_bytes(tokens: Int) -> tuple[Int, int]:
    """Encoded bytes of documents of int64 ``input_ids``, and of a segment beside its documents."""
    codec = PayloadCodec()
    lengths, inverse = np.unique(tokens, return_inverse=True)
    measured = [codec.measure({"input_ids": torch.empty(length, dtype=torch.int64)}) for length in lengths]
    if not measured:
        return np.zeros(0, dtype=np.int64), 0
    nbytes, structure = measured[0]
    head = _PREAMBLE + codec.segment_bytes([nbytes], [structure]) - nbytes
    return np.array([size for size, _ in measured], dtype=np.int64)[inverse], head
