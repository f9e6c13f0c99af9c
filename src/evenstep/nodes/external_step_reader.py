"""Takes the steps that a rank makes for itself, so that they are balanced and resumed like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from evenstep.comm.codec import Codec
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import CostModel
from evenstep.cursor import Cursor, find_cursor
from evenstep.nodes.fetch import Fetcher
from evenstep.nodes.items import Place, Window
from evenstep.nodes.layout import Layout
from evenstep.nodes.local_streams import LocalRows, PaddingRow, local_stream
from evenstep.nodes.read import SampleReader, make_fetcher
from evenstep.nodes.source_position import SourcePosition, split_state
from evenstep.nodes.window_reader import WindowReader
from evenstep.packing import LossCounter, count_loss_tokens
from evenstep.sampling import LocalStepSource

__all__ = ["ExternalStepReader"]


class ExternalStepReader(WindowReader):
    """The source of a graph over rank-local streams.

    Each constructor has a stream of its own. A local step is a list of rows, each a list of samples (or one bare
    sample): ``micro_batch_size * accumulation_steps`` rows, the same number on every rank; under
    ``accumulation_steps="auto"`` any number, whose samples are packed into as few micro-batches as fit. An empty row
    is an error on every rank; one that is meant, at the end of a stream, is a `PaddingRow`, as `StepBuilder` gives it.

    Its state is the shared cursor, which counts rows, and beside it the position of this rank's stream under the
    key of its dp rank: ``"source": {"3": {"epoch": ..., "position": ...}}`` (at an epoch's end a `Loader` adds ``"ended": True``). It resumes exactly, on as many dp ranks; on another number only if
    the source has ``reshard(states, dp_rank, dp_size) -> state``, which gets the states of all old ranks by number.

    Args:
        source: A torchdata node, a StatefulDataLoader or other iterable with ``state_dict`` and
            ``load_state_dict``, any other iterable (counted, and iterated again on a resume), or a
            `RankLocalBatchSampler`; None on ranks that construct nothing.
        plane: The data plane.
        config: The loader's configuration.
        dataset: What a `RankLocalBatchSampler`'s indices belong to.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        cost: Cost model; default `evenstep.cost.LinearQuadraticCost`.
        codec: How samples travel; default `PayloadCodec`.
        explode: ``sample -> documents``, for samples that were packed before.
        loss_tokens: ``(sample, seq_len) -> int``, the loss tokens that ``metadata_fn`` does not tell, as the packer will
            leave them: `evenstep.packing.loss_counter` of it; default: those of a plain `pack_text`; None: unknown.
        fetcher: Reads ``dataset``; default: by ``config``.
        start: Where a fresh stream begins; default: the beginning of epoch 0.
        allow_changed_dataset: Accept a state of another stream.

    Attributes:
        counts: What this rank has left out or cut since it was built.

    Raises:
        ValueError: A rank other than the constructors would have to read, or one of them has no source.
        TypeError: The source makes no steps.
    """

    def __init__(
        self,
        source: Any,
        plane: DataPlane,
        config: LoaderConfig,
        *,
        dataset: Any = None,
        metadata_fn: Callable[[Any], Any] | None = None,
        cost: CostModel | None = None,
        codec: Codec | None = None,
        explode: Callable[[Any], Iterable[Any]] | None = None,
        loss_tokens: LossCounter | None = count_loss_tokens,
        fetcher: Fetcher | None = None,
        start: Cursor | None = None,
        allow_changed_dataset: bool = False,
    ) -> None:
        topology = plane.topology
        if set(topology.data_plane()) != set(topology.constructors):
            raise ValueError(
                f"external steps are read by the constructors {topology.constructors} alone, but the ranks "
                f"{topology.data_plane()} would read or plan: leave reader_ranks and planner_rank at None"
            )
        if source is None and topology.is_constructor:
            raise ValueError(
                f"rank {topology.rank} builds batches but has no source of local steps; pass one on every constructor"
            )
        if isinstance(source, LocalStepSource) and fetcher is None:
            fetcher = make_fetcher(dataset, config, plane)
        reader = SampleReader(
            config,
            plane,
            metadata_fn=metadata_fn,
            cost=cost,
            codec=codec,
            explode=explode,
            loss_tokens=loss_tokens,
        )
        super().__init__(plane, config, dataset, reader, fetcher, allow_changed_dataset=allow_changed_dataset)
        self.external = source
        stream = local_stream(source, fetcher, config.micro_batch_size) if topology.is_constructor else None
        self._stream = stream
        self._source = SourcePosition(source, stream, topology)
        self._identity = source.start() if isinstance(source, LocalStepSource) else Cursor(order="external")
        self._begin = replace(
            self._identity if start is None else start,
            micro_batch_size=config.micro_batch_size,
            dp_size=topology.dp_size,
        )
        self._layout: Layout | None = None
        self._rows = 0
        self._position = self._begin
        self._state = {**self._begin.to_dict(), "source": {}}
        self._places: Iterator[Place] = iter(())
        self._step = LocalRows([])

    def go_to(self, state: dict[str, Any] | None) -> None:
        """Stand at ``state``; None: at the epoch after the last item handed out, or still at the beginning."""
        if state is not None:
            self.check_state(state)
            cursor, sources = split_state(find_cursor(state))
        elif self._fresh:
            cursor, sources = self._begin, {}
        else:
            cursor, sources = split_state(self._state)
            cursor = cursor.next_epoch()
        self._position = cursor
        self._state = {**cursor.to_dict(), "source": self._source.load(cursor, sources)}
        self._places = iter(())

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another stream or another number of ranks, when it is loaded.

        Raises:
            StateMismatch: The stream or the data-parallel size differ.
        """
        cursor, _ = split_state(find_cursor(state))
        cursor.check_stream(self._identity, allow_changed_dataset=self._allow_changed)
        self._source.check_size(cursor)

    def targets(self) -> tuple[Any, ...]:
        """What hears of a new epoch, where it has ``set_epoch``."""
        return self.dataset, self.external

    def take(self) -> tuple[Place, Callable[[], Window]]:
        """The place of the next window of this rank's steps, and what reads it."""
        place = next(self._places, None)
        if place is None:
            place = self._next_step()
        return place, partial(self._window, place)

    def _next_step(self) -> Place:
        if self._stream is None:
            raise RuntimeError("this rank constructs nothing: it has no external steps to read")
        position = self._position
        before = self._source.here
        step = self._stream.next(replace(position, micro_batch=0, plan=0))
        after = self._source.move_on(position.epoch)
        layout = self._resolve(step)
        self._check_rows(step)
        position = layout.position(position, self._config.resume)
        end = step.next_cursor
        if end is None:
            consumed = position.consumed_samples + layout.rows_per_step
            end = replace(position, consumed_samples=consumed, step=position.step + 1, micro_batch=0, plan=0)
        self._layout, self._step, self._position = layout, step, end
        self._places = layout.places(position, end, (before, after))
        return next(self._places)

    def _resolve(self, step: LocalRows) -> Layout:
        """The layout of every step, from the first one; under "auto" a step of one unit for each rank."""
        dp_size, rows = self.plane.topology.dp_size, len(step.rows)
        if self._config.accumulation_steps == "auto":
            return Layout.resolve(dp_size, self._config, dp_size)
        if self._layout is None:
            if not rows or rows % self._config.micro_batch_size:
                raise ValueError(
                    f"the external source gave a step of {rows} rows, which micro_batch_size="
                    f"{self._config.micro_batch_size} does not divide into micro-batches"
                )
            self._rows = rows
            return Layout.resolve(rows * dp_size, self._config, dp_size)
        if rows != self._rows:
            raise ValueError(
                f"the external source gave a step of {rows} rows after steps of {self._rows}: ranks would take "
                "different numbers of micro-batches. Make steps of one size, with rows of padding "
                "(evenstep.nodes.PaddingRow()) at the end of a stream."
            )
        return self._layout

    def _check_rows(self, step: LocalRows) -> None:
        for number, row in enumerate(step.rows):
            if not row and not isinstance(row, PaddingRow):
                raise ValueError(
                    f"rank {self.plane.topology.rank}: the external source gave 0 samples for row {number} of a step of "
                    f"{len(step.rows)} rows, expected one or more in each: an empty row would train on padding alone. "
                    "If that is meant, put evenstep.nodes.PaddingRow() there."
                )

    def _window(self, place: Place) -> Window:
        assert self._layout is not None
        rows, indices = self._step.rows, self._step.indices
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        mine, flat, order = self._layout.select_local(counts, place, self.plane.topology)
        values = list(chain.from_iterable(rows))
        return self._reader.read(
            place,
            np.full(len(mine), -1, dtype=np.int64) if indices is None else indices[mine],
            flat,
            order,
            [values[k] for k in mine.tolist()],
            positions=mine if indices is None else None,
        )
