"""Reads the planned samples directly where they are needed: for datasets whose lengths are known ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.errors import SampleError
from evenstep.nodes.describe import Describer, tells_length
from evenstep.nodes.fetch import Fetcher, Pending, Unreadable
from evenstep.nodes.items import Counts, GatheredWindow, PlannedBatch, RoutedBatch
from evenstep.nodes.opened_samples import OpenedSamples
from evenstep.nodes.planner import Planner
from evenstep.nodes.read import make_fetcher
from evenstep.nodes.rows import MicroBatch
from evenstep.nodes.sample_seed import SeedKey
from evenstep.nodes.stage import Stage, configured
from evenstep.nodes.turn import Turn
from evenstep.packing import LossCounter

__all__ = ["PlannedReader"]

log: logging.Logger = logging.getLogger("evenstep")


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """This rank's micro-batches of a window that are still to come, and their samples."""

    planned: dict[int, MicroBatch]
    samples: Pending | OpenedSamples

    def take(self, window: GatheredWindow, row: list[int]) -> list[Any]:
        """The samples at the positions ``row`` of ``window``, waited for; `Unreadable` where one was."""
        if isinstance(self.samples, Pending):
            return self.samples.take(len(row))
        assert window.indices is not None
        assert window.parts is not None
        places = zip(window.indices[row].tolist(), window.parts[row].tolist(), strict=True)
        return [self.samples.take(index, number, count) for index, (number, count) in places]


