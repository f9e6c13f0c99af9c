"""Gives each context-parallel rank its part of the batch that all of them received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.comm.plane import DataPlane
from evenstep.device.uploads import Uploads
from evenstep.nodes.stage import Stage
from evenstep.packing import Shard, Sharding

__all__ = ["ContextShard"]


class ContextShard(Stage[Any, Any]):
    """Cuts this rank's slices out of each batch, on the device where they are, without waiting for it.

    Also where ``unit="document"`` finds the boundaries in ``cpu_fields``: they are copied behind what the device has yet
    to do. The host waits only for boundaries that are on the device while a field that they divide is in
    ``cpu_fields``; put ``"cu_seqlens_padded"`` there too.

    Stands behind `ModelBroadcast`, on every rank. Boundaries and all fields that are not divided stay what they are on
    every rank: they describe the padded whole, which is what ring and gathering attention ask for.

    Args:
        source: Makes whole batches whose units are padded to their divisor (see `ShardPad`).
        plane: Knows the mesh.
        shard: How each field is divided; the same on every rank.

    Raises:
        ValueError, TypeError: A shard does not fit.
    """

    shown_as = "shard"

    def __init__(self, source: BaseNode[Any], plane: DataPlane, shard: Mapping[str, Shard | None]) -> None:
        super().__init__(source)
        self._sharding = Sharding.of(shard, plane.topology.model_coordinate)
        self._bring = Uploads()

    def produce(self) -> Any:
        """This rank's part of the next batch."""
        return self._sharding.slice(next(self.source), self._bring)
