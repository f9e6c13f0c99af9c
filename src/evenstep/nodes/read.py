"""From samples to the columns of a window: each one is measured, typed and sized, so that every fault has its index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.comm.codec import Codec, PayloadCodec
from evenstep.comm.columns import Columns
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import DEFAULT_COST, CostModel, checked_costs
from evenstep.errors import SampleError
from evenstep.nodes.describe import EMPTY, Described, Describer, cut_documents, oversized_message
from evenstep.nodes.fetch import Fetcher, InlineFetcher, ThreadFetcher, Unreadable
from evenstep.nodes.items import Counts, Place, Window
from evenstep.nodes.known import KnownMetadata, open_table
from evenstep.nodes.stage import call
from evenstep.nodes.worker_processes import ProcessFetcher
from evenstep.packing import LossCounter, count_loss_tokens
from evenstep.samples import MetadataTable, SampleMetadata

__all__ = ["SampleReader", "make_columns", "make_fetcher"]

log: logging.Logger = logging.getLogger("evenstep")

Ints = npt.NDArray[np.int64]
_DOCUMENTS = 1 << 20  # more than any sample has: leaves room between two samples of a window


def make_fetcher(dataset: Any, config: LoaderConfig, plane: DataPlane) -> Fetcher:
    """What reads ``dataset`` with the workers that ``config`` asks for."""
    if not config.num_workers or dataset is None:
        return InlineFetcher(dataset)
    name = f"evenstep-read-rank{plane.topology.rank}"
    if config.worker == "thread":
        return ThreadFetcher(dataset, config.num_workers, name=name)
    return ProcessFetcher(dataset, config.num_workers, seed=plane.topology.rank, name=name)


@dataclass
class _Kept:
    """What is collected of the samples of a window, in its order."""

    sources: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    facts: list[SampleMetadata] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    dropped: int = 0
    skipped: int = 0
    truncated: int = 0


class SampleReader:
    """Turns samples into the columns and payloads of a window.

    Args:
        config: Policies for oversized, empty and unreadable samples.
        plane: Samples are checked to be encodable where it has more than one rank.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        cost: Cost model.
        codec: How samples travel.
        explode: ``sample -> documents``: with ``repack`` each document is a sample of its own; else it only tells
            the documents inside one.
        loss_tokens: Counts the loss tokens that ``metadata_fn`` does not tell, as the packer will leave them (see
            `evenstep.packing.loss_counter`); None: nobody knows.
    """

    def __init__(
        self,
        config: LoaderConfig,
        plane: DataPlane,
        *,
        metadata_fn: Callable[[Any], Any] | None = None,
        cost: CostModel | None = None,
        codec: Codec | None = None,
        explode: Callable[[Any], Iterable[Any]] | None = None,
        loss_tokens: LossCounter | None = count_loss_tokens,
    ) -> None:
        self._config = config
        self._explode = explode if config.repack else None
        self._describe = Describer(config, metadata_fn, None if config.repack else explode, loss_tokens)
        self._cost = DEFAULT_COST if cost is None else cost
        self._codec = PayloadCodec() if codec is None else codec
        self._told = False
        self._rank = plane.topology.rank
        self._travels = plane.balance is not None and len(plane.balance.ranks) > 1

    def read(
        self,
        place: Place,
        indices: Ints,
        rows: npt.NDArray[np.int32],
        order: Ints,
        values: Sequence[Any],
        *,
        positions: Ints | None = None,
    ) -> Window:
        """The window of ``values``, the samples (or `Unreadable`) at ``indices``; int64, int32 and int64 ``[n]``.

        Args:
            place: Where the window stands.
            indices: Dataset index of each sample; -1 for those of a stream.
            rows: Reference row of each.
            order: Place of each in the window.
            values: The samples.
            positions: Where each stands in its step, to name those of a stream.

        Raises:
            SampleError: A sample cannot be read, measured or encoded, or breaks a policy.
        """
        kept = _Kept()
        where = "" if positions is None else f" of step {place.start.step} on this rank"
        names = (indices if positions is None else positions).tolist()
        for k, (name, value) in enumerate(zip(names, values, strict=True)):
            try:
                if isinstance(value, Unreadable):
                    raise value.error
                self._keep(kept, k, value)
            except Exception as error:
                if self._config.on_sample_error != "skip":
                    raise SampleError(
                        f"sample {name}{where}: {type(error).__name__}: {error}", name
                    ) from error
                log.warning(
                    "rank %d: evenstep: sample %d%s is skipped: %s: %s",
                    self._rank,
                    name,
                    where,
                    type(error).__name__,
                    error,
                )
                kept.skipped += 1
        sources = np.array(kept.sources, dtype=np.int64)
        places = order[sources]
        if self._explode is not None:
            places = places * _DOCUMENTS + np.array(kept.parts, dtype=np.int64)
        table = MetadataTable.from_samples(kept.facts)
        self._look_for_budgets(table)
        columns = make_columns(table, places, rows[sources], self._cost, self._config)
        if kept.sizes:
            nbytes, structures = np.array(kept.sizes, dtype=np.int64).T
            columns = replace(columns, nbytes=nbytes, structures=structures)
        counts = Counts(kept.dropped, kept.skipped, kept.truncated)
        return Window(place, columns, indices[sources], kept.samples, counts)

    def _look_for_budgets(self, table: MetadataTable) -> None:
        """A misspelt budget would bind nothing; one window without the feature may be right, so it is only said."""
        missing = [name for name in self._config.budgets or () if name not in table.features]
        if missing and len(table) and not self._told:
            self._told = True
            log.warning(
                "no sample of a window has the feature %r, which has a budget: it binds nothing there. Return it from "
                "metadata_fn, in SampleMetadata(tokens, features={%r: ...}).",
                missing[0],
                missing[0],
            )

    def _keep(self, kept: _Kept, source: int, value: Any) -> None:
        """All of a sample's documents, or none: nothing is kept of a sample that cannot be read to its end."""
        parts = [value] if self._explode is None else list(self._explode(value))
        found: list[tuple[int, Any, Described, tuple[int, int]]] = []
        for k, part in enumerate(parts):
            described = self._describe(part)
            if described.metadata.tokens:
                found.append((k, part, described, self._codec.measure(part) if self._travels else (0, 0)))
        for k, part, described, size in found:
            kept.sources.append(source)
            kept.parts.append(k)
            kept.samples.append(part)
            kept.facts.append(described.metadata)
            kept.sizes.append(size)
            kept.truncated += described.truncated
        kept.dropped += len(parts) - len(found)

    def known(
        self,
        place: Place,
        indices: Ints,
        rows: npt.NDArray[np.int32],
        order: Ints,
        owners: npt.NDArray[np.int32],
        metadata: KnownMetadata,
    ) -> Window:
        """The same window from lengths known ahead: nothing is read."""
        largest = int(indices.max(initial=-1))
        if largest >= len(metadata):
            raise ValueError(
                f"the sampler names sample {largest}, metadata has {len(metadata)}: its length is not known. Give metadata "
                "of every sample of the dataset, or an order that stays inside it."
            )
        table = metadata.take(indices)
        parts = None
        if self._explode is not None:
            sample, parts, table = open_table(table)
            order = order[sample] * _DOCUMENTS + parts[:, 0]
            indices, rows, owners = indices[sample], rows[sample], owners[sample]
        over = table.tokens > self._config.seq_len
        if over.any():
            table = _clip(table, indices, self._config)
        truncated = int(over.sum()) if self._config.oversized == "truncate" else 0
        kept = np.flatnonzero(table.tokens > 0)
        dropped = len(indices) - len(kept)
        if dropped:
            if self._config.empty == "error":
                index = int(indices[np.flatnonzero(table.tokens == 0)[0]])
                raise SampleError(f"sample {index}: {EMPTY}", index)
            table, order, rows = table.take(kept), order[kept], rows[kept]
            indices, owners = indices[kept], owners[kept]
            parts = None if parts is None else parts[kept]
        columns = make_columns(table, order, rows, self._cost, self._config)
        counts = Counts(dropped=dropped, truncated=truncated)
        return Window(place, columns, indices, [], counts, owners, parts)