class PlannedReader(Stage[PlannedBatch, RoutedBatch]):
    """Nothing moves between ranks: each reads the samples of its own rows.

    Right behind a `Planner`, workers have this rank's samples of the next window, whole, before any of this one is
    waited for, so that none of them ever waits. A sample whose length is not what was planned is an error that names it,
    before it reaches a row.

    Args:
        source: Planned micro-batches of windows whose metadata was known.
        dataset: Anything with ``dataset[i]``; None on ranks that construct nothing.
        plane: The data plane.
        config: ``num_workers``, ``worker`` and the policies for samples; default: that of the nearest node upstream.
        metadata_fn: How the length of a read sample is told; default ``len(sample["input_ids"])``; samples that
            it cannot tell are not compared where it is None.
        explode: ``sample -> documents``: with ``config.repack`` each is a sample of its own, and a packed sample is read
            wherever one of them is needed; else it only tells the documents inside one.
        loss_tokens: Counts the loss tokens of a sample as the packer leaves them (see `evenstep.packing.loss_counter`), to
            say once where the metadata has others, and for ``num_loss_tokens`` of a batch where it has none; None: nobody
            knows.
        fetcher: Reads the dataset; default: by ``config``.

    Attributes:
        counts: What this rank has left out since it was built.
    """

    shown_as = "read"

    def __init__(
        self,
        source: BaseNode[PlannedBatch],
        dataset: Any,
        plane: DataPlane,
        config: LoaderConfig | None = None,
        *,
        metadata_fn: Callable[[Any], Any] | None = None,
        explode: Callable[[Any], Iterable[Any]] | None = None,
        loss_tokens: LossCounter | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        super().__init__(source)
        self.plane = plane
        self._turn = Turn(plane.rounds)
        self.dataset = dataset
        self.counts: Counts = Counts()
        config = configured(config, source)
        self._config = config
        self._fetcher = make_fetcher(dataset, config, plane) if fetcher is None else fetcher
        self._explode = explode
        whole = None if config.repack else explode
        self._compares = metadata_fn is not None or whole is not None
        self._describe = Describer(config, metadata_fn, whole)
        self._loss_tokens = self._count = loss_tokens
        self._limit = config.seq_len if config.oversized == "truncate" else None
        self._planner = source if isinstance(source, Planner) and self._fetcher.ahead else None
        self._now: _UnderWay | None = None
        self._following: _UnderWay | None = None

    def clear(self) -> None:
        """Forget the windows under way."""
        for window in (self._now, self._following):
            if window is not None:
                window.samples.cancel()
        self._now = self._following = None

    def set_epoch(self, epoch: int) -> None:
        """Pass a new epoch on to the dataset, where it has ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
            self._fetcher.renew()

    def close(self) -> None:
        """End the workers."""
        self._fetcher.close()

    def produce(self) -> RoutedBatch:
        """Read the rows of the next micro-batch."""
        batch = next(self.source)
        window = self._window_of(batch)
        mine = window.planned.pop(batch.micro_batch)
        kept: list[int] = []
        rows: list[list[Any]] = []
        for row in mine.rows:
            values = window.take(batch.window, row)
            checked = [self._checked(batch, i, value) for i, value in zip(row, values, strict=True)]
            readable = [k for k, value in enumerate(checked) if not isinstance(value, Unreadable)]
            rows.append([checked[k] for k in readable])
            kept += [row[k] for k in readable]
        left_out = sum(map(len, mine.rows)) - len(kept)
        if left_out:
            self.counts += Counts(skipped=left_out)
            mine = mine.keep(batch, kept, self._config)
        if mine.info.num_loss_tokens is None:
            mine = mine.with_loss_tokens(self._counted(rows))
        return mine.routed(rows)

    def _counted(self, rows: list[list[Any]]) -> int | None:
        """Loss tokens of the samples in ``rows``; None where nobody can tell."""
        if self._count is None:
            return None
        found = [self._count(value, self._limit) for row in rows for value in row]
        return None if None in found else sum(n for n in found if n is not None)

    def _window_of(self, batch: PlannedBatch) -> _UnderWay:
        """The samples of the window that ``batch`` is of; workers go on with those of the next one."""
        if self._now is None or not self._now.planned:
            self._now = self._ask(batch) if self._following is None else self._following
            following = None if self._planner is None else self._planner.following()
            self._following = None if following is None else self._ask(following)
        return self._now

    def _ask(self, batch: PlannedBatch) -> _UnderWay:
        """Begin with all samples of this rank that are left of a window."""
        window, place = batch.window, batch.window.place
        assert window.indices is not None, "only windows with known metadata are read after planning"
        planned = {
            m: MicroBatch.of(replace(batch, micro_batch=m), self.plane, self._config)
            for m in range(batch.micro_batch, place.count)
        }
        positions = [i for mine in planned.values() for row in mine.rows for i in row]
        indices = window.indices[positions].tolist()
        key = SeedKey(place.start.seed, place.start.epoch)
        if window.parts is None:
            return _UnderWay(planned, self._fetcher.submit(indices, key))
        assert self._explode is not None, "only explode opens samples"
        pending = self._fetcher.submit(list(dict.fromkeys(indices)), key)
        return _UnderWay(planned, OpenedSamples(pending, self._explode))

    def _checked(self, batch: PlannedBatch, sample: int, value: Any) -> Any:
        """``value``, or `Unreadable` where that is skipped."""
        assert batch.window.indices is not None
        index, planned = int(batch.window.indices[sample]), int(batch.window.columns.tokens[sample])
        try:
            if isinstance(value, Unreadable):
                raise value.error
            tokens = planned
            if self._compares or tells_length(value):
                tokens = self._describe.tokens(value)
            if tokens == planned:
                self._compare_loss(index, int(batch.window.columns.loss_tokens[sample]), value)
        except Exception as error:
            if self._config.on_sample_error == "skip":
                log.warning(
                    "rank %d: evenstep: sample %d is skipped: %s: %s",
                    self.plane.topology.rank,
                    index,
                    type(error).__name__,
                    error,
                )
                return Unreadable(error)
            raise SampleError(
                f"sample {index}: {type(error).__name__}: {error}",
                index,
                rank=self.plane.topology.rank,
                error_type=type(error).__name__,
                error_message=str(error),
            ) from error
        if tokens != planned:
            parts = batch.window.parts
            document = "" if parts is None else f"document {parts[sample, 0]} of "
            raise SampleError(
                f"{document}sample {index} has {tokens} tokens, its metadata says {planned}: the rows were planned for another "
                "length. Compute the metadata from the dataset as it is now.",
                index,
                rank=self.plane.topology.rank,
            )
        return value

    def _compare_loss(self, index: int, planned: int, value: Any) -> None:
        """Wrong ones overflow no row, but they divide the loss of a whole step."""
        if self._loss_tokens is None or planned < 0:
            return
        found = self._loss_tokens(value, self._limit)
        if found is not None and found != planned:
            self._loss_tokens = None
            log.warning(
                "sample %d has %d tokens with a loss, its metadata says %d: what is divided by step_loss_tokens is scaled "
                "wrongly. Compute loss_tokens with evenstep.packing.count_loss_tokens, or leave them out.",
                index,
                found,
                planned,
            )
