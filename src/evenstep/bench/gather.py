"""Gathering the metadata of a window as columns beside gathering objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from evenstep.bench.turns import Turns
from evenstep.comm.columns import Columns, as_bytes
from evenstep.comm.communicator import Communicator
from evenstep.comm.header import OK, Header
from evenstep.comm.rounds import Rounds
from evenstep.samples import SampleMetadata

__all__ = ["measure_gather"]


def measure_gather(communicator: Communicator, count: int, repeats: int) -> dict[str, Any]:
    """Gather the metadata of ``count`` samples a rank: columns behind their header, objects, and bare tuples."""
    chance = np.random.default_rng(communicator.position)
    tokens = chance.integers(1, 4096, count)
    order = np.arange(count, dtype=np.int64) * len(communicator.ranks) + communicator.position
    columns = Columns(
        order=order,
        rows=order.astype(np.int32),
        tokens=tokens,
        loss_tokens=tokens - 1,
        nbytes=tokens * 8,
        structures=np.full(count, 7, dtype=np.int64),
        costs=tokens[:, None].astype(np.float64),
        features=np.empty((count, 0)),
    )
    rounds = Rounds(communicator)
    row = as_bytes(columns, columns.packed_bytes)
    objects = [
        SampleMetadata(t, features={"image_tokens": t // 2}, loss_tokens=t - 1) for t in tokens.tolist()
    ]
    tuples = [(i, t, t - 1, 8 * t, 7, 1.5 * t) for i, t in zip(order.tolist(), tokens.tolist(), strict=True)]

    def gather() -> None:
        headers = rounds.begin(Header(OK, samples=count, column_bytes=columns.packed_bytes))
        rows = communicator.all_gather(as_bytes(columns, columns.packed_bytes)).numpy()
        parts = [
            Columns.unpack(rows[p, : headers[rank].column_bytes], headers[rank].samples, 1, ())
            for p, rank in enumerate(communicator.ranks)
        ]
        Columns.gather(parts)

    def gather_objects(mine: list[Any]) -> None:
        everybody: list[Any] = [None] * len(communicator.ranks)
        dist.all_gather_object(everybody, mine)

    turns = Turns.take(
        communicator,
        repeats,
        8,
        raw=lambda: communicator.all_gather(row),
        evenstep=gather,
        all_gather_object=lambda: gather_objects(objects),
        all_gather_tuples=lambda: gather_objects(tuples),
    )
    rounds.leave()
    return {
        "samples": count,
        "column_bytes": columns.packed_bytes,
        "seconds": turns.seconds(),
        "times_faster_than_objects": turns.ratio("all_gather_object", to="evenstep"),
        "times_faster_than_tuples": turns.ratio("all_gather_tuples", to="evenstep"),
    }
