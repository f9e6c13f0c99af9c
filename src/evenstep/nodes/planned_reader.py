"""Reads the planned samples directly where they are needed: for datasets whose lengths are known ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.errors import SampleError
from evenstep.nodes.items import PlannedBatch, RoutedBatch
from evenstep.nodes.read import describe_sample
from evenstep.nodes.rows import MicroBatch
from evenstep.nodes.stage import Stage

__all__ = ["PlannedReader"]


class PlannedReader(Stage[PlannedBatch, RoutedBatch]):
    """Nothing moves between ranks: each reads the samples of its own rows.

    A sample whose length is not what was planned is an error that names it, before it reaches a row.

    Args:
        source: Planned micro-batches of windows whose metadata was known.
        dataset: Anything with ``dataset[i]``; None on ranks that construct nothing.
        plane: The data plane.
        config: The loader's configuration.
        metadata_fn: How the length of a read sample is told; default ``len(sample["input_ids"])``; samples that
            it cannot tell are not compared where it is None.
    """

    def __init__(
        self,
        source: BaseNode[PlannedBatch],
        dataset: Any,
        plane: DataPlane,
        config: LoaderConfig,
        *,
        metadata_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(source)
        self.plane = plane
        self._dataset = dataset
        self._config = config
        self._metadata_fn = metadata_fn

    def produce(self) -> RoutedBatch:
        """Read the rows of the next micro-batch."""
        batch = next(self.source)
        mine = MicroBatch.of(batch, self.plane, self._config)
        return mine.routed([[self._read(batch, i) for i in row] for row in mine.rows])

    def _read(self, batch: PlannedBatch, sample: int) -> Any:
        indices = batch.window.indices
        assert indices is not None, "only windows with known metadata are read after planning"
        index, planned = int(indices[sample]), int(batch.window.columns.tokens[sample])
        try:
            value = self._dataset[index]
            if self._metadata_fn is None and not _tells_length(value):
                return value
            tokens = describe_sample(value, self._metadata_fn, self._config).tokens
        except Exception as error:
            raise SampleError(f"sample {index}: {type(error).__name__}: {error}", index) from error
        if tokens != planned:
            raise SampleError(
                f"sample {index} has {tokens} tokens, its metadata says {planned}: the rows were planned for another "
                "length. Compute the metadata from the dataset as it is now.",
                index,
            )
        return value


def _tells_length(sample: Any) -> bool:
    try:
        return "input_ids" in sample
    except TypeError:
        return False