def _clip(table: MetadataTable, indices: Ints, config: LoaderConfig) -> MetadataTable:
    limit = config.seq_len
    if config.oversized == "error":
        k = int(np.argmax(table.tokens > limit))
        raise SampleError(
            f"sample {int(indices[k])}: {oversized_message(int(table.tokens[k]), limit)}", int(indices[k])
        )
    if config.oversized == "single":
        return table
    facts = []
    for k in range(len(table)):
        documents = table.documents[table.document_offsets[k] : table.document_offsets[k + 1]].tolist()
        tokens, loss = int(table.tokens[k]), int(table.loss_tokens[k])
        features = {name: float(column[k]) for name, column in table.features.items()}
        if tokens > limit:
            # How many of its loss tokens lie beyond the cut is only known where all of them carry a loss.
            loss = limit - 1 if loss == tokens - 1 else -1
            tokens, documents = limit, list(cut_documents(documents, limit))
        facts.append(SampleMetadata(tokens, features, None if loss < 0 else loss, documents))
    return MetadataTable.from_samples(facts)


def make_columns(
    table: MetadataTable, order: Ints, rows: npt.NDArray[np.int32], cost: CostModel, config: LoaderConfig
) -> Columns:
    """Columns of samples that nobody has encoded: costs by the model, features by the budgets.

    Raises:
        ValueError: The cost model broke its contract.
    """
    n = len(table)
    costs = call("the cost model", checked_costs, cost, table)
    names = tuple(sorted(config.budgets or {}))
    missing = np.zeros(n)
    features = [np.asarray(table.features.get(name, missing), dtype=np.float64) for name in names]
    return Columns(
        order=order,
        rows=rows,
        tokens=table.tokens,
        loss_tokens=table.loss_tokens,
        nbytes=np.zeros(n, dtype=np.int64),
        structures=np.zeros(n, dtype=np.int64),
        costs=costs if costs.ndim == 2 else costs[:, None],
        features=np.column_stack(features) if features else np.zeros((n, 0)),
        names=names,
    )
