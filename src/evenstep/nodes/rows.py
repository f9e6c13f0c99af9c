"""This rank's share of a planned micro-batch: which samples fill its rows, and what the loop is told of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.nodes.items import PlannedBatch, RoutedBatch
from evenstep.samples import BatchInfo

__all__ = ["MicroBatch"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows that this rank builds.

    Attributes:
        rows: Positions (in the window) of the samples of each row; no rows where nothing is built.
        seq_len: Capacity of a row.
        info: What the training loop is told.
    """

    rows: list[list[int]]
    seq_len: int
    info: BatchInfo

    @classmethod
    def of(cls, batch: PlannedBatch, plane: DataPlane, config: LoaderConfig) -> MicroBatch:
        """This rank's rows of ``batch``."""
        topology, size = plane.topology, config.micro_batch_size
        rank = topology.dp_rank - topology.group_start
        first = (batch.micro_batch * topology.balance_group_size + rank) * size
        ids = np.flatnonzero((batch.assignment >= first) & (batch.assignment < first + size))
        by_row = ids[np.argsort(batch.assignment[ids], kind="stable")]
        bounds = np.searchsorted(batch.assignment[by_row], np.arange(first + 1, first + size))
        rows = [part.tolist() for part in np.split(by_row, bounds)] if plane.is_constructor else []
        columns, place = batch.window.columns, batch.window.place
        tokens, loss = int(columns.tokens[ids].sum()), columns.loss_tokens[ids]
        number = place.first + batch.micro_batch
        info = BatchInfo(
            step=place.start.step,
            micro_batch=number,
            num_micro_batches=place.total,
            is_last_micro_batch=number == place.total - 1,
            num_samples=len(ids),
            num_tokens=tokens,
            num_padding=max(0, size * config.seq_len - tokens),
            num_loss_tokens=int(loss.sum()) if (loss >= 0).all() else None,
            step_loss_tokens=batch.window.step_loss_tokens,
        )
        return cls(rows, config.seq_len, info)

    def keep(self, batch: PlannedBatch, samples: list[int], config: LoaderConfig) -> MicroBatch:
        """What the loop is told where only ``samples`` (positions in the window) could be read; rows stay as planned."""
        columns = batch.window.columns
        tokens, loss = int(columns.tokens[samples].sum()), columns.loss_tokens[samples]
        info = replace(
            self.info,
            num_samples=len(samples),
            num_tokens=tokens,
            num_padding=max(0, config.micro_batch_size * config.seq_len - tokens),
            num_loss_tokens=int(loss.sum()) if (loss >= 0).all() else None,
            step_loss_tokens=None,
        )
        return replace(self, info=info)

    def with_loss_tokens(self, count: int | None) -> MicroBatch:
        """The same with ``count`` loss tokens in this rank's rows."""
        return replace(self, info=replace(self.info, num_loss_tokens=count))

    def routed(self, samples: list[list[Any]]) -> RoutedBatch:
        """The rows with their payloads."""
        return RoutedBatch(samples, self.seq_len, self.info)
