"""Pads batches so that context-parallel ranks can divide them: on the host, in the thread that packs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torchdata.nodes import BaseNode

from evenstep.comm.plane import DataPlane
from evenstep.nodes.stage import Stage
from evenstep.packing import Shard, Sharding
from evenstep.packing.fields import Padding
from evenstep.packing.places import TOKENS
from evenstep.samples import BatchInfo

__all__ = ["ShardPad"]


class ShardPad(Stage[Any, Any]):
    """Every divided unit as long as its divisor asks, with boundaries that say so; `ContextShard` then only cuts.

    Stands behind `Packer`, at the constructor: what needs the lengths of documents is done here, where they
    are on the host. Where ``input_ids`` outgrow the rows, ``batch["info"].num_padding`` counts that too.

    Args:
        source: Makes host batches.
        plane: Knows the mesh.
        shard: How each field is divided; see `evenstep.Shard`.
        padding: What fills the fields.
        unshifted: Whether ``labels`` stand at their own token: then ``shift_labels``, the targets, are added before
            the cuts fall between tokens and their targets.

    Raises:
        ValueError, TypeError: A shard does not fit.
    """

    shown_as = "pad"

    def __init__(
        self,
        source: BaseNode[Any],
        plane: DataPlane,
        shard: Mapping[str, Shard | None],
        *,
        padding: Padding | None = None,
        unshifted: bool = False,
    ) -> None:
        super().__init__(source)
        self._sharding = Sharding.of(shard, plane.topology.model_coordinate, padding, targets=unshifted)

    def produce(self) -> Any:
        """The next batch, padded."""
        return _counted(self._sharding.pad(next(self.source)))


def _counted(batch: Any) -> Any:
    """``batch`` with an ``info`` that knows its padding."""
    if not isinstance(batch, MutableMapping):
        return batch
    info, tokens = batch.get("info"), batch.get(TOKENS)
    if isinstance(info, BatchInfo) and isinstance(tokens, torch.Tensor):
        padding = tokens.numel() - info.num_tokens
        if padding > info.num_padding:
            batch["info"] = replace(info, num_padding=padding)
    return batch
