"""Packs each row and collates the rows: from here on the values are the user's own batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.nodes.items import RoutedBatch
from evenstep.nodes.stage import Stage, call
from evenstep.packing import collate_rows, empty_row, fused, pack_text, padded_alike

__all__ = ["Packer"]


class Packer(Stage[RoutedBatch, Any]):
    """``collate([pack(samples, seq_len) for samples in rows])``, the built-in pair in one pass.

    A row without samples is evenstep's padding row; ``pack`` is never called with an empty list. A mapping gets the
    batch's `BatchInfo` under ``"info"``; one that cannot be written to becomes a dictionary. A built-in ``collate`` that was
    not told how to pad pads as a built-in ``pack`` was told.

    Args:
        source: Routed micro-batches.
        pack: ``(samples, seq_len) -> row``.
        collate: ``rows -> batch``.
    """

    shown_as = "pack"

    def __init__(
        self,
        source: BaseNode[RoutedBatch],
        pack: Callable[[list[Any], int], Any] = pack_text,
        collate: Callable[[list[Any]], Any] = collate_rows,
    ) -> None:
        super().__init__(source)
        self._pack = pack
        self._collate = padded_alike(pack, collate)
        self._fused = fused(pack, self._collate)

    def produce(self) -> Any:
        """Build the next batch."""
        routed = next(self.source)
        if self._fused is not None:
            batch: Any = call("pack", self._fused, routed.rows, routed.seq_len)
        else:
            batch = call("collate", self._collate, self._rows(routed))
        if isinstance(batch, MutableMapping):
            batch["info"] = routed.info
        elif isinstance(batch, Mapping):
            batch = {**batch, "info": routed.info}
        return batch

    def _rows(self, routed: RoutedBatch) -> list[Any]:
        packed = [
            call("pack", self._pack, samples, routed.seq_len) if samples else None for samples in routed.rows
        ]
        like = next((row for row in packed if row is not None), None)
        return [empty_row(self._pack, routed.seq_len, like) if row is None else row for row in packed]
