"""Takes the steps that a rank makes for itself, so that they are balanced and resumed like any others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from evenstep.comm.codec import Codec
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import CostModel
from evenstep.cursor import Cursor, find_cursor
from evenstep.errors import StateMismatch
from evenstep.nodes.fetch import Fetcher
from evenstep.nodes.items import Counts, Place, Window
from evenstep.nodes.layout import Layout
from evenstep.nodes.local_streams import LocalRows, LocalStream, PaddingRow, local_stream
from evenstep.nodes.read import SampleReader, make_fetcher
from evenstep.nodes.spans import Watched, in_span
from evenstep.nodes.stage import call
from evenstep.nodes.streams import check_serialisable, pass_epoch_on
from evenstep.packing import LossCounter, count_loss_tokens
from evenstep.sampling import LocalStepSource

__all__ = ["ExternalStepReader"]

# Places of samples in a window, the same on all ranks though nobody knows how many the others have.
_POSITIONS = 1 << 21  # in a row
_LOCAL = 1 << 28  # in a local step under "auto"


class ExternalStepReader(BaseNode[Window], Watched):
    """The source of a graph over rank-local streams.

    Each constructor has a stream of its own. A local step is a list of rows, each a list of samples (or one bare
    sample): ``micro_batch_size * accumulation_steps`` rows, the same number on every rank; under
    ``accumulation_steps="auto"`` any number, whose samples are packed into as few micro-batches as fit. An empty row
    is an error on every rank; one that is meant, at the end of a stream, is a `PaddingRow`, as `StepBuilder` gives it.

    Its state is the shared cursor, which counts rows, and beside it the position of this rank's stream under the
    key of its dp rank: ``"source": {"3": {"epoch": ..., "position": ...}}``. It resumes exactly, on as many dp ranks; on another number only if
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

    shown_as = "read"

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
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
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
        self.plane = plane
        self.external = source
        self.dataset = dataset
        self.counts = Counts()
        self._config = config
        self._reader = SampleReader(
            config,
            plane,
            metadata_fn=metadata_fn,
            cost=cost,
            codec=codec,
            explode=explode,
            loss_tokens=loss_tokens,
        )
        self._fetcher = fetcher
        if isinstance(source, LocalStepSource) and fetcher is None:
            self._fetcher = make_fetcher(dataset, config, plane)
        self._stream: LocalStream | None = None
        if topology.is_constructor:
            self._stream = local_stream(source, self._fetcher, config.micro_batch_size)
        self._allow_changed = allow_changed_dataset
        first = source.start() if isinstance(source, LocalStepSource) else Cursor(order="external")
        self._identity = first
        first = first if start is None else start
        self._begin = replace(first, micro_batch_size=config.micro_batch_size, dp_size=topology.dp_size)
        self._key = str(topology.dp_rank)
        self._layout: Layout | None = None
        self._rows = 0
        self._position = self._begin
        self._here: dict[str, Any] = {}  # where the stream stands
        self._state: dict[str, Any] = {**self._begin.to_dict(), "source": {}}
        self._fresh = True
        self._checked = False
        self._places: Iterator[Place] = iter(())
        self._step = LocalRows([])

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last item handed out."""
        super().reset(initial_state)
        if self.plane.rounds is not None:
            self.plane.rounds.restart()
        if initial_state is not None:
            self.check_state(initial_state)
            cursor, sources = _split(find_cursor(initial_state))
            self._load(cursor, sources)
        elif self._fresh:
            self._load(self._begin, {})
        else:
            cursor, sources = _split(self._state)
            self._load(cursor.next_epoch(), sources)
        self._fresh = False
        self._places = iter(())

    def _load(self, cursor: Cursor, sources: Mapping[str, Any]) -> None:
        self._here = {}
        if self._stream is not None:
            if sources:
                epoch, position = _entry(self._mine(cursor, sources))
                self._stream.load(epoch, position)
                if epoch != cursor.epoch:  # the state of an epoch's end, moved on to another epoch
                    self._stream.begin(cursor.epoch)
            elif cursor.consumed_samples or cursor.micro_batch:
                raise StateMismatch(
                    "the state has no position of an external source beside its cursor: it was saved by a loader "
                    "over a dataset. Build the loader it was saved with."
                )
            else:
                self._stream.begin(cursor.epoch)
            self._here = self._source_state(cursor.epoch)
        self._position = cursor
        self._state = {**cursor.to_dict(), "source": self._here}

    def _mine(self, cursor: Cursor, sources: Mapping[str, Any]) -> Any:
        size = self.plane.topology.dp_size
        reshard = getattr(self.external, "reshard", None)
        if cursor.dp_size != size and callable(reshard):
            missing = [str(d) for d in range(cursor.dp_size) if str(d) not in sources]
            if missing:
                raise StateMismatch(
                    f"to go from {cursor.dp_size} to {size} data-parallel ranks the source needs the states of all old "
                    f'ranks, those of {", ".join(missing)} are missing: merge the "source" entries of all ranks'
                )
            epochs, states = zip(*map(_entry, sources.values()), strict=True)
            by_rank = dict(zip(map(int, sources), states, strict=True))
            return {"epoch": epochs[0], "position": reshard(by_rank, int(self._key), size)}
        if self._key not in sources:
            raise StateMismatch(
                f"the state has positions of the external sources of dp ranks {sorted(sources)}, not of this rank's "
                f"({self._key}): it would begin again while the others go on. Load the state that this rank saved."
            )
        return copy.deepcopy(sources[self._key])

    def _source_state(self, epoch: int) -> dict[str, Any]:
        """This rank's entry: where its stream stands, and in which epoch."""
        assert self._stream is not None
        position = call("the source's state", self._stream.state)
        if not self._checked:
            check_serialisable(position, "state")
            self._checked = True
        return {self._key: {"epoch": epoch, "position": position}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another stream or another number of ranks, when it is loaded.

        Raises:
            StateMismatch: The stream or the data-parallel size differ.
        """
        cursor, _ = _split(find_cursor(state))
        cursor.check_stream(self._identity, allow_changed_dataset=self._allow_changed)
        size = self.plane.topology.dp_size
        if cursor.dp_size not in (0, size) and not callable(getattr(self.external, "reshard", None)):
            raise StateMismatch(
                f"the state was saved on {cursor.dp_size} data-parallel ranks, this loader has {size}: each position of "
                "an external source belongs to one rank. Resume on as many ranks, or give the source "
                "reshard(states, dp_rank, dp_size)."
            )

    def set_epoch(self, epoch: int) -> None:
        """Pass a new epoch on to the dataset and the source, where they have ``set_epoch``."""
        for target in (self.dataset, self.external):
            pass_epoch_on(target, epoch)
        if self._fetcher is not None:
            self._fetcher.renew()

    def close(self) -> None:
        """End the workers."""
        if self._fetcher is not None:
            self._fetcher.close()

    def get_state(self) -> dict[str, Any]:
        """The cursor after the last window handed out, and this rank's position beside it."""
        return dict(self._state)

    @in_span
    def next(self) -> Window:
        """The next window of this rank's steps."""
        place = next(self._places, None)
        if place is None:
            place = self._next_step()
        window = call("reading", self._window, place)
        self._state = place.end_state() if not place.total else place.after(place.count, 0)
        self.counts += window.counts
        return window

    def _next_step(self) -> Place:
        if self._stream is None:
            raise RuntimeError("this rank constructs nothing: it has no external steps to read")
        position = self._position
        before = self._here
        step = self._stream.next(replace(position, micro_batch=0, plan=0))
        after = self._here = self._source_state(position.epoch)
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
        topology, size = self.plane.topology, self._config.micro_batch_size
        rows = self._step.rows
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        number = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
        if place.total:
            micro, row = np.divmod(number, size)
            mine = np.flatnonzero((micro >= place.first) & (micro < place.first + place.count))
            dp = topology.dp_rank - topology.group_start
            flat = ((micro - place.first) * topology.balance_group_size + dp) * size + row
            ends = np.cumsum(counts)
            within = np.arange(len(number)) - np.repeat(ends - counts, counts)
            order = flat * _POSITIONS + within
        else:
            mine = np.arange(len(number))
            flat = np.zeros(len(number), dtype=np.int64)
            order = topology.dp_rank * _LOCAL + mine
        values = list(chain.from_iterable(rows))
        indices = self._step.indices
        return self._reader.read(
            place,
            np.full(len(mine), -1, dtype=np.int64) if indices is None else indices[mine],
            flat[mine].astype(np.int32),
            order[mine],
            [values[k] for k in mine.tolist()],
            positions=mine if indices is None else None,
        )


def _entry(entry: Any) -> tuple[int, Any]:
    """Epoch and position of one rank's source."""
    if (
        not isinstance(entry, Mapping)
        or set(entry) != {"epoch", "position"}
        or type(entry["epoch"]) is not int
    ):
        raise ValueError(
            f"the position of an external source is {entry!r}, expected {{'epoch': ..., 'position': ...}}; pass what "
            "loader.state_dict() returned"
        )
    return entry["epoch"], entry["position"]


def _split(state: Mapping[str, Any]) -> tuple[Cursor, Mapping[str, Any]]:
    """The cursor, and the positions of external sources beside it."""
    bare = {key: value for key, value in state.items() if key != "source"}
    sources = state.get("source", {})
    if not isinstance(sources, Mapping):
        raise TypeError(f"state['source'] is {sources!r}, expected a mapping from dp ranks to positions")
    return Cursor.from_dict(bare), sources
