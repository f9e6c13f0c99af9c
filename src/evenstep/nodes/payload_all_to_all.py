"""Brings the payloads of each micro-batch to the rank whose rows they fill; what stays is not touched."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from evenstep.comm.buffers import BufferPool
from evenstep.comm.codec import Codec, PayloadCodec
from evenstep.comm.exchange import Exchange, Moves, Stamp
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.nodes.items import GatheredWindow, PlannedBatch, RoutedBatch
from evenstep.nodes.rows import MicroBatch
from evenstep.nodes.stage import Stage, call, configured
from evenstep.nodes.turn import Turn

__all__ = ["PayloadAllToAll"]


class PayloadAllToAll(Stage[PlannedBatch, RoutedBatch]):
    """One all-to-all per micro-batch (or window) in which something moves; sizes follow from the plan.

    Args:
        source: Planned micro-batches.
        plane: The data plane.
        config: ``exchange`` and ``seq_len``; default: that of the nearest node upstream.
        codec: How samples travel; default `PayloadCodec`; the same as the reader's.
        pool: Where buffers come from; default: a pool of its own.
    """

    shown_as = "exchange"

    def __init__(
        self,
        source: BaseNode[PlannedBatch],
        plane: DataPlane,
        config: LoaderConfig | None = None,
        *,
        codec: Codec | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(source)
        self.plane = plane
        self._turn = Turn(plane.rounds)
        self._config = configured(config, source)
        self._codec = PayloadCodec() if codec is None else codec
        self._pool = BufferPool() if pool is None else pool
        ranks = () if plane.payload is None else plane.payload.ranks
        self._position = np.zeros(max(ranks, default=-1) + 1, dtype=np.int32)  # in the group, by global rank
        self._position[list(ranks)] = np.arange(len(ranks))
        self._window: GatheredWindow | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._received: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget the window under way; what it still owes is with `Rounds`."""
        self._window = None
        self._exchanges = {}
        self._received = {}

    def produce(self) -> RoutedBatch:
        """The rows of the next micro-batch."""
        batch = next(self.source)
        if batch.window is not self._window:
            self._promise(batch)
        exchange = self._exchanges.pop(batch.micro_batch, None)
        if exchange is not None:
            assert self.plane.rounds is not None
            self._received.update(call("the codec", self.plane.rounds.pay, exchange))
        mine = MicroBatch.of(batch, self.plane, self._config)
        return mine.routed([[self._take(batch.window, i) for i in row] for row in mine.rows])

    def _take(self, window: GatheredWindow, sample: int) -> Any:
        return window.local[sample] if sample in window.local else self._received.pop(sample)

    def _promise(self, batch: PlannedBatch) -> None:
        """From here on the other ranks wait for every exchange of this window."""
        self._window, self._received = batch.window, {}
        self._exchanges = self._plan_exchanges(batch)
        if self._exchanges:
            assert self.plane.rounds is not None
            self.plane.rounds.owe(list(self._exchanges.values()))

    def _plan_exchanges(self, batch: PlannedBatch) -> dict[int, Exchange]:
        window, holders, group = batch.window, batch.window.holders, self.plane.payload
        if holders is None or group is None or self.plane.rounds is None:
            return {}
        topology, size = self.plane.topology, self._config.micro_batch_size
        constructors = topology.constructors[topology.group_start :][: topology.balance_group_size]
        position = self._position[list(constructors)]
        micro, flat = np.divmod(batch.assignment, topology.balance_group_size * size)
        targets = position[flat // size]
        moving = (holders != targets) & (micro >= batch.micro_batch)
        if self._config.exchange == "window":
            parts = {batch.micro_batch: np.flatnonzero(moving)}
        else:
            parts = {m: np.flatnonzero(moving & (micro == m)) for m in np.unique(micro[moving]).tolist()}
        columns, place = window.columns, window.place
        return {
            m: Exchange(
                group,
                self._codec,
                self._pool,
                Stamp(self.plane.rounds.generation, place.start.step, place.first + m),
                Moves(ids, holders[ids], targets[ids], columns.nbytes[ids], columns.structures[ids]),
                window.local.__getitem__,
            )
            for m, ids in parts.items()
            if len(ids)
        }
