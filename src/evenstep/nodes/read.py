"""Reading samples: each one is fetched, understood, typed and sized here, so that every fault has its index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.comm.codec import Codec, PayloadCodec
from evenstep.comm.columns import Columns
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import DEFAULT_COST, CostModel, checked_costs
from evenstep.errors import SampleError
from evenstep.nodes.items import Place, Window
from evenstep.packing import count_loss_tokens
from evenstep.samples import MetadataTable, SampleMetadata

__all__ = ["SampleReader", "describe_sample", "make_columns"]

log = logging.getLogger("evenstep")

Ints = npt.NDArray[np.int64]


class SampleReader:
    """Turns dataset indices into the columns and payloads of a window.

    Args:
        dataset: Anything with ``dataset[i]``, or None where nothing is read.
        config: Policies for oversized, empty and unreadable samples.
        plane: Samples are checked to be encodable where it has more than one rank.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        cost: Cost model.
        codec: How samples travel.
    """

    def __init__(
        self,
        dataset: Any,
        config: LoaderConfig,
        plane: DataPlane,
        *,
        metadata_fn: Callable[[Any], Any] | None = None,
        cost: CostModel | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._dataset = dataset
        self._config = config
        self._metadata_fn = metadata_fn
        self._cost = DEFAULT_COST if cost is None else cost
        self._codec = PayloadCodec() if codec is None else codec
        self._travels = plane.balance is not None and len(plane.balance.ranks) > 1

    def read(self, place: Place, indices: Ints, rows: npt.NDArray[np.int32], order: Ints) -> Window:
        """Read the samples ``indices``; int64, int32 and int64 ``[n]``.

        Raises:
            SampleError: A sample cannot be read, measured or encoded, or breaks a policy.
        """
        kept: list[int] = []
        samples: list[Any] = []
        facts: list[SampleMetadata] = []
        sizes: list[tuple[int, int]] = []
        dropped = skipped = 0
        for k, index in enumerate(indices.tolist()):
            try:
                sample = self._fetch(index)
                metadata = describe_sample(sample, self._metadata_fn, self._config)
                size = self._codec.measure(sample) if self._travels else (0, 0)
            except Exception as error:
                if self._config.on_sample_error == "skip":
                    log.warning("sample %d is skipped: %s: %s", index, type(error).__name__, error)
                    skipped += 1
                    continue
                raise SampleError(f"sample {index}: {type(error).__name__}: {error}", index) from error
            if metadata.tokens == 0:
                dropped += 1
                continue
            kept.append(k)
            samples.append(sample)
            facts.append(metadata)
            sizes.append(size)
        table = MetadataTable.from_samples(facts)
        columns = make_columns(table, order[kept], rows[kept], self._cost, self._config)
        if sizes:
            nbytes, structures = np.array(sizes, dtype=np.int64).T
            columns = replace(columns, nbytes=nbytes, structures=structures)
        return Window(place, columns, indices[kept], samples, dropped, skipped)

    def known(
        self, place: Place, indices: Ints, rows: npt.NDArray[np.int32], order: Ints, metadata: MetadataTable
    ) -> Window:
        """The same window from lengths known ahead: nothing is read."""
        table = metadata.take(indices)
        if (table.tokens > self._config.seq_len).any():
            table = _clip(table, indices, self._config)
        kept = np.flatnonzero(table.tokens > 0)
        if len(kept) < len(indices):
            if self._config.empty == "error":
                index = int(indices[np.flatnonzero(table.tokens == 0)[0]])
                raise SampleError(f"sample {index}: {_EMPTY}", index)
            table, order, rows = table.take(kept), order[kept], rows[kept]
        columns = make_columns(table, order, rows, self._cost, self._config)
        return Window(place, columns, indices[kept], [], len(indices) - len(kept))

    def _fetch(self, index: int) -> Any:
        if self._dataset is None:
            raise ValueError(
                "this rank reads samples but was built with dataset=None; pass the dataset on every reader rank"
            )
        return self._dataset[index]


_EMPTY = "it has no tokens, and empty='error' refuses that; use empty='drop' to leave such samples out"


def describe_sample(
    sample: Any, metadata_fn: Callable[[Any], Any] | None, config: LoaderConfig
) -> SampleMetadata:
    """What planning needs to know of one sample, policies applied.

    Raises:
        TypeError: ``metadata_fn`` returned something else than tokens or `SampleMetadata`.
        ValueError: The sample is oversized or empty, and the policy refuses that.
    """
    told: Any = _default_tokens(sample) if metadata_fn is None else metadata_fn(sample)
    if isinstance(told, (int, np.integer)) and not isinstance(told, bool):
        told = SampleMetadata(int(told))
    if not isinstance(told, SampleMetadata):
        raise TypeError(
            f"metadata_fn returned {told!r} ({type(told).__name__}), expected the number of tokens (int) or a "
            "SampleMetadata"
        )
    tokens = told.tokens
    if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 0:
        raise TypeError(
            f"metadata_fn returned tokens={tokens!r} ({type(tokens).__name__}), expected an int >= 0"
        )
    if told.documents is not None and sum(told.documents) != tokens:
        raise ValueError(
            f"metadata_fn returned documents of {sum(told.documents)} tokens in a sample of {tokens} tokens"
        )
    if tokens == 0 and config.empty == "error":
        raise ValueError(_EMPTY)
    limit = config.seq_len
    if tokens > limit and config.oversized == "error":
        raise ValueError(_oversized(int(tokens), limit))
    cut = tokens > limit and config.oversized == "truncate"
    loss = told.loss_tokens
    if loss is None:
        loss = count_loss_tokens(sample, limit if cut else None)
    if cut:
        documents = None if told.documents is None else _cut_documents(told.documents, limit)
        return replace(told, tokens=limit, documents=documents, loss_tokens=loss)
    return replace(told, loss_tokens=loss)


def _default_tokens(sample: Any) -> int:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise TypeError(
            f"a sample of type {type(sample).__name__} without 'input_ids' says nothing of its length; pass "
            "metadata_fn=lambda sample: number_of_tokens"
        )
    return len(sample["input_ids"])


def _oversized(tokens: int, limit: int) -> str:
    return (
        f"it has {tokens} tokens, seq_len is {limit}: it fits no row. Raise seq_len, split it, or choose "
        "oversized='truncate' or 'single'"
    )


def _cut_documents(documents: Any, limit: int) -> tuple[int, ...]:
    ends = np.minimum(np.cumsum(documents), limit)
    return tuple(int(d) for d in np.diff(ends, prepend=0) if d > 0)


def _clip(table: MetadataTable, indices: Ints, config: LoaderConfig) -> MetadataTable:
    limit = config.seq_len
    if config.oversized == "error":
        k = int(np.argmax(table.tokens > limit))
        raise SampleError(
            f"sample {int(indices[k])}: {_oversized(int(table.tokens[k]), limit)}", int(indices[k])
        )
    if config.oversized == "single":
        return table
    facts = []
    for k in range(len(table)):
        documents = table.documents[table.document_offsets[k] : table.document_offsets[k + 1]]
        tokens, loss = int(table.tokens[k]), int(table.loss_tokens[k])
        features = {name: float(column[k]) for name, column in table.features.items()}
        if tokens > limit:
            # How many of its loss tokens lie beyond the cut is only known where all of them carry a loss.
            loss = limit - 1 if loss == tokens - 1 else -1
            tokens, documents = limit, np.asarray(_cut_documents(documents, limit))
        known = None if loss < 0 else loss
        facts.append(SampleMetadata(tokens, features, known, [int(d) for d in documents]))
    return MetadataTable.from_samples(facts)


def make_columns(
    table: MetadataTable, order: Ints, rows: npt.NDArray[np.int32], cost: CostModel, config: LoaderConfig
) -> Columns:
    """Columns of samples that nobody has encoded: costs by the model, features by the budgets.

    Raises:
        ValueError: The cost model broke its contract.
    """
    n = len(table)
    costs = checked_costs(cost, table)
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
        costs=costs.reshape(n, len(cost.stages)),
        features=np.column_stack(features) if features else np.zeros((n, 0)),
        names=names,
    )
