"""Reads this rank's samples of each window, in the sampler's order: where every graph over a dataset begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.comm.codec import Codec
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import CostModel
from evenstep.cursor import Cursor, find_cursor
from evenstep.nodes.fetch import Fetcher, Pending
from evenstep.nodes.items import Place, Window
from evenstep.nodes.known import KnownMetadata, known_metadata
from evenstep.nodes.layout import Layout
from evenstep.nodes.read import SampleReader, make_fetcher
from evenstep.nodes.sample_seed import SeedKey
from evenstep.nodes.spans import watch
from evenstep.nodes.stage import call
from evenstep.nodes.window_reader import WindowReader
from evenstep.packing import LossCounter, count_loss_tokens
from evenstep.sampling import Sampler, Step

__all__ = ["SamplerReader"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A window whose samples are under way; none are where metadata is known."""

    place: Place
    indices: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    order: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int32]
    pending: Pending | None


class SamplerReader(WindowReader):
    """The source of a graph over a map-style dataset; its state is the shared cursor.

    Args:
        sampler: Which samples make a step; equal on every rank.
        dataset: Anything with ``dataset[i]``; None on ranks that read nothing.
        plane: The data plane.
        config: The loader's configuration.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        metadata: Of the whole dataset, if it is known, in any form that `evenstep.build_loader` takes: then nothing is read here.
        cost: Cost model; default `evenstep.cost.LinearQuadraticCost`.
        codec: How samples travel; default `PayloadCodec`.
        explode: ``sample -> documents``, for samples that were packed before.
        loss_tokens: ``(sample, seq_len) -> int``, the loss tokens that ``metadata_fn`` does not tell, as the packer will
            leave them: `evenstep.packing.loss_counter` of it; default: those of a plain `pack_text`; None: unknown.
        fetcher: Reads the dataset; default: by ``config.num_workers`` and ``config.worker``. Workers read the next
            window while the present one is used.
        start: Where a fresh stream begins; default: the beginning of epoch 0.
        allow_changed_dataset: Accept a state of another dataset, order or seed.

    Attributes:
        counts: What this rank has left out or cut since it was built.

    Raises:
        ValueError: The sampler's steps do not divide over the mesh.
    """

    def __init__(
        self,
        sampler: Sampler,
        dataset: Any,
        plane: DataPlane,
        config: LoaderConfig,
        *,
        metadata_fn: Callable[[Any], Any] | None = None,
        metadata: Any = None,
        cost: CostModel | None = None,
        codec: Codec | None = None,
        explode: Callable[[Any], Iterable[Any]] | None = None,
        loss_tokens: LossCounter | None = count_loss_tokens,
        fetcher: Fetcher | None = None,
        start: Cursor | None = None,
        allow_changed_dataset: bool = False,
    ) -> None:
        if fetcher is None and metadata is None and plane.topology.is_reader:
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
        self.sampler = sampler
        self.layout: Layout = Layout.resolve(sampler.rows_per_step, config, plane.topology.dp_size)
        known = None if metadata is None else known_metadata(metadata, 0, config.budgets or ())
        self._metadata: KnownMetadata | None = known
        self._ahead: _Asked | Exception | None = None
        begin = sampler.start() if start is None else self._adopted(start.to_dict())
        # Before the stamp, which would hide that it stands inside a step of another layout.
        self._begin = self.layout.stamp(self.layout.position(begin, config.resume))
        self._state = self._begin.to_dict()
        self._places: Iterator[Place] = iter(())
        self._step: Step | None = None
        self._position = self._begin

    def go_to(self, state: dict[str, Any] | None) -> None:
        """Stand at ``state``; None: at the epoch after the last item handed out, or still at the beginning."""
        if isinstance(self._ahead, _Asked) and self._ahead.pending is not None:
            self._ahead.pending.cancel()
        self._ahead = None
        cursor = self._begin
        if state is not None:
            cursor = self._adopted(find_cursor(state))
        elif not self._fresh:
            cursor = Cursor.from_dict(self._state).next_epoch()
        self._state = cursor.to_dict()
        self._position = self.layout.position(cursor, self._config.resume)
        self._places, self._step = iter(()), None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another stream, when it is loaded rather than when it is used.

        Raises:
            StateMismatch: Dataset size, order, seed or stream differ.
            ValueError: The position is beyond the end of an epoch.
        """
        self._adopted(find_cursor(state))

    def _adopted(self, state: Mapping[str, Any]) -> Cursor:
        """The cursor ``state``, as one of this sampler's stream: a foreign cursor does not know which it is."""
        cursor, own = Cursor.from_dict(state), self.sampler.start()
        cursor.check_stream(own, allow_changed_dataset=self._allow_changed)
        samples = max(
            own.dataset_size, getattr(self.sampler, "num_samples", 0)
        )  # a mixture repeats its datasets
        if samples and cursor.consumed_samples > samples and not self._allow_changed:
            raise ValueError(
                f"cursor['consumed_samples'] is {cursor.consumed_samples}, but an epoch of this sampler has {samples} "
                "samples: nothing would be left of it. The state is damaged, or of another sampler."
            )
        return replace(
            cursor, dataset_size=own.dataset_size, order=own.order, seed=own.seed, stream=own.stream
        )

    def is_end(self, cursor: Cursor) -> bool:
        """Whether no step follows in the epoch of ``cursor``."""
        return self.sampler.step_at(replace(cursor, micro_batch=0, plan=0)) is None

    def targets(self) -> tuple[Any, ...]:
        """What hears of a new epoch, where it has ``set_epoch``."""
        return self.sampler, self.dataset

    def __len__(self) -> int:
        """Micro-batches of epoch 0; see `batches_in`."""
        return self.batches_in(0)

    def batches_in(self, epoch: int) -> int:
        """Micro-batches of the whole of ``epoch``; the steps of a token budget differ between epochs.

        Raises:
            TypeError: Only the plans will tell (``accumulation_steps="auto"``).
        """
        if not self.layout.accumulation_steps:
            raise TypeError(
                "with accumulation_steps='auto' the number of micro-batches depends on the plan of each step; "
                "len(loader.sampler) is the number of optimizer steps"
            )
        steps_in = getattr(self.sampler, "steps_in", None)
        steps = len(self.sampler) if steps_in is None else int(steps_in(epoch))
        return steps * self.layout.accumulation_steps

    def take(self) -> tuple[Place, Callable[[], Window]]:
        """The place of the next window, and what reads it; workers go on with the one after it."""
        asked, self._ahead = self._ahead, None
        if asked is None:
            asked = self._ask()
        if isinstance(asked, Exception):
            raise asked
        if self._fetcher is not None and self._fetcher.ahead:
            try:
                self._ahead = self._ask()  # before this one is waited for, so that no worker ever waits
            except StopIteration:
                self._ahead = StopIteration()  # without the frames that the one just caught would keep
            except Exception as error:
                self._ahead = error
        return asked.place, partial(self._window, asked)

    def _next_step(self) -> Place:
        step = watch(self, lambda: call("sampler.step_at", self.sampler.step_at, self._position), "sampler")
        if step is None:
            raise StopIteration
        step = self._checked(step)
        self._step = step
        self._places = self.layout.places(self._position, step.next_cursor)
        self._position = step.next_cursor
        return next(self._places)

    def _checked(self, step: Step) -> Step:
        rank, expected = self.plane.topology.rank, self.layout.rows_per_step
        step = Step(np.asarray(step.indices), np.asarray(step.rows), step.next_cursor)  # lists will do, too
        for name, numbers in (("indices", step.indices), ("rows", step.rows)):
            if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
                raise TypeError(
                    f"rank {rank}: the sampler gave {name} of dtype {numbers.dtype} and shape {list(numbers.shape)}, "
                    "expected one integer for each sample"
                )
        if len(step.indices) != len(step.rows):
            raise ValueError(
                f"rank {rank}: the sampler gave {len(step.indices)} indices and {len(step.rows)} rows, expected "
                "one row for each index"
            )
        used = np.unique(step.rows)
        if len(used) != expected or int(used[0]) != 0 or int(used[-1]) != expected - 1:
            raise ValueError(
                f"rank {rank}: the sampler filled {len(used)} rows of a step, expected each of 0..{expected - 1}: "
                "an empty row would leave a rank without data. Mark padding with index -1."
            )
        return step

    def _ask(self) -> _Asked:
        """The next window, its samples under way where workers read them."""
        place = next(self._places, None)
        if place is None:
            place = self._next_step()
        assert self._step is not None
        indices, rows, owner = self.layout.select(self._step, place, self.plane.topology)
        order = np.arange(len(indices), dtype=np.int64)
        if self._metadata is not None:
            return _Asked(place, indices, rows, order, owner, None)
        if self._fetcher is None:
            self._fetcher = make_fetcher(self.dataset, self._config, self.plane)
        mine = self._share(owner)
        key = SeedKey(place.start.seed, place.start.epoch)
        pending = call("reading", self._fetcher.submit, indices[mine].tolist(), key)
        return _Asked(place, indices[mine], rows[mine], order[mine], owner[mine], pending)

    def _window(self, asked: _Asked) -> Window:
        place, indices, rows, order = asked.place, asked.indices, asked.rows, asked.order
        if asked.pending is None:
            assert self._metadata is not None
            return self._reader.known(place, indices, rows, order, asked.owners, self._metadata)
        return self._reader.read(place, indices, rows, order, asked.pending.take(len(indices)))

    def _share(self, owner: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Which of the window's samples this rank reads: those of each dp rank are dealt out to its readers."""
        topology = self.plane.topology
        mine = []
        for dp_rank, ranks in enumerate(topology.readers):
            if topology.rank in ranks:
                mine.append(np.flatnonzero(owner == dp_rank)[ranks.index(topology.rank) :: len(ranks)])
        return np.sort(np.concatenate(mine)) if mine else np.empty(0, dtype=np.int64)
